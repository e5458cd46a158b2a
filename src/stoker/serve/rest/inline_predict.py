"""Answers small requests in the event loop. Requests that arrive together share one model call.

To pass a request of a few numbers to a thread, and to wake the thread, takes longer than to answer the request. So
plain requests (JSON rows, a model that is quick and idle) are read, run and answered in the event loop. All other
requests, also invalid ones, take the usual path, with its limits, deadline and errors.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any, Protocol

from stoker.core.errors import UserError
from stoker.serve.batching.joined import MANY, in_runs
from stoker.serve.dataplane.joined_runs import JoinedRequests, JoinedRun, of_version
from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.dataplane.requests import ModelSpec
from stoker.serve.errors import ServeError
from stoker.serve.observability.access_log import AccessLog
from stoker.serve.observability.counters import COUNTING
from stoker.serve.request_record import RequestRecord
from stoker.serve.rest import decode, encode, routes
from stoker.serve.rest.header_cache import Head, HeaderCache
from stoker.serve.rest.json_text import QuickJson
from stoker.serve.rest.messages import Answer, Headers, Scope, compressed, named
from stoker.serve.routing import Route
from stoker.serve.runtime.busy_poll import BusyPoll
from stoker.serve.security.auth import Keys, Role


class Options(Protocol):
    """The options of the application that this module uses."""

    @property
    def keys(self) -> Keys | None:
        """The accepted keys; None: every request is accepted."""

    @property
    def access_log(self) -> AccessLog | None:
        """Gets each finished request; None: no log."""

    @property
    def timeout_s(self) -> float:
        """Maximum time that a request waits for its model, seconds."""


class App(Protocol):
    """The application that answers all other requests."""

    plane: DataPlane

    @property
    def options(self) -> Options:
        """Its `State`."""

    @property
    def headers(self) -> Headers:
        """Headers of every answer."""

    def note(
        self,
        scope: Scope,
        record: RequestRecord,
        answer: Answer,
        *,
        packed: bytes | None,
        key: str,
        bytes_in: int,
    ) -> None:
        """Log a finished request."""


class Connection(Protocol):
    """The connection of a request."""

    transport: asyncio.Transport

    def scope_of(self, head: Head) -> Scope:
        """Return ASGI's scope of a request."""

    def answer(self, small: Small, raw: bytes, *, packed: bytes | None, close: bool) -> None:
        """Write the answer to a request of the inline path."""

    def leave_to_app(self, small: Small) -> None:
        """Pass a request of the inline path to the application."""


class _Nobody:
    """Replaces the event with which uvicorn notifies a waiting application."""

    def set(self) -> None:
        """Do nothing: no application waits."""


class Small:
    """A small request. It has the attributes of a uvicorn cycle that its connection uses."""

    __slots__ = (
        "body",
        "came_s",
        "disconnected",
        "head",
        "keep_alive",
        "key",
        "protocol",
        "response_complete",
        "response_started",
        "route",
        "rows",
        "version",
    )

    more_body = False
    message_event = _Nobody()

    def __init__(self, protocol: Connection, head: Head, body: bytes = b"") -> None:
        """Args: protocol: the connection; head: the parsed headers; body: the part of the body that has arrived."""
        self.protocol = protocol
        self.head = head
        self.body = body
        self.keep_alive = head.keep_alive
        self.came_s = 0.0  # when the request was complete, seconds of the monotonic clock
        self.key = ""  # the name of the request's API key
        self.rows: list[Any] = []  # the `instances` of the body
        self.route: Route | None = None  # where a rollout sends the request
        self.version = 0  # the version that answered
        self.disconnected = self.response_started = self.response_complete = False


