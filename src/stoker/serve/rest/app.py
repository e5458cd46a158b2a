"""The REST interface: a plain ASGI application that converts requests and answers to and from the dataplane's.

It uses no web framework, because a framework would take more time than the application: FastAPI serves 3 to 8 thousand
requests/s, uvicorn alone 43 thousand.

Source: TensorFlow Serving, RESTful API.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.deadline import Deadline
from stoker.serve.errors import Code, ServeError
from stoker.serve.extra_routes import ExtraRoutes
from stoker.serve.limits import METRICS_PATH
from stoker.serve.observability.access_log import AccessLog, Entry, caller_of, request_id_of
from stoker.serve.request_record import VERSION_HEADER, RequestRecord
from stoker.serve.rest import outcomes, routes, v2
from stoker.serve.rest.extra_routes import answered_by, check_sender
from stoker.serve.rest.messages import (
    CODINGS,
    Answer,
    Headers,
    HttpError,
    HttpRequest,
    Scope,
    compressed,
    decompressed,
    error_body,
    header,
    headers,
    takes_gzip,
    value_of,
)
from stoker.serve.rest.protocol import GONE, RETRY_AFTER_S, ROUTE
from stoker.serve.rest.scrape import Scrapes, forms_of
from stoker.serve.runtime.counted_threads import CountedThreads
from stoker.serve.security.auth import Keys, Role

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_log = logging.getLogger(__name__)

_CLIENT_DISCONNECTED = Code.CANCELLED.http_status

_OVERDUE_S = 1.0
"""Time after a request's deadline, seconds, after which 504 is answered although the request's thread still runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestOptions:
    """Limits, security and logging of REST."""

    workers: int = 8
    """Number of threads for requests."""

    max_body_bytes: int = 64 << 20
    """Maximum size of a body, bytes, before and after decompression."""

    max_held_bytes: int = 512 << 20
    """Maximum bytes of bodies that all requests together hold at the same time."""

    max_in_flight: int = 1024
    """Maximum number of concurrent requests. A further request gets 503, unless it is a health check."""

    timeout_s: float = 30.0
    """Maximum time that a request waits for its model, seconds."""

    keys: Keys | None = None
    """Accepted API keys; None accepts every request."""

    metrics_path: str | None = METRICS_PATH
    """Path of the metrics; None: metrics are not served."""

    access_log: AccessLog | None = None
    """Gets each finished request; None: no log."""

    cors: bool = False
    """Whether pages of other origins may send requests (CORS)."""

    extra: ExtraRoutes | None = None
    """Answers further paths; None: no further paths."""


@dataclass(kw_only=True, slots=True)
class _RequestState:
    """State of a request while it is answered."""

    deadline: Deadline
    key: str = ""
    bytes_in: int = 0
    held_bytes: int = 0


