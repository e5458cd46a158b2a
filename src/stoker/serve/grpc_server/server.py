"""A gRPC server: one event loop that reads and writes, and threads for handlers.

It has the registration methods of grpcio's server. grpcio passes every call to a thread and back. For a small
prediction, this takes longer than the model; this server answers such a call in the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import uvloop
from google.protobuf.message import DecodeError

from stoker.serve.errors import Code, ServeError
from stoker.serve.grpc_server.call import Aborted, Context, Details, ServerCall
from stoker.serve.grpc_server.connection import Connection
from stoker.serve.grpc_server.headers import CallHeaders
from stoker.serve.grpc_server.limits import CHECK_S, DRAIN_CHECK_S, INLINE_BYTES, ServerLimits
from stoker.serve.grpc_server.messages import Message
from stoker.serve.grpc_server.sender import Stream
from stoker.serve.limits import HttpLimits
from stoker.serve.runtime.busy_poll import BusyPoll
from stoker.serve.runtime.sockets import BACKLOG, SETTLE_S, rest_of_queue

_STATUS = {code.value[0]: code for code in grpc.StatusCode}

_log = logging.getLogger(__name__)


Handlers = Callable[[Details], Any]
Interceptor = Callable[[Handlers, Details], Any]
InlineAnswer = Callable[[Sequence[tuple[Any, Context]]], Sequence[bytes | None]]
"""Answers calls of the same method, which arrived together, in the event loop. Returns their responses, None for each
call that needs a thread. It must be fast."""


class GrpcServer:
    """A gRPC server that listens on bound sockets after `start`."""

    def __init__(
        self,
        *,
        pool: ThreadPoolExecutor,
        limits: ServerLimits,
        tls: ssl.SSLContext | None = None,
        intercept: Interceptor | None = None,
    ) -> None:
        """Prepare a server.

        Args:
            pool: Threads for handlers; the server shuts it down.
            limits: Limits of calls and connections.
            tls: Encryption of the sockets given to `listen`, if any.
            intercept: Called with the details of each call; returns the call's handler or another handler.
        """
        self.limits = limits
        self.max_header_bytes = limits.connection.head_bytes
        self.max_streams = limits.streams
        self._tls, self._intercept = tls, intercept
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        self._pool = pool
        self._generic: list[Any] = []
        self._handlers: dict[str, Any] = {}  # method -> its handler
        self._inline: dict[str, InlineAnswer] = {}
        self._in_loop: set[str] = set()  # methods whose handlers run in the event loop
        self._refused: Callable[[Any], None] = lambda _: None
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, name="stoker-grpc-loop", daemon=True)
        self._ended = threading.Event()
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._stopping = asyncio.Event()
        self._grace_s = 0.0
        self._connections: set[Connection] = set()
        self._in_flight = 0
        self.held_bytes = 0
        # Calls for `_inline` that arrived since the last `_turn`.
        self._arrived: list[tuple[str, ServerCall, Any]] = []
        self._busy_poll = BusyPoll()

    # -- handlers

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Register handlers, as on grpcio's server."""
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Do nothing: grpcio's generated code also registers the same handlers as generic handlers."""

    def answer_inline(self, method: str, answer: InlineAnswer) -> None:
        """Answer small calls of a method in the event loop where possible.

        Args:
            method: `/package.Service/Method`.
            answer: Answers the calls.
        """
        self._inline[method] = answer

    def answer_in_loop(self, *methods: str) -> None:
        """Run the handlers of methods in the event loop, even above the limit of concurrent calls.

        These handlers must not wait.
        """
        self._in_loop.update(methods)

    def when_refused(self, count: Callable[[Any], None]) -> None:
        """Set the function that gets the message of each refused call.

        It gets None if the message is compressed or cannot be read.
        """
        self._refused = count

    def handler_of(self, details: Details) -> tuple[Any, bool]:
        """Return a call's handler (None: unknown method), and whether this handler only refuses the call."""
        handler = self._handler(details)
        if self._intercept is None or handler is None:
            return handler, False
        intercepted = self._intercept(lambda _details: handler, details)
        return intercepted, intercepted is not handler

    def _handler(self, details: Details) -> Any:
        handler = self._handlers.get(details.method)
        if handler is None:
            candidates = (generic.service(details) for generic in self._generic)
            handler = next((one for one in candidates if one is not None), None)
            if handler is not None:
                self._handlers[details.method] = handler
        return handler

    # -- start and stop

    def listen(self, bound: socket.socket) -> None:
        """Add a bound socket that the server listens on after `start`. A Unix socket is served without TLS."""
        self._sockets.append(bound)

    def start(self) -> None:
        """Start the server. On return, the kernel accepts connections."""
        for bound in self._sockets:
            bound.listen(BACKLOG)
        self._thread.start()

    def stop(self, grace_s: float) -> threading.Event:
        """Accept no more calls, and stop when the running calls have ended.

        Args:
            grace_s: Maximum wait for running calls, seconds; then they are cancelled.

        Returns:
            An event that is set when the server has stopped.
        """
        self._grace_s = grace_s
        if self._thread.ident is None:
            for bound in self._sockets:
                bound.close()
            self.loop.close()
            self._ended.set()
        else:
            with contextlib.suppress(RuntimeError):  # raised if the server has stopped already
                self.loop.call_soon_threadsafe(self._stopping.set)
        return self._ended

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._serve())
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self.loop.close()
            self._ended.set()

    async def _serve(self) -> None:
        kept = [bound.dup() for bound in self._sockets]
        servers = [
            await self.loop.create_server(
                self._protocol, sock=bound, backlog=BACKLOG, **self._tls_of(bound)
            )
            for bound in self._sockets
        ]
        self.loop.call_later(CHECK_S, self._check)
        await self._stopping.wait()
        for server in servers:
            server.close()
        waiting = [
            asyncio.ensure_future(
                self.loop.connect_accepted_socket(self._protocol, found, **self._tls_of(found))
            )
            for bound in kept
            for found in rest_of_queue(bound)
        ]
        if waiting:  # a TLS handshake may never end
            done, slow = await asyncio.wait(waiting, timeout=SETTLE_S)
            for task in slow:
                task.cancel()
            for task in done:
                task.exception()  # read, because asyncio logs unread exceptions: the client may be gone
        await self._drain()

    def _tls_of(self, found: socket.socket) -> dict[str, Any]:
        """Return asyncio's arguments for the encryption of a socket."""
        if self._tls is None or found.family == socket.AF_UNIX:
            return {}
        return {"ssl": self._tls, "ssl_handshake_timeout": self.limits.connection.head_s}

    def _protocol(self) -> Connection:
        return Connection(self)

    async def _drain(self) -> None:
        """End all connections. Calls that clients sent before they received GOAWAY are still answered."""
        end_s = time.monotonic() + self._grace_s
        for connection in list(self._connections):
            connection.go_away(now=False)
        await asyncio.sleep(min(SETTLE_S, self._grace_s))
        for connection in list(self._connections):
            connection.go_away(now=True)
            for call in connection.calls:
                call.end_streaming()
            connection.sender.flush()
        while any(each.calls for each in self._connections) and time.monotonic() < end_s:  # noqa: ASYNC110 - costs less than an event per call
            await asyncio.sleep(DRAIN_CHECK_S)
        for connection in list(self._connections):
            for call in connection.calls:
                call.cancel()
            connection.sender.flush()
            connection.sender.transport.close()
        while self._connections and time.monotonic() < end_s + SETTLE_S:  # noqa: ASYNC110 - costs less than an event per call
            await asyncio.sleep(DRAIN_CHECK_S)
        for connection in list(self._connections):
            connection.sender.transport.abort()

    # -- connections

    def opened(self, connection: Connection) -> bool:
        """Register a connection; return False if there are too many connections."""
        self._connections.add(connection)
        found = connection.sender.transport.get_extra_info("socket")
        if found is not None and found.family != socket.AF_UNIX:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return len(self._connections) <= self.limits.connection.connections

    def closed(self, connection: Connection) -> None:
        """Remove a closed connection."""
        self._connections.discard(connection)

    def call(self, stream: Stream, headers: CallHeaders) -> None:
        """Start a call."""
        ServerCall(self, stream, headers).begin()

    def _check(self) -> None:
        """Close the connections and end the calls of clients that are too slow; close old and idle connections."""
        self.loop.call_later(CHECK_S, self._check)
        now_s = time.monotonic()
        for connection in list(self._connections):
            if connection.sender.transport.is_closing():
                connection.abort_after(self.limits.connection.send_s)
                continue
            reason = _overdue(connection, self.limits.connection, now_s)
            if reason:
                connection.cut(reason)
                continue
            for call in connection.calls:
                call.check_timeout(now_s)
            _renew(connection, self.limits, now_s)
            connection.sender.flush()

    # -- calls

    def begin(self, call: ServerCall, message: Message) -> None:
        """Answer a call whose single message is complete, in the event loop or in a thread."""
        method, request = call.headers.path, None
        small = isinstance(message, bytes) and len(message) <= INLINE_BYTES
        if small and method in self._inline:
            with contextlib.suppress(DecodeError):  # a thread reports the error
                request = call.handler.request_deserializer(message)
        if request is None:
            self.work(call, message)
            return
        self._arrived.append((method, call, request))
        if len(self._arrived) == 1:
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        arrived, self._arrived = self._arrived, []
        methods: dict[str, list[tuple[ServerCall, Any]]] = {}
        for method, call, request in arrived:
            if call.stream.is_open:
                methods.setdefault(method, []).append((call, request))
        for method, calls in methods.items():
            responses = self._respond(method, [(request, call.context) for call, request in calls])
            for (call, request), response in zip(calls, responses, strict=True):
                if response is None or len(response) > self.limits.send_bytes:
                    self.work(call, request)
                else:
                    call.stream.respond(response, metadata=call.context.trailing)
                    call.over()
        for _, call, _ in arrived:
            call.stream.sender.flush()
        self._busy_poll.stay(self.loop)

    def _respond(self, method: str, calls: Sequence[tuple[Any, Context]]) -> Sequence[bytes | None]:
        try:
            return self._inline[method](calls)
        except Exception:  # noqa: BLE001 - a thread answers, or reports it
            _log.exception("%s failed in the event loop; threads answer its calls", method)
            return [None] * len(calls)

    def work(self, call: ServerCall, message: Any) -> None:
        """Answer a call in a thread; in the event loop if `answer_in_loop` names its method.

        Args:
            call: The call.
            message: The call's message, as received or parsed.
        """
        is_small = isinstance(message, bytes) and len(message) <= INLINE_BYTES
        if is_small and call.headers.path in self._in_loop:
            self._in_flight += 1
            self._work(call, message)
            return
        if self._in_flight >= self.limits.in_flight:
            call.end(Code.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
            self._refused(_small(call, message))
            return
        self._in_flight += 1
        self._pool.submit(self._work, call, message)

    def _work(self, call: ServerCall, message: Any) -> None:
        """Run a call's handler, and send its result from the event loop."""
        response, context = b"", call.context
        try:
            if context.is_active():
                response = call.answer(message)
        except Aborted:
            pass
        except ServeError as error:
            context.code, context.details = _STATUS[error.code], error.message
        except Exception:  # noqa: BLE001 - the client gets an error, and the thread survives
            _log.exception("a gRPC handler failed")
            context.code = grpc.StatusCode.INTERNAL
            context.details = "the call failed because of a bug in the server; see its log"
        with contextlib.suppress(RuntimeError):  # raised if the loop is closed
            self.loop.call_soon_threadsafe(self._worked, call, response)

    def _worked(self, call: ServerCall, response: bytes) -> None:
        self._in_flight -= 1
        call.worked(response)
        call.stream.sender.flush()


def _small(call: ServerCall, message: Any) -> Any:
    """Return a call's parsed message (of a large message, only the first field); None if it cannot be parsed."""
    if not isinstance(message, Message):
        return message  # parsed already
    if not isinstance(message, bytes):
        return None
    if len(message) > INLINE_BYTES:
        message = _first_field(message)
    with contextlib.suppress(DecodeError):
        return call.handler.request_deserializer(message)
    return None


def _first_field(message: bytes) -> bytes:
    """Return the bytes of a message's field 1, which names the model.

    They are empty if another field is first, or if the field is large.

    Source: protobuf, "Encoding": serializers write fields in the order of their numbers.
    """
    if message[:1] != b"\x0a":  # the tag of field 1 with a length
        return b""
    size, end = message[1], 2
    if size & 0x80:
        size, end = size & 0x7F | message[2] << 7, 3
    return message[: end + size] if size <= INLINE_BYTES else b""


def _overdue(connection: Connection, limits: HttpLimits, now_s: float) -> str:
    """Return why a client is too slow; "" if it is not."""
    if not connection.has_preface and now_s - connection.partial_s > limits.head_s:
        return "the HTTP/2 preface did not arrive in time"
    if connection.is_partial and now_s - connection.partial_s > limits.body_s:
        return "the rest of a frame did not arrive in time"
    sender = connection.sender
    blocked = sender.is_paused or sender.waiting or sender.stalled
    if blocked and now_s - max(sender.progress_s, sender.blocked_s) > limits.send_s:
        return "the client does not read its responses"
    return ""


def _renew(connection: Connection, limits: ServerLimits, now_s: float) -> None:
    """Send GOAWAY on an old or idle connection, and close the connection after its last call."""
    if connection.calls:
        connection.last_call_s = now_s
    if connection.goaway_s:
        if now_s - connection.goaway_s > limits.grace_s:
            for call in connection.calls:
                call.cancel()
        if not connection.refuses_calls:
            connection.go_away(now=True)
        if not connection.calls:
            connection.sender.flush()
            connection.sender.transport.close()
    elif (
        now_s - connection.opened_s > limits.age_s or now_s - connection.last_call_s > limits.idle_s
    ):
        connection.go_away(now=False)
