"""The REST interface: a bare ASGI application that converts to and from the dataplane.

Source: TensorFlow Serving, RESTful API. A framework between uvicorn and this would cost more
than all of it: FastAPI serves 3-8 k requests/s where uvicorn serves 43 k.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.deadline import Deadline
from stoker.serve.errors import Code, ServeError
from stoker.serve.limits import METRICS_PATH
from stoker.serve.observability.access_log import AccessLog, Entry, caller_of, request_id_of
from stoker.serve.request_record import RequestRecord
from stoker.serve.rest import routes, v2
from stoker.serve.rest.compressed import CODINGS, compressed, decompressed, takes_gzip
from stoker.serve.rest.http_error import HttpError, error_body
from stoker.serve.rest.messages import TEXT, Answer, Asked, Headers, Scope, header, headers
from stoker.serve.rest.probes import PROBES
from stoker.serve.rest.protocol import GONE, RETRY_AFTER_S
from stoker.serve.security.auth import Keys, Role

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_log = logging.getLogger(__name__)

_CLIENT_LEFT = Code.CANCELLED.http_status

_OVERDUE_S = 1.0
"""What a request gets beyond its deadline to end by itself, before it is answered without its thread."""


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

    access_log: AccessLog | None = None
    """Is told of each request that is over; nobody is if None."""

    cors: bool = False
    """Whether pages of other origins may ask."""


@dataclass(kw_only=True, slots=True)
class _Asking:
    """What one request holds and is known by while it is answered."""

    deadline: Deadline
    key: str = ""
    bytes_in: int = 0
    held_bytes: int = 0


class RestApp:
    """The ASGI application."""

    def __init__(self, plane: DataPlane, options: RestOptions) -> None:
        """Args: plane: what answers; options: what requests may take."""
        self.plane = plane
        self.options = options
        self._threads = ThreadPoolExecutor(options.workers, thread_name_prefix="stoker-rest")
        self._in_flight = 0
        self.held_bytes = 0
        self.headers: Headers = _cors_headers(options) if options.cors else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        self._in_flight += 1
        asking = _Asking(deadline=Deadline(self.options.timeout_s))
        packed = None
        try:
            answer = await self._answer(scope, receive, asking)
            if takes_gzip(header(scope, b"accept-encoding")):
                packed = await self._in_thread(compressed, answer.raw())
        except HttpError as refused:
            answer = Answer(status=refused.status, body=refused.body, close=True)
        except ConnectionResetError:  # the client left before its request was whole
            self._note(scope, asking, Answer(status=_CLIENT_LEFT, body=""))
            return
        finally:
            self._in_flight -= 1
            self.held_bytes -= asking.held_bytes
        self._note(scope, asking, answer, packed=packed)
        if self.headers and _interface(scope["path"]) is not None:
            answer = dataclasses.replace(answer, headers=answer.headers + self.headers)
        await _send(answer, send, packed=packed, close=answer.close or self.plane.draining)

    def close(self) -> None:
        """End the threads; those that a model holds are left to the end of the process."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _answer(self, scope: Scope, receive: Receive, asking: _Asking) -> Answer:
        method, path = scope["method"], scope["path"]
        probe = PROBES.get(path)
        if probe is not None and method in ("GET", "HEAD"):
            return probe(self.plane)
        if method == "OPTIONS" and _interface(path) is not None:  # a browser sends no key with it
            return routes.preflight(self.plane, origin=header(scope, b"origin"))
        if self.options.keys is not None:
            try:
                asking.key = self.options.keys.check(headers(scope), role=Role.PREDICT).name
            except ServeError as error:
                raise HttpError(error.code.http_status, error.message) from error
        if path == self.options.metrics_path and method in ("GET", "HEAD"):
            text = await self._in_thread(self.plane.metrics.exposition)
            return Answer(body=text, content_type=TEXT)
        interface = _interface(path)
        if interface is None:
            return Answer(status=404, body="", content_type="text/plain")
        if self._in_flight > self.options.max_in_flight:
            raise HttpError(503, "too many requests are under way")
        packed = header(scope, b"content-encoding").lower()
        if packed not in ("", "identity", *CODINGS):
            raise HttpError(415, f"the body must be plain or {' or '.join(CODINGS)}")
        body = await self._read_body(scope, receive, asking)
        scope[GONE] = asking.deadline.cancel  # the connection calls it when it is lost
        return await self._in_time(
            asking.deadline, self._api_answer, scope, (body, packed), asking, interface
        )

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def _in_time(self, deadline: Deadline, work: Callable[..., Answer], *args: Any) -> Answer:
        """The answer, or that it took too long: whatever holds the thread does not hold the client."""
        loop = asyncio.get_running_loop()
        waiting = loop.run_in_executor(self._threads, work, *args)
        expired: list[bool] = []

        def expire() -> None:
            expired.append(True)
            waiting.cancel()

        timer = loop.call_later(max(deadline.left_s, 0.0) + _OVERDUE_S, expire)
        try:
            return await waiting
        except asyncio.CancelledError:
            if not expired:
                raise
            code = Code.DEADLINE_EXCEEDED
            return Answer(status=code.http_status, body=error_body("Deadline exceeded"))
        finally:
            timer.cancel()

    async def _read_body(self, scope: Scope, receive: Receive, asking: _Asking) -> bytes:
        """The whole body; what it holds of memory is noted.

        Raises:
            HttpError: it is larger than the limit, or too much is held already.
            ConnectionResetError: the client left.
        """
        limit = self.options.max_body_bytes
        length = header(scope, b"content-length").lstrip("0")  # the parser has checked its digits
        if len(length) > len(str(limit)) or int(length or "0") > limit:
            raise HttpError(413, f"the body must have at most {limit:,} bytes")
        parts: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            parts.append(message.get("body", b""))
            asking.bytes_in += len(parts[-1])
            asking.held_bytes += len(parts[-1])
            self.held_bytes += len(parts[-1])
            more = message.get("more_body", False)
            if asking.bytes_in > limit:
                raise HttpError(413, f"the body must have at most {limit:,} bytes")
            if self.held_bytes > self.options.max_held_bytes:
                raise HttpError(503, "too much is held of other requests")
        return b"".join(parts)

    def _api_answer(
        self, scope: Scope, body: tuple[bytes, str], asking: _Asking, interface: Interface
    ) -> Answer:
        raw, coding = body
        try:
            if coding in CODINGS:
                raw = decompressed(raw, coding=coding, limit=self.options.max_body_bytes)
            return interface(self.plane, Asked(scope=scope, body=raw, deadline=asking.deadline))
        except ServeError as error:
            return Answer(status=error.code.http_status, body=error_body(error.message))
        except HttpError:
            raise
        except Exception:  # noqa: BLE001 - the edge: no client sees more of a bug than that it is one
            _log.exception("a request met a bug")
            return Answer(status=500, body=error_body("the server has a bug; its log says more"))

    def note(
        self,
        scope: Scope,
        record: RequestRecord,
        answer: Answer,
        *,
        packed: bytes | None = None,
        key: str = "",
        bytes_in: int = 0,
    ) -> None:
        """Tell of a request that is over.

        Args:
            scope: Its request.
            record: What is known of it.
            answer: Its answer.
            packed: The body of the answer, if it goes out compressed.
            key: The name of the key that it came with.
            bytes_in: Bytes of its body.
        """
        log = self.options.access_log
        if log is None:
            return
        client = scope.get("client") or ("", "")
        log.add(
            Entry(
                protocol="REST",
                method=f"{scope['method']} {scope['path']}",
                status=answer.status,
                record=record,
                peer=f"{client[0]}:{client[1]}",
                bytes_in=bytes_in,
                bytes_out=len(answer.raw() if packed is None else packed),
                request_id=request_id_of(header(scope, b"x-request-id")),
                key=key,
                caller=caller_of(scope["headers"]),
            )
        )

    def _note(
        self, scope: Scope, asking: _Asking, answer: Answer, *, packed: bytes | None = None
    ) -> None:
        record, key, size = asking.deadline.record, asking.key, asking.bytes_in
        self.note(scope, record, answer, packed=packed, key=key, bytes_in=size)


