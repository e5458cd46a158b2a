"""A call of gRPC from its headers to its end, whatever its method."""

from __future__ import annotations

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import DecodeError

from stoker.serve.errors import Code, ServeError
from stoker.serve.grpc.context import Context
from stoker.serve.grpc.http2.exchange import Stream
from stoker.serve.grpc.http2.frames import Error
from stoker.serve.grpc.http2.heads import CallHead
from stoker.serve.grpc.messages import Message, Messages, Packed
from stoker.serve.limits import HttpLimits

_SMALL_BYTES = 64 << 10
"""What a call may always hold, however much others do."""

_SLOWEST = 64 << 10
"""What a client has to send of a large message, bytes a second, once its first seconds are over."""

_LOOK_S = 1.0
"""How often a thread that waits for a client to read looks whether he is there still, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What calls and their connections may take."""

    connection: HttpLimits
    """Of a connection, as for REST."""

    in_flight: int
    """Most calls that wait for a thread or have one; another gets RESOURCE_EXHAUSTED."""

    receive_bytes: int
    """Largest message that is taken."""

    send_bytes: int
    """Largest message that is sent."""

    held_bytes: int
    """Most bytes of messages, of all calls, that may be under way at once."""

    streams: int
    """Most calls of a connection at once."""

    age_s: float = math.inf
    """How long a connection takes new calls, seconds; then its client is sent to another, which a
    balancer may give to another server."""

    grace_s: float = math.inf
    """How long its calls may last from there, seconds."""

    idle_s: float = math.inf
    """How long a connection may be without a call, seconds."""


class Details(NamedTuple):
    """What an interceptor sees of a call, as `grpc.HandlerCallDetails` has it."""

    method: str
    invocation_metadata: tuple[tuple[str, str | bytes], ...]


class Engine(Protocol):
    """What calls are answered by."""

    limits: Limits
    """What they may take."""

    loop: asyncio.AbstractEventLoop
    """Where they are read and written."""

    held_bytes: int
    """What the messages of all calls under way take."""

    def handler_of(self, details: Details) -> tuple[Any, bool]:
        """What answers a call, None if nothing does; and whether it only refuses it."""

    def begin(self, call: ServerCall, message: Message) -> None:
        """A call of one message is whole."""

    def work(self, call: ServerCall, message: Any) -> None:
        """Let a thread answer a call."""