class RestApp:
    """The ASGI application."""

    def __init__(self, plane: DataPlane, options: RestOptions) -> None:
        """Args: plane: answers the requests; options: limits, security and logging."""
        self.plane = plane
        self.options = options
        self._threads = CountedThreads(
            options.workers,
            "stoker-rest",
            on_change=functools.partial(
                plane.metrics.requests_without_thread.add, entrypoint="REST"
            ),
        )
        self._scrapes = Scrapes(plane, options.extra)
        self._forms = forms_of(options.metrics_path)
        self._in_flight = 0
        self.held_bytes = 0
        self.headers: Headers = _cors_headers(options) if options.cors else ()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; called by the ASGI server."""
        self._in_flight += 1
        state = _RequestState(deadline=Deadline(self.options.timeout_s))
        packed = None
        try:
            answer = await self._answer(scope, receive, state)
            if takes_gzip(header(scope, b"accept-encoding")):
                packed = answer.packed or await self._in_thread(compressed, answer.raw())
        except HttpError as error:
            answer = Answer(status=error.status, body=error.body, close=True)
            if error.status == Code.UNAVAILABLE.http_status:
                routes.count_refused(self.plane, scope["path"])
        except ConnectionResetError:  # the client left before its request was complete
            self._note(scope, state, Answer(status=_CLIENT_DISCONNECTED, body=""))
            return
        finally:
            self._in_flight -= 1
            self.held_bytes -= state.held_bytes
        self._note(scope, state, answer, packed=packed)
        more: Headers = _version_headers(state.deadline.record.version)
        if self.headers and _interface(scope["path"]) is not None:
            more += self.headers
        if more:
            answer = dataclasses.replace(answer, headers=answer.headers + more)
        await _send(answer, send, packed=packed, close=answer.close or self.plane.draining)

    def close(self) -> None:
        """Stop the threads. A thread that is blocked in a model runs until the process ends."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._scrapes.close()

    async def _answer(self, scope: Scope, receive: Receive, state: _RequestState) -> Answer:
        method, path = scope["method"], scope["path"]
        probe = PROBES.get(path)
        if probe is not None and method in ("GET", "HEAD"):
            return probe(self.plane)
        if method == "OPTIONS" and _interface(path) is not None:  # browsers send it without a key
            return routes.preflight(self.plane, origin=header(scope, b"origin"))
        monitored = self._monitored(path, scope) if method in ("GET", "HEAD") else None
        interface = _interface(path)
        extra = None if monitored or outcomes.matches(path) else self.options.extra
        role = None if extra is None else extra.role_of(method, path)
        state.key = self._checked(scope, role or _role(path), is_extra=role is not None)
        if monitored is not None:
            return await monitored()
        if extra is not None and role is not None:
            interface = functools.partial(answered_by, extra, who=state.key)
        if interface is None:
            return Answer(status=404, body="", content_type="text/plain")
        if role is None and method == "GET" and _HEALTH_PATH.fullmatch(path):
            # Answered in the event loop: the server must not look dead while other requests wait for threads.
            return self._api_answer(scope, (b"", ""), state, interface)
        if self._in_flight > self.options.max_in_flight:
            raise HttpError(503, "too many concurrent requests")
        packed = header(scope, b"content-encoding").lower()
        if packed not in ("", "identity", *CODINGS):
            raise HttpError(415, f"Content-Encoding must be identity or {' or '.join(CODINGS)}")
        body = await self._read_body(scope, receive, state)
        state.deadline.record.headers = functools.partial(value_of, scope)
        state.deadline.record.route = scope.get(ROUTE)
        scope[GONE] = state.deadline.cancel  # called when the connection is lost
        return await self._before_deadline(
            state.deadline, self._api_answer, scope, (body, packed), state, interface
        )

    def _monitored(self, path: str, scope: Scope) -> Callable[[], Awaitable[Answer]] | None:
        """Return the function that answers a path of monitoring (metrics, counts of rollouts); None for other paths."""
        form = self._forms.get(path)
        if form is not None:
            gzip = takes_gzip(header(scope, b"accept-encoding"))
            return functools.partial(self._scrapes.answer, form, gzip=gzip)
        counts = routes.rollout_counts(self.plane, path)
        return None if counts is None else functools.partial(self._in_thread, counts)

    def _checked(self, scope: Scope, role: Role, *, is_extra: bool) -> str:
        """Return the owner of the request's key; "" if the server has no keys.

        Raises:
            HttpError: the sender does not have the role.
        """
        if self.options.keys is None:
            if is_extra:
                check_sender(scope, role)
            return ""
        try:
            return self.options.keys.check(headers(scope), role=role).name
        except ServeError as error:
            raise HttpError(error.code.http_status, error.message) from error

    async def _in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def _before_deadline(
        self, deadline: Deadline, work: Callable[..., Answer], *args: Any
    ) -> Answer:
        """Run work in a thread; answer 504 after the deadline even if the thread is still blocked."""
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

    async def _read_body(self, scope: Scope, receive: Receive, state: _RequestState) -> bytes:
        """Return the complete body, and count the memory that it takes.

        Raises:
            HttpError: the body is too large, or the bodies of all requests together are.
            ConnectionResetError: the client disconnected.
        """
        limit = self.options.max_body_bytes
        # The HTTP parser has checked that the header has only digits.
        length = header(scope, b"content-length").lstrip("0")
        if len(length) > len(str(limit)) or int(length or "0") > limit:
            raise HttpError(413, f"the body must have at most {limit:,} bytes")
        parts: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError
            parts.append(message.get("body", b""))
            state.bytes_in += len(parts[-1])
            state.held_bytes += len(parts[-1])
            self.held_bytes += len(parts[-1])
            more = message.get("more_body", False)
            if state.bytes_in > limit:
                raise HttpError(413, f"the body must have at most {limit:,} bytes")
            if self.held_bytes > self.options.max_held_bytes:
                raise HttpError(503, "the bodies of other requests take too much memory")
        return b"".join(parts)

    def _api_answer(
        self, scope: Scope, body: tuple[bytes, str], state: _RequestState, interface: Interface
    ) -> Answer:
        raw, coding = body
        try:
            if coding in CODINGS:
                raw = decompressed(raw, coding=coding, limit=self.options.max_body_bytes)
            return interface(
                self.plane, HttpRequest(scope=scope, body=raw, deadline=state.deadline)
            )
        except ServeError as error:
            return Answer(status=error.code.http_status, body=error_body(error.message))
        except HttpError:
            raise
        except Exception:  # noqa: BLE001 - the edge: clients get no details of a bug
            _log.exception("a request failed because of a bug in the server")
            return Answer(
                status=500,
                body=error_body("the request failed because of a bug in the server; see its log"),
            )

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
        """Write a finished request to the access log, if there is one.

        Args:
            scope: ASGI's scope of the request.
            record: Facts about the request.
            answer: The answer.
            packed: The compressed body of the answer, if it is sent compressed.
            key: The name of the request's API key.
            bytes_in: Size of the request's body, bytes.
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
        self, scope: Scope, state: _RequestState, answer: Answer, *, packed: bytes | None = None
    ) -> None:
        record, key, size = state.deadline.record, state.key, state.bytes_in
        self.note(scope, record, answer, packed=packed, key=key, bytes_in=size)


def _live(_plane: DataPlane) -> Answer:
    return Answer(body='{"live": true}')


def _ready(plane: DataPlane) -> Answer:
    why = plane.unready()
    if why:
        return Answer(status=503, body=json.dumps({"ready": False, "reason": why}))
    return Answer(body='{"ready": true}')


PROBES: dict[str, Callable[[DataPlane], Answer]] = {
    "/livez": _live,
    "/readyz": _ready,
    "/v2/health/live": _live,
    "/v2/health/ready": _ready,
}
"""Path of a liveness or readiness probe -> its answer; probes need no key."""


_HEALTH_PATH = re.compile(
    r"/v1/models/[^/:]+(?:/versions/\d+|/labels/[^/:]+)?|/v2/models/[^/]+(?:/versions/[^/]+)?/ready/?",
    re.IGNORECASE | re.ASCII,
)
"""Paths of a model's status and readiness. They are answered above the limit of concurrent requests, as TensorFlow
Serving has no such limit."""

Interface = Callable[[DataPlane, HttpRequest], Answer]


def _role(path: str) -> Role:
    """Return the role that a path needs."""
    return Role.ADMIN if outcomes.matches(path) else Role.PREDICT


def _interface(path: str) -> Interface | None:
    """Return the function that answers a path; None for an unknown path."""
    if outcomes.matches(path):
        return outcomes.answer
    if path[:4].lower() == "/v1/":
        return routes.answer
    return v2.answer if path == "/v2" or path.startswith("/v2/") else None


def _cors_headers(options: RestOptions) -> Headers:
    """Return the headers that allow pages of other origins to send requests.

    Source: TensorFlow Serving, `AddCORSHeaders`; the headers of API keys are an extension.
    """
    keys = b", Authorization, X-API-Key" if options.keys else b""
    return (
        (b"access-control-allow-origin", b"*"),
        (b"access-control-allow-methods", b"POST, GET"),
        (b"access-control-allow-headers", b"Content-Type" + keys),
    )


def _version_headers(version: int | None) -> Headers:
    """Return the header with the number of the version that answered; empty if the request reached no version."""
    return () if version is None else ((VERSION_HEADER.encode(), b"%d" % version),)


_TRY_LATER = (429, 503)
_CHALLENGE = Code.UNAUTHENTICATED.http_status


async def _send(answer: Answer, send: Send, *, packed: bytes | None, close: bool) -> None:
    raw = answer.raw() if packed is None else packed
    sent: list[tuple[bytes, bytes]] = [
        (b"content-type", answer.content_type.encode()),
        (b"content-length", str(len(raw)).encode()),
        *answer.headers,
    ]
    if packed is not None:
        sent += [(b"content-encoding", b"gzip"), (b"vary", b"accept-encoding")]
    if answer.status in _TRY_LATER:
        sent.append((b"retry-after", str(RETRY_AFTER_S).encode()))
    if answer.status == _CHALLENGE:
        sent.append((b"www-authenticate", b"Bearer"))
    if close:
        sent.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": answer.status, "headers": sent})
    await send({"type": "http.response.body", "body": raw})
