"""Small requests, answered in the loop: all that came in one of its turns are one run of the model.

A request of a few numbers takes a thread longer to hand over, and to wake for, than to answer. So
what is plain (JSON rows, a model that is quick and free) is read, run and written where it came in,
together with whatever else came in the same turn. All else goes the way of every request, with its
limits, its patience and its errors: nothing is refused here.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stoker.core.errors import UserError
from stoker.serve.access_log import AccessLog
from stoker.serve.auth import Keys, Role
from stoker.serve.dataplane import DataPlane, RunAtOnce
from stoker.serve.errors import ServeError
from stoker.serve.requests import ModelSpec
from stoker.serve.rest import decode, encode, routes
from stoker.serve.rest.compressed import compressed, takes_gzip
from stoker.serve.rest.messages import Answer, Scope, header, headers
from stoker.serve.trail import Trail

MAX_BYTES = 16 << 10
"""Largest body that is taken: the loop reads nothing else meanwhile."""

_PATH, _METHOD = b"/v1/models/", b":predict"

_NOT_PLAIN = frozenset(
    (b"transfer-encoding", b"content-encoding", b"expect", b"upgrade", b"traceparent")
)
"""Headers of a request that is not taken."""

_TENSOR = b"octet-stream"


class Options(Protocol):
    """What of the application's options the lane needs."""

    @property
    def keys(self) -> Keys | None:
        """Who may ask; everybody if None."""

    @property
    def access_log(self) -> AccessLog | None:
        """Where a line for each request goes; nowhere if None."""


class App(Protocol):
    """The application behind the lane."""

    plane: DataPlane

    @property
    def options(self) -> Options:
        """Its own."""

    def note(
        self,
        scope: Scope,
        trail: Trail,
        answer: Answer,
        *,
        packed: bytes | None,
        key: str,
        bytes_in: int,
    ) -> None:
        """Write the line of a request that is over."""


class Connection(Protocol):
    """Where requests come in."""

    transport: asyncio.Transport

    def answer(self, small: Small, raw: bytes, *, packed: bytes | None, close: bool) -> None:
        """Write the answer to a request of the lane."""

    def leave_to_app(self, small: Small) -> None:
        """Let a request of the lane go the way of the others."""


class _Nobody:
    """Stands where uvicorn tells a waiting application something."""

    def set(self) -> None:
        """Nobody waits."""


@dataclass(eq=False, kw_only=True, slots=True)
class Small:
    """A request; to its connection it is what uvicorn calls a cycle."""

    protocol: Connection
    """Where it came in."""

    scope: Scope
    """ASGI's."""

    keep_alive: bool
    """Whether the connection stays after the answer."""

    body: bytearray = field(default_factory=bytearray)
    """All of it, once it is given to the lane."""

    came_s: float = 0.0
    """When it was whole, by the monotonic clock."""

    key: str = ""
    """The name of the key that it came with."""

    rows: Sequence[Any] = ()
    """Its `instances`."""

    message_event: Any = field(default_factory=_Nobody)
    disconnected: bool = False
    more_body: bool = False
    response_started: bool = False
    response_complete: bool = False


def is_small(method: bytes, target: bytes, given: Sequence[tuple[bytes, bytes]]) -> bool:
    """Whether a request is one for the lane, by its line and headers.

    Args:
        method: POST.
        target: Path and query as sent.
        given: Headers, their names in lower case.
    """
    named = method == b"POST" and target.startswith(_PATH) and target.endswith(_METHOD)
    if not named or b"%" in target or b"?" in target:
        return False
    size = MAX_BYTES + 1
    for name, value in given:
        if name == b"content-length":
            size = int(value)
        elif name in _NOT_PLAIN or (name in (b"content-type", b"accept") and _TENSOR in value):
            return False
    return size <= MAX_BYTES


class Lane:
    """What came in one turn of the loop; used by the loop's thread only."""

    def __init__(self, app: App) -> None:
        """Args: app: what answers all that the lane does not."""
        self._app = app
        self._plane = app.plane
        self._waiting: list[Small] = []

    def add(self, small: Small) -> None:
        """Take a whole request; it is answered before the loop waits again."""
        small.came_s = time.monotonic()
        self._waiting.append(small)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        waiting, self._waiting = self._waiting, []
        groups: dict[tuple[str, str], list[Small]] = {}
        for small in waiting:
            if small.protocol.transport.is_closing():
                continue  # nobody waits for it
            signature = self._read(small)
            if signature is None:
                small.protocol.leave_to_app(small)
            else:
                groups.setdefault((small.scope["path"], signature), []).append(small)
        for (path, signature), group in groups.items():
            self._answer(path, signature, group)

    def _read(self, small: Small) -> str | None:
        """Its rows and who sent it; the signature's name, None where it is not plain."""
        keys = self._app.options.keys
        try:
            if keys is not None:
                small.key = keys.check(headers(small.scope), role=Role.PREDICT).name
            body = decode.parse_body(bytes(small.body))
        except (ServeError, UserError):  # said where every error is
            return None
        if not body.rows:
            return None
        small.rows = body.value
        return body.signature

    def _answer(self, path: str, signature: str, group: list[Small]) -> None:
        spec = _spec(path)
        found, texts = None, []
        if spec is not None:
            rows = [row for small in group for row in small.rows]
            body = decode.PredictBody(signature=signature, rows=True, value=rows)
            found = self._plane.predict_at_once(
                spec,
                signature,
                functools.partial(decode.read_inputs, body),
                came_s=[small.came_s for small in group],
                sizes=[len(small.rows) for small in group],
            )
        if found is not None:
            try:
                texts = encode.rows_of(found.outputs)
            except UserError:
                found = None
        if found is None or len(texts) != sum(len(small.rows) for small in group):
            for small in group:
                small.protocol.leave_to_app(small)
            return
        first = 0
        for small in group:
            last = first + len(small.rows)
            self._send(small, encode.predictions_of(texts[first:last]).encode(), found)
            first = last

    def _send(self, small: Small, raw: bytes, found: RunAtOnce) -> None:
        packed = compressed(raw) if takes_gzip(header(small.scope, b"accept-encoding")) else None
        if self._app.options.access_log is not None:
            trail = Trail(
                began_s=small.came_s,
                model=found.model.name,
                version=found.model.version,
                signature=found.signature,
                rows=len(small.rows),
                code="OK",
            )
            trail.ran(found.began_s, found.ended_s, came_s=small.came_s)
            self._app.note(
                small.scope,
                trail,
                Answer(body=raw),
                packed=packed,
                key=small.key,
                bytes_in=len(small.body),
            )
        small.protocol.answer(small, raw, packed=packed, close=self._plane.draining)


@functools.lru_cache(maxsize=256)
def _spec(path: str) -> ModelSpec | None:
    try:
        return routes.model_of(path)
    except ServeError:
        return None
