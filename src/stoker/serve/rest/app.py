"""The REST interface: a bare ASGI application that converts to and from the dataplane.

Source: TensorFlow Serving, RESTful API. A framework between uvicorn and this would cost more
than all of it: FastAPI serves 3-8 k requests/s where uvicorn serves 43 k.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stoker.serve.auth import Keys, Role
from stoker.serve.dataplane import DataPlane
from stoker.serve.errors import Code, ServeError
from stoker.serve.patience import Patience
from stoker.serve.rest import routes
from stoker.serve.rest.compressed import compressed, decompressed, takes_gzip
from stoker.serve.rest.limits import METRICS_PATH
from stoker.serve.rest.protocol import RETRY_AFTER_S
from stoker.serve.rest.refused import Refused, error_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_log = logging.getLogger(__name__)

_JSON = "application/json"
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One HTTP answer."""

    status: int = 200
    """The HTTP status."""

    body: str
    """The text."""

    content_type: str = _JSON
    """Its media type."""

    close: bool = False
    """Whether the connection must end: a part of the request was not read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestOptions:
    """What requests may take."""

    workers: int = 8
    """Threads that answer."""

    max_body_bytes: int = 64 << 20
    """Largest body, also after decompression."""

    max_held_bytes: int = 512 << 20
    """Most bytes of bodies that are held at once, over all requests."""

    max_in_flight: int = 1024
    """Most requests under way; another gets 503."""

    timeout_s: float = 30.0
    """Longest that a request waits for its model, seconds."""

    keys: Keys | None = None
    """Who may ask; everybody if None."""

    metrics_path: str | None = METRICS_PATH
    """Where the metrics are; nowhere if None."""


class RestApp:
    """The ASGI application."""

    def __init__(self, plane: DataPlane, options: RestOptions) -> None:
        """Args: plane: what answers; options: what requests may take."""
        self._plane = plane
        self._options = options
        self._threads = ThreadPoolExecutor(options.workers, thread_name_prefix="stoker-rest")
        self._in_flight = 0
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        self._in_flight += 1
        packed = None
        try:
            answer = await self._answer(scope, receive)
            if takes_gzip(_header(scope, b"accept-encoding")):
                packed = await self._in_thread(compressed, answer.body.encode())
        except Refused as refused:
            answer = Answer(status=refused.status, body=refused.body, close=True)
        except ConnectionResetError:  # the client left before its request was whole
            return
        finally:
            self._in_flight -= 1
        await _send(answer, send, packed=packed, close=answer.close or self._plane.draining)

    def close(self) -> None:
        """End the threads."""
        self._threads.shutdown()

    async def _answer(self, scope: Scope, receive: Receive) -> Answer:
        method, path = scope["method"], scope["path"]
        fixed = _FIXED.get(path)
        if fixed is not None and method in ("GET", "HEAD"):
            return fixed(self._plane)
        if self._options.keys is not None:
            try:
                self._options.keys.check(_headers(scope), role=Role.PREDICT)
            except ServeError as error:
                raise Refused(error.code.http_status, error.message) from error
        if path == self._options.metrics_path and method in ("GET", "HEAD"):
            text = await self._in_thread(self._plane.metrics.exposition)
            return Answer(body=text, content_type=_TEXT)
        if not path.lower().startswith("/v1/"):
            return Answer(status=404, body="", content_type="text/plain")
        if self._in_flight > self._options.max_in_flight:
            raise Refused(503, "too many requests are under way")
        patience = Patience(self._options.timeout_s)
        packed = _header(scope, b"content-encoding").lower()
        if packed not in ("", "identity", "gzip"):
            raise Refused(415, "the body must be plain or gzip")
        body, size = await self._read_body(scope, receive)
        try:
            return await self._in_thread(
                self._api_answer, method, path, (body, packed == "gzip"), patience
            )
        finally:
            self._held_bytes -= size

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def _read_body(self, scope: Scope, receive: Receive) -> tuple[bytes, int]:
        """The whole body, and its size, which the caller counts off when he is done with it.

        Raises:
            Refused: it is larger than the limit, or too much is held already.
            ConnectionResetError: the client left.
        """
        limit = self._options.max_body_bytes
        if int(_header(scope, b"content-length") or "0") > limit:
            raise Refused(413, f"the body must have at most {limit:,} bytes")
        parts: list[bytes] = []
        size, more = 0, True
        try:
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ConnectionResetError
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                self._held_bytes += len(parts[-1])
                more = message.get("more_body", False)
                if size > limit:
                    raise Refused(413, f"the body must have at most {limit:,} bytes")
                if self._held_bytes > self._options.max_held_bytes:
                    raise Refused(503, "too much is held of other requests")
        except BaseException:
            self._held_bytes -= size
            raise
        return b"".join(parts), size

    def _api_answer(
        self, method: str, path: str, body: tuple[bytes, bool], patience: Patience
    ) -> Answer:
        raw, packed = body
        try:
            if packed:
                raw = decompressed(raw, limit=self._options.max_body_bytes)
            return Answer(body=routes.answer(self._plane, method, path, raw, patience=patience))
        except ServeError as error:
            return Answer(status=error.code.http_status, body=error_body(error.message))
        except Refused:
            raise
        except Exception:  # noqa: BLE001 - the edge: no client sees more of a bug than that it is one
            _log.exception("a request met a bug")
            return Answer(status=500, body=error_body("the server has a bug; its log says more"))


def _header(scope: Scope, wanted: bytes) -> str:
    """The last value of a header, empty if there is none."""
    found = b""
    for name, value in scope["headers"]:
        if name == wanted:
            found = value
    return found.decode("latin-1")


def _headers(scope: Scope) -> dict[str, str]:
    return {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]}


def _live(_plane: DataPlane) -> Answer:
    return Answer(body='{"live": true}')


def _ready(plane: DataPlane) -> Answer:
    why = plane.unready()
    if why:
        return Answer(status=503, body=json.dumps({"ready": False, "reason": why}))
    return Answer(body='{"ready": true}')


_FIXED: dict[str, Callable[[DataPlane], Answer]] = {"/livez": _live, "/readyz": _ready}

_TRY_LATER = (429, 503)
_CHALLENGE = Code.UNAUTHENTICATED.http_status


async def _send(answer: Answer, send: Send, *, packed: bytes | None, close: bool) -> None:
    raw = answer.body.encode() if packed is None else packed
    headers: list[tuple[bytes, bytes]] = [
        (b"content-type", answer.content_type.encode()),
        (b"content-length", str(len(raw)).encode()),
    ]
    if packed is not None:
        headers += [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
    if answer.status in _TRY_LATER:
        headers.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    if answer.status == _CHALLENGE:
        headers.append((b"www-authenticate", b"Bearer"))
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
