"""A server of gRPC: one loop that reads and writes, and threads in which handlers work.

What registers handlers on a server of grpcio registers them here as well. grpcio hands every call to
a thread and back, which costs a small prediction more than the model; here what can be answered at
once is answered where it came in.
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
from stoker.serve.grpc.call import Details, Limits, ServerCall
from stoker.serve.grpc.context import Aborted, Context
from stoker.serve.grpc.http2.connection import Connection
from stoker.serve.grpc.http2.exchange import Stream
from stoker.serve.grpc.http2.heads import CallHead
from stoker.serve.grpc.messages import Message
from stoker.serve.limits import HttpLimits
from stoker.serve.runtime.busy_poll import BusyPoll
from stoker.serve.runtime.sockets import BACKLOG, SETTLE_S, rest_of_queue

_LOOK_S = 1.0
"""Time between two looks for clients that keep this side waiting, seconds."""

_SMALL_BYTES = 16 << 10
"""Largest message that is answered at once: the loop reads nothing else meanwhile."""

_DRAIN_LOOK_S = 0.005
"""Time between two looks whether all calls have ended, seconds."""

_STATUS = {code.value[0]: code for code in grpc.StatusCode}

_log = logging.getLogger(__name__)


Handlers = Callable[[Details], Any]
Interceptor = Callable[[Handlers, Details], Any]
AtOnce = Callable[[Sequence[tuple[Any, Context]]], Sequence[bytes | None]]
"""Calls of one method that came in one turn of the loop -> their answers, None for each that needs a
thread. It must be quick."""


class GrpcServer:
    """Answers on sockets that are bound; nothing is answered before `start`."""

    def __init__(
        self,
        *,
        workers: int,
        limits: Limits,
        tls: ssl.SSLContext | None = None,
        intercept: Interceptor | None = None,
    ) -> None:
        """Make a server.

        Args:
            workers: Threads in which handlers work.
            limits: What calls may take.
            tls: Encryption of the sockets given to `listen`, if any.
            intercept: Stands between each call and its handler.
        """
        self.limits = limits
        self.max_header_bytes = limits.connection.head_bytes
        self.max_streams = limits.streams
        self._tls, self._intercept = tls, intercept
        if tls is not None:
            tls.set_alpn_protocols(["h2"])
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="stoker-grpc")
        self._generic: list[Any] = []
        self._known: dict[str, Any] = {}  # path -> its handler
        self._at_once: dict[str, AtOnce] = {}
        self._sockets: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run, name="stoker-grpc-loop", daemon=True)
        self._ended = threading.Event()
        self.loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
        self._stopping = asyncio.Event()
        self._grace_s = 0.0
        self._connections: set[Connection] = set()
        self._in_flight = 0
        self.held_bytes = 0
        self._came: list[
            tuple[str, ServerCall, Any]
        ] = []  # in this turn of the loop, for `_at_once`
        self._busy_poll = BusyPoll()

    # -- what is answered

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """As grpcio's."""
        self._generic += handlers

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """As grpcio's; the same handlers come as generic ones too."""

    def answer_at_once(self, method: str, answer: AtOnce) -> None:
        """Let calls of a method be answered in the loop, where that is possible.

        Args:
            method: `/package.Service/Method`.
            answer: Answers them.
        """
        self._at_once[method] = answer

    def handler_of(self, details: Details) -> tuple[Any, bool]:
        """What answers a call, None if nothing does; and whether it only refuses it."""
        known = self._handler(details)
        if self._intercept is None or known is None:
            return known, False
        found = self._intercept(lambda _details: known, details)
        return found, found is not known

    def _handler(self, details: Details) -> Any:
        found = self._known.get(details.method)
        if found is None:
            for one in self._generic:
                found = one.service(details)
                if found is not None:
                    self._known[details.method] = found
                    break
        return found

    # -- where and when

    def listen(self, bound: socket.socket) -> None:
        """Answer on a socket that is bound, once it is started; on one of the file system without TLS."""
        self._sockets.append(bound)

    def start(self) -> None:
        """Take connections; returns when the kernel does."""
        for bound in self._sockets:
            bound.listen(BACKLOG)
        self._thread.start()

    def stop(self, grace_s: float) -> threading.Event:
        """Take no more calls, and end when those under way have ended.

        Args:
            grace_s: Longest wait for them, seconds; then they are cancelled.

        Returns:
            Set at the end.
        """
        self._grace_s = grace_s
        if self._thread.ident is None:
            for bound in self._sockets:
                bound.close()
            self.loop.close()
            self._ended.set()
        else:
            with contextlib.suppress(RuntimeError):  # it has ended before
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
        self.loop.call_later(_LOOK_S, self._look)
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
        if waiting:  # a handshake of TLS may never end
            done, slow = await asyncio.wait(waiting, timeout=SETTLE_S)
            for one in slow:
                one.cancel()
            for one in done:
                one.exception()  # the client may have gone: nobody else asks why
        await self._drain()

    def _tls_of(self, found: socket.socket) -> dict[str, Any]:
        """Asyncio's words for the encryption of a socket."""
        if self._tls is None or found.family == socket.AF_UNIX:
            return {}
        return {"ssl": self._tls, "ssl_handshake_timeout": self.limits.connection.head_s}

    def _protocol(self) -> Connection:
        return Connection(self)

    async def _drain(self) -> None:
        """Clients are told to call elsewhere; what they said before they heard it is answered."""
        end_s = time.monotonic() + self._grace_s
        for connection in list(self._connections):
            connection.leave(now=False)
        await asyncio.sleep(min(SETTLE_S, self._grace_s))
        for connection in list(self._connections):
            connection.leave(now=True)
            for call in connection.calls:
                call.leave()
            connection.exchange.flush()
        # A look now and then, at the end only, costs less than an event a call
        while any(one.calls for one in self._connections) and time.monotonic() < end_s:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_LOOK_S)
        for connection in list(self._connections):
            for call in connection.calls:
                call.cut()
            connection.exchange.flush()
            connection.exchange.transport.close()
        while self._connections and time.monotonic() < end_s + SETTLE_S:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_LOOK_S)
        for connection in list(self._connections):
            connection.exchange.transport.abort()

    # -- connections

    def opened(self, connection: Connection) -> bool:
        """Whether another connection may be."""
        self._connections.add(connection)
        found = connection.exchange.transport.get_extra_info("socket")
        if found is not None and found.family != socket.AF_UNIX:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return len(self._connections) <= self.limits.connection.connections

    def closed(self, connection: Connection) -> None:
        """It is gone."""
        self._connections.discard(connection)

    def call(self, stream: Stream, head: CallHead) -> None:
        """A new call."""
        ServerCall(self, stream, head).begin()

    def _look(self) -> None:
        self.loop.call_later(_LOOK_S, self._look)
        now_s = time.monotonic()
        for connection in list(self._connections):
            if connection.exchange.transport.is_closing():
                connection.end_within(self.limits.connection.send_s)
                continue
            said = _waited_for(connection, self.limits.connection, now_s)
            if said:
                connection.cut(said)
                continue
            for call in connection.calls:
                call.look(now_s)
            _renew(connection, self.limits, now_s)
            connection.exchange.flush()

    # -- calls

    def begin(self, call: ServerCall, message: Message) -> None:
        """A call is whole: answer it in this turn of the loop, or by a thread."""
        method, request = call.head.path, None
        small = isinstance(message, bytes) and len(message) <= _SMALL_BYTES
        if small and method in self._at_once:
            with contextlib.suppress(DecodeError):  # said where every error is
                request = call.handler.request_deserializer(message)
        if request is None:
            self.work(call, message)
            return
        self._came.append((method, call, request))
        if len(self._came) == 1:
            self.loop.call_soon(self._turn)

    def _turn(self) -> None:
        came, self._came = self._came, []
        methods: dict[str, list[tuple[ServerCall, Any]]] = {}
        for method, call, request in came:
            if call.stream.is_open:
                methods.setdefault(method, []).append((call, request))
        for method, calls in methods.items():
            answers = self._answers(method, [(request, call.context) for call, request in calls])
            for (call, request), answer in zip(calls, answers, strict=True):
                if answer is None or len(answer) > self.limits.send_bytes:
                    self.work(call, request)
                else:
                    call.stream.answer(answer)
                    call.over()
        for _, call, _ in came:
            call.stream.exchange.flush()
        self._busy_poll.stay(self.loop)

    def _answers(self, method: str, calls: Sequence[tuple[Any, Context]]) -> Sequence[bytes | None]:
        try:
            return self._at_once[method](calls)
        except Exception:  # noqa: BLE001 - whatever it is, a thread answers, or says it
            _log.exception("%s met a bug when it was to answer at once", method)
            return [None] * len(calls)

    def work(self, call: ServerCall, message: Any) -> None:
        """Let a thread answer a call.

        Args:
            call: The call.
            message: Its message, as bytes or read already.
        """
        if self._in_flight >= self.limits.in_flight:
            call.end(Code.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
            return
        self._in_flight += 1
        self._pool.submit(self._work, call, message)

    def _work(self, call: ServerCall, message: Any) -> None:
        """In a thread."""
        answer, context = b"", call.context
        try:
            if context.is_active():
                answer = call.answer(message)
        except Aborted:
            pass
        except ServeError as error:
            context.code, context.said = _STATUS[error.code], error.message
        except Exception:  # noqa: BLE001 - the client is told, and no thread is lost
            _log.exception("a handler of gRPC met a bug")
            context.code, context.said = (
                grpc.StatusCode.INTERNAL,
                "the server has a bug; see its log",
            )
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self._worked, call, answer)

    def _worked(self, call: ServerCall, answer: bytes) -> None:
        self._in_flight -= 1
        call.worked(answer)
        call.stream.exchange.flush()


def _waited_for(connection: Connection, limits: HttpLimits, now_s: float) -> str:
    """What a client keeps this side waiting for; empty if nothing."""
    if not connection.greeted and now_s - connection.amid_s > limits.head_s:
        return "no HTTP/2 was spoken"
    if connection.is_amid_frame and now_s - connection.amid_s > limits.body_s:
        return "the rest of a frame did not come"
    exchange = connection.exchange
    waits = exchange.is_paused or exchange.blocked or exchange.stalled
    if waits and now_s - max(exchange.moved_s, exchange.held_s) > limits.send_s:
        return "an answer is not read"
    return ""


def _renew(connection: Connection, limits: Limits, now_s: float) -> None:
    """Let a client go who has been here too long, or has nothing to ask."""
    if connection.calls:
        connection.used_s = now_s
    if connection.left_s:
        if now_s - connection.left_s > limits.grace_s:
            for call in connection.calls:
                call.cut()
        if not connection.has_left:
            connection.leave(now=True)
        if not connection.calls:
            connection.exchange.flush()
            connection.exchange.transport.close()
    elif now_s - connection.began_s > limits.age_s or now_s - connection.used_s > limits.idle_s:
        connection.leave(now=False)