Interface = Callable[[DataPlane, Asked], Answer]


def _interface(path: str) -> Interface | None:
    """What answers on a path, None where nothing does."""
    if path[:4].lower() == "/v1/":
        return routes.answer
    return v2.answer if path == "/v2" or path.startswith("/v2/") else None


def _cors_headers(options: RestOptions) -> Headers:
    """What tells a browser that pages of other origins may ask.

    Source: TensorFlow Serving, `AddCORSHeaders`; it has no keys.
    """
    keys = b", Authorization, X-API-Key" if options.keys else b""
    return (
        (b"access-control-allow-origin", b"*"),
        (b"access-control-allow-methods", b"POST, GET"),
        (b"access-control-allow-headers", b"Content-Type" + keys),
    )


_TRY_LATER = (429, 503)
_CHALLENGE = Code.UNAUTHENTICATED.http_status


async def _send(answer: Answer, send: Send, *, packed: bytes | None, close: bool) -> None:
    raw = answer.raw() if packed is None else packed
    said: list[tuple[bytes, bytes]] = [
        (b"content-type", answer.content_type.encode()),
        (b"content-length", str(len(raw)).encode()),
        *answer.headers,
    ]
    if packed is not None:
        said += [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
    if answer.status in _TRY_LATER:
        said.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    if answer.status == _CHALLENGE:
        said.append((b"www-authenticate", b"Bearer"))
    if close:
        said.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": said})
    await send({"type": "http.response.body", "body": raw})