class ServerCall:
    """A call from its headers to its end; used by the loop's thread, its context by any."""

    __slots__ = (
        "_due_s",
        "_held_bytes",
        "_incoming",
        "_is_refused",
        "_message",
        "_messages",
        "_sent",
        "_server",
        "context",
        "handler",
        "head",
        "stream",
    )

    def __init__(self, server: Engine, stream: Stream, head: CallHead) -> None:
        self._server = server
        self.stream = stream
        self.head = head
        self.context = Context(head, peer=stream.exchange.peer, cancel=self._cancel_soon)
        self.handler: Any = None
        self._messages = Messages(
            encoding=head.encoding,
            max_bytes=server.limits.receive_bytes,
            unpacked_bytes=server.limits.held_bytes,
        )
        self._message: Message | None = None  # of a call of one
        self._incoming: queue.SimpleQueue[Message | None] | None = None  # of a call of many
        self._due_s = time.monotonic() + server.limits.connection.body_s
        self._held_bytes = 0
        self._is_refused = False
        self._sent: threading.Event | None = None  # whether all answers of many are on their way

    # -- in the loop

    def begin(self) -> None:
        """Find what answers it."""
        head = self.head
        if head.refusal is not None:
            self.end(*head.refusal)
            return
        self.handler, refused = self._server.handler_of(Details(head.path, head.metadata))
        if self.handler is None:
            self.end(Code.UNIMPLEMENTED, "Method not found!")
            return
        self.stream.call = self
        if refused:  # its message is not waited for
            self._is_refused = True
            self._server.work(self, b"")
            return
        if self.handler.response_streaming and not _is_told(self.handler):
            self._sent = threading.Event()
            self.stream.on_sent = self._sent.set
        if self.handler.request_streaming:
            self._incoming = queue.SimpleQueue()
            self._server.work(self, None)

    def feed(self, data: bytes, *, ended: bool) -> None:
        """Take what the client sends."""
        if self._is_refused or not self.stream.is_open:
            return
        try:
            self._hold(len(data))
            messages = self._messages.feed(data) if data else []
        except ServeError as error:
            self.end(error.code, error.message)
            return
        if self._incoming is None:
            self._take(messages, ended=ended)
            return
        for message in messages:
            self._incoming.put(message)
        if ended:
            self._incoming.put(None)

    def _hold(self, size: int) -> None:
        """Count more bytes of it.

        Raises:
            ServeError: all calls together hold too many, and this one is not small.
        """
        self._due_s += size / _SLOWEST
        self._held_bytes += size
        self._server.held_bytes += size
        most = max(self._server.limits.held_bytes, self._held_bytes)  # one alone may be larger
        if self._held_bytes > _SMALL_BYTES and self._server.held_bytes > most:
            raise ServeError(Code.RESOURCE_EXHAUSTED, "too many bytes of messages are under way")

    def _take(self, messages: list[Message], *, ended: bool) -> None:
        """Of a call of one message."""
        if len(messages) + (self._message is not None) > 1:
            self.end(Code.UNIMPLEMENTED, "a call of this method has one message only")
            return
        if messages:
            self._message = messages[0]
        if ended and self._message is not None and not self._messages.is_amid:
            self._server.begin(self, self._message)
        elif ended:
            self.end(Code.INVALID_ARGUMENT, "the call ends before its message does")

    def look(self, now_s: float) -> None:
        """End it if its client does not say the rest of it."""
        waits = self._incoming is None and self.stream.exchange.hears(self.stream)
        if waits and now_s > self._due_s:
            self.end(Code.DEADLINE_EXCEEDED, "the message did not come in time")

    def end(self, code: Code | int, said: str) -> None:
        """End it with a status."""
        self.stream.end(int(code), said)
        self.over()

    def worked(self, answer: bytes) -> None:
        """A thread is done with it."""
        context = self.context
        code = context.code.value[0]
        if not self.stream.is_open:
            self.over()
        elif code == 0 and not self.handler.response_streaming:
            if len(answer) > self._server.limits.send_bytes:
                self.end(Code.RESOURCE_EXHAUSTED, "Sent message larger than max")
                return
            self.stream.answer(answer)
            self.over()
        elif code != 0 or not _is_told(self.handler):
            self.end(code, context.said)

    def cancelled(self) -> None:
        """The client has given it up, or is gone."""
        self.over()

    def leave(self) -> None:
        """The server ends: what would last as long as the client likes ends now."""
        if self.handler is not None and self.handler.response_streaming:
            self.end(Code.UNAVAILABLE, "the server ends")

    def cut(self) -> None:
        """The server's time is over."""
        self.end(Code.CANCELLED, "the server ends")

    def over(self) -> None:
        """It has ended: what it took is given back, and whoever works for it is told."""
        self._server.held_bytes -= self._held_bytes
        self._held_bytes = 0
        self._message = None
        if self._incoming is not None:
            self._incoming.put(None)
        self.context.over()
        if self._sent is not None:
            self._sent.set()

    def _cancel_soon(self) -> None:
        """From any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._server.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self.stream.is_open:
            self.stream.reset(Error.CANCEL)
            self.stream.exchange.flush()
        self.over()

    # -- in a thread

    def answer(self, message: Any) -> bytes:
        """What the handler says; the messages of a streaming one are sent as they come.

        Raises:
            Aborted, ServeError: it is refused.
        """
        handler, context = self.handler, self.context
        if handler.request_streaming:
            self._send_all(handler.stream_stream(self._requests(), context))
            return b""
        request = self._read(message) if isinstance(message, bytes | Packed) else message
        if not handler.response_streaming:
            found = handler.unary_unary(request, context)
            return b"" if context.code.value[0] else self._written(found)
        if _is_told(handler):
            handler.unary_stream(request, context, self._send_soon)
        else:
            self._send_all(handler.unary_stream(request, context))
        return b""

    def _requests(self) -> Iterator[Any]:
        incoming = self._incoming
        assert incoming is not None  # `begin` made it
        while (message := incoming.get()) is not None:
            yield self._read(message)

    def _read(self, message: Message) -> Any:
        if isinstance(message, Packed):
            message = message.unpacked()
        read = self.handler.request_deserializer
        if read is None:
            return message
        try:
            return read(message)
        except DecodeError:
            raise ServeError(
                Code.INVALID_ARGUMENT, f"the message of {self.head.path[:200]} is damaged"
            ) from None

    def _written(self, found: Any) -> bytes:
        write = self.handler.response_serializer
        raw: bytes = found if write is None else write(found)
        return raw

    def _send_all(self, answers: Iterator[Any]) -> None:
        """Messages as they come, each when the one before is on its way: a client may read none."""
        sent = self._sent
        assert sent is not None  # `begin` made it
        for answer in answers:
            sent.clear()
            self._send_soon(answer)
            while self.context.is_active() and not sent.wait(_LOOK_S):
                pass
            if not self.context.is_active():
                return

    def _send_soon(self, answer: Any) -> None:
        """One message, or the end if it is None."""
        raw = None if answer is None else self._written(answer)
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._server.loop.call_soon_threadsafe(self._send, raw)

    def _send(self, raw: bytes | None) -> None:
        if not self.stream.is_open:
            return
        if raw is None:
            self.end(Code.OK, "")
        else:
            self.stream.send(raw)
        self.stream.exchange.flush()


def _is_told(handler: Any) -> bool:
    """Whether a handler is given a way to send, and keeps no thread, as grpcio's health service."""
    return bool(getattr(handler.unary_stream, "experimental_non_blocking", False))
