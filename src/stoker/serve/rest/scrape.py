"""Answers scrapes of the metrics. A separate thread builds each answer, and all scrapes that wait for it share it."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.extra_routes import ExtraRoutes
from stoker.serve.rest.messages import Answer, compressed
from stoker.serve.runtime.gil_yield import GilYield, YieldGil
from stoker.telemetry import exposition, openmetrics
from stoker.telemetry.catalogue.serving import MODEL_LOADED

MAX_LOAD = 0.2
"""Maximum share of a core that scrapes take, however often they are sent, so that the rest is left for models."""


class Form(enum.Enum):
    """Formats of a scrape. Each has a path of its own; headers do not choose a format."""

    PROMETHEUS = exposition.CONTENT_TYPE
    OPENMETRICS = openmetrics.CONTENT_TYPE


def forms_of(metrics_path: str | None) -> dict[str, Form]:
    """Return path -> text format of the metrics there; empty if the server exports no metrics."""
    if metrics_path is None:
        return {}
    return {
        metrics_path: Form.PROMETHEUS,
        f"{metrics_path.rstrip('/')}/openmetrics": Form.OPENMETRICS,
    }


class Scrapes:
    """Builds the answers to scrapes. Only the event loop's thread may call its methods."""

    def __init__(self, plane: DataPlane, extra: ExtraRoutes | None) -> None:
        """Args: plane: has the metrics; extra: has further metrics."""
        self._plane, self._extra = plane, extra
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stoker-scrape")
        self._building = asyncio.Lock()
        self._next: dict[tuple[Form, bool], asyncio.Task[Answer]] = {}
        self._not_before_s = 0.0

    async def answer(self, form: Form, *, gzip: bool) -> Answer:
        """Return the metrics. They are collected after this call begins, so they are not outdated.

        Args:
            form: The format.
            gzip: Whether the client accepts a compressed answer.
        """
        key = form, gzip
        building = self._next.get(key)
        if building is None:
            building = self._next[key] = asyncio.create_task(self._build(form, gzip))
        return await asyncio.shield(building)

    def close(self) -> None:
        """End the thread after the answer that it is building."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _build(self, form: Form, gzip: bool) -> Answer:
        try:
            async with self._building:
                await asyncio.sleep(max(self._not_before_s - time.monotonic(), 0.0))
                del self._next[form, gzip]  # a scrape that arrives from now on gets the next answer
                loop = asyncio.get_running_loop()
                answer, cpu_s = await loop.run_in_executor(self._thread, self._built, form, gzip)
                self._not_before_s = time.monotonic() + cpu_s * (1.0 / MAX_LOAD - 1.0)
                return answer
        finally:
            if self._next.get((form, gzip)) is asyncio.current_task():
                del self._next[form, gzip]

    def _built(self, form: Form, gzip: bool) -> tuple[Answer, float]:
        """Return an answer, and the CPU time that it took, seconds."""
        began_s = time.thread_time()
        yield_gil = _Pauses()
        lines: Iterator[str] = chain.from_iterable(
            scraped(self._plane, self._extra, yield_gil=yield_gil)
        )
        if form is Form.OPENMETRICS:
            lines = chain(openmetrics.as_openmetrics(lines), [openmetrics.END])
        body = b"".join(_pieces(lines))
        answer = Answer(
            body=body,
            content_type=form.value,
            packed=compressed(body) if gzip else None,
        )
        return answer, time.thread_time() - began_s


PAUSING_S = 3.0
"""Time after which a scrape continues without pauses, seconds. On a busy machine, each pause takes long, and Prometheus
gives up after 10 s by default."""


class _Pauses:
    """Pauses between the parts of a scrape, so that requests can run; only for the first `PAUSING_S`."""

    def __init__(self) -> None:
        self._pause = GilYield()
        self._until_s = time.monotonic() + PAUSING_S

    def __call__(self) -> None:
        if time.monotonic() < self._until_s:
            self._pause()


def scraped(
    plane: DataPlane, extra: ExtraRoutes | None, *, yield_gil: YieldGil
) -> Iterator[Sequence[str]]:
    """Yield the lines of all metrics in Prometheus's text format.

    Args:
        plane: Has the models and their metrics.
        extra: Has further metrics.
        yield_gil: Called often.
    """
    yield from plane.metrics.blocks(yield_gil)
    yield exposition.family(MODEL_LOADED, plane.models.loaded())
    if extra is not None:
        yield from extra.families(plane.models.served())


_PIECE_LINES = 500
"""Number of lines that are joined at a time. Joining holds the GIL, so it must take less time than a pause of
`GilYield`."""


def _pieces(lines: Iterator[str]) -> Iterator[bytes]:
    while True:
        piece = list(islice(lines, _PIECE_LINES))
        if not piece:
            return
        yield ("\n".join(piece) + "\n").encode()