class InlinePredict:
    """Collects the requests that arrive together, and answers them. Only the event loop's thread uses it."""

    def __init__(self, app: App) -> None:
        """Args: app: answers all requests that the inline path does not."""
        self._app = app
        self._plane = app.plane
        self._waiting: list[Small] = []
        self.heads = HeaderCache()
        self.headers = b"".join(b"%b: %b\r\n" % header for header in app.headers)
        self._hits = app.plane.metrics.head_cache.of(result="hit")
        self._misses = app.plane.metrics.head_cache.of(result="miss")
        self._json = QuickJson()
        self._busy_poll = BusyPoll()

    def add(self, small: Small) -> None:
        """Add a complete request. It is answered before the event loop waits again."""
        small.came_s = time.monotonic()
        self._waiting.append(small)
        if len(self._waiting) == 1:
            self._loop = asyncio.get_running_loop()
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        waiting, self._waiting = self._waiting, []
        groups: dict[tuple[str, str, int | None], list[Small]] = {}
        for small in waiting:
            if small.protocol.transport.is_closing():
                continue  # its client is gone
            signature = self._read(small)
            if signature is None:
                small.protocol.leave_to_app(small)
            else:
                key = small.head.path, signature, self._routed(small)
                groups.setdefault(key, []).append(small)
        for (path, signature, version), group in groups.items():
            spec = _spec(path)
            if spec is not None and version is not None:
                spec = of_version(spec.name, version)
            for part in self._parts(spec, group):
                self._answer(spec, signature, part)
        self._count_heads()
        self._busy_poll.stay(self._loop)

    def _count_heads(self) -> None:
        heads = self.heads
        with COUNTING:
            self._hits.put(heads.hits)
            self._misses.put(heads.misses)
        heads.hits = heads.misses = 0

    def _read(self, small: Small) -> str | None:
        """Check the key, parse the body, and return the signature's name; None if the application must answer."""
        keys = self._app.options.keys
        try:
            if keys is not None:
                given = named(small.head.headers)
                small.key = keys.check(given, role=Role.PREDICT).name
            body = decode.parse_body(small.body, parse=self._json.parse)
        except (ServeError, UserError):  # the application reports the error
            return None
        if not body.rows:
            return None
        small.rows = body.value
        return body.signature

    def _routed(self, small: Small) -> int | None:
        """Return the version to which a rollout sends a request; None: no rollout decides."""
        spec = _spec(small.head.path)
        if spec is not None:
            small.route = self._plane.route(spec, small.head.value_of)
        return None if small.route is None else small.route.version

    def _parts(self, spec: ModelSpec | None, group: list[Small]) -> list[list[Small]]:
        """Group requests so that each group fits in one run."""
        if len(group) < MANY or spec is None:
            return [group]
        return in_runs(group, lambda small: len(small.rows), max_rows=self._plane.max_rows(spec))

    def _answer(self, spec: ModelSpec | None, signature: str, group: list[Small]) -> None:
        found, texts = None, []
        sizes = [len(small.rows) for small in group]
        if spec is not None:
            rows = group[0].rows if len(group) == 1 else [r for small in group for r in small.rows]
            joined = self._joined_requests(spec, signature, group, sizes)
            found = self._plane.predict_joined(joined, lambda known: decode.read_rows(rows, known))
        if found is not None:
            try:
                texts = encode.rows_of(found.outputs)
            except UserError:
                found = None
        if found is None or len(texts) != sum(sizes):
            for small in group:
                small.protocol.leave_to_app(small)
            return
        self._plane.answered_joined(joined, found)
        first = 0
        for small, size in zip(group, sizes, strict=True):
            last = first + size
            self._send(small, encode.predictions_of(texts[first:last]).encode(), found)
            first = last

    def _joined_requests(
        self, spec: ModelSpec, signature: str, group: list[Small], sizes: list[int]
    ) -> JoinedRequests:
        routes: list[Route] = []
        if group[0].route is not None:  # then all requests of the group have a route
            routes = [small.route for small in group if small.route is not None]
        return JoinedRequests(
            model=spec,
            signature=signature,
            came_s=[small.came_s for small in group],
            sizes=sizes,
            routes=routes,
            patience_s=[self._app.options.timeout_s] * len(routes),
        )

    def _send(self, small: Small, raw: bytes, found: JoinedRun) -> None:
        packed = compressed(raw) if small.head.takes_gzip else None
        small.version = found.version
        if self._app.options.access_log is not None:
            self._note(small, raw, packed, found)
        small.protocol.answer(small, raw, packed=packed, close=self._plane.draining)

    def _note(self, small: Small, raw: bytes, packed: bytes | None, found: JoinedRun) -> None:
        record = RequestRecord(
            began_s=small.came_s,
            model=found.model,
            version=found.version,
            signature=found.signature,
            rows=len(small.rows),
            code="OK",
        )
        record.ran(found.began_s, found.ended_s, came_s=small.came_s)
        self._app.note(
            small.protocol.scope_of(small.head),
            record,
            Answer(body=raw),
            packed=packed,
            key=small.key,
            bytes_in=len(small.body),
        )


@functools.lru_cache(maxsize=256)
def _spec(path: str) -> ModelSpec | None:
    try:
        return routes.model_of(path)
    except ServeError:
        return None
