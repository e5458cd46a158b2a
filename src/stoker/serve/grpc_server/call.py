"""One gRPC call of any method, from its headers to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, NoReturn, Protocol

import grpc
from google.protobuf.message import DecodeError

from stoker.serve.errors import Code, ServeError
from stoker.serve.grpc_server import headers as header_blocks
from stoker.serve.grpc_server.frames import Error
from stoker.serve.grpc_server.headers import CallHeaders, Metadata
from stoker.serve.grpc_server.limits import (
    CHECK_S,
    MIN_RECEIVE_BYTES_PER_S,
    SMALL_CALL_BYTES,
    ServerLimits,
)
from stoker.serve.grpc_server.messages import CompressedMessage, Message, MessageReader
from stoker.serve.grpc_server.sender import Stream
from stoker.serve.routing import Route

_log = logging.getLogger(__name__)


class Details(NamedTuple):
    """The facts about a call that an interceptor gets, with the fields of `grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: Metadata


class Aborted(Exception):
    """A handler has ended its call with `abort`."""


class Context:
    """The part of `grpc.ServicerContext` that servicers use; threads may share it."""

    __slots__ = (
        "_callbacks",
        "_cancel",
        "_deadline_s",
        "_headers",
        "_is_over",
        "_peer",
        "code",
        "details",
        "route",
        "trailing",
    )

    def __init__(self, headers: CallHeaders, *, peer: str, cancel: Callable[[], None]) -> None:
        """Args: headers: the call's headers; peer: the client's address; cancel: ends the call at once."""
        self._headers = headers
        self._peer = peer
        self._cancel: Callable[[], None] | None = cancel
        timeout_s = headers.timeout_s
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._callbacks: list[Callable[[], None]] = []
        self._is_over = False
        self.code: Any = grpc.StatusCode.OK
        self.details = ""
        # Where a rollout sent the call, if the event loop routed it already.
        self.route: Route | None = None
        self.trailing = b""  # the trailing metadata, encoded

    def invocation_metadata(self) -> Metadata:
        """Return the client's metadata."""
        return self._headers.metadata

    def peer(self) -> str:
        """Return the client's address."""
        return self._peer

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline, at least 0; None: no deadline."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def is_active(self) -> bool:
        """Return whether the call is still in progress."""
        return not self._is_over

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Register a function that is called when the call ends.

        If the call has ended already, return False, and do not call the function.
        """
        with _LOCK:
            if not self._is_over:
                self._callbacks.append(callback)
            return not self._is_over

    def over(self) -> None:
        """Mark the call as ended, and run the callbacks in this thread."""
        if self._is_over:
            return
        with _LOCK:
            self._is_over = True
            callbacks, self._callbacks = self._callbacks, []
        # Breaks a reference cycle, so that the call and its message are freed now.
        self._cancel = None
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - the other callbacks run, and the loop continues
                _log.exception("a callback at the end of a call failed")

    def cancel(self) -> None:
        """End the call at once."""
        cancel = self._cancel
        if cancel is not None:
            cancel()

    def set_trailing_metadata(self, fields: tuple[tuple[str, str], ...]) -> None:
        """Set the metadata that follows the response or the error."""
        self.trailing = header_blocks.metadata(fields)

    def set_code(self, code: Any) -> None:
        """Set the status of the call."""
        self.code = code

    def set_details(self, details: str) -> None:
        """Set the status message of the call."""
        self.details = details

    def abort(self, code: Any, details: str) -> NoReturn:
        """End the call with a status.

        Raises:
            Aborted: always.
        """
        self.code, self.details = code, details
        raise Aborted


_LOCK = threading.Lock()
"""Protects the callbacks of all calls; it is held for short moments only."""


class Engine(Protocol):
    """The parts of the server that a call uses."""

    limits: ServerLimits
    """The limits of calls."""

    loop: asyncio.AbstractEventLoop
    """The event loop in which calls are read and written."""

    held_bytes: int
    """Bytes of the messages of all running calls."""

    def handler_of(self, details: Details) -> tuple[Any, bool]:
        """Return a call's handler (None: unknown method), and whether this handler only refuses the call."""

    def begin(self, call: ServerCall, message: Message) -> None:
        """Answer a call whose single message is complete."""

    def work(self, call: ServerCall, message: Any) -> None:
        """Answer a call in a thread."""


class ServerCall:
    """One call. Only the event loop's thread uses it; any thread may use its context."""

    __slots__ = (
        "_due_s",
        "_held_bytes",
        "_is_refused",
        "_message",
        "_reader",
        "_requests",
        "_sent",
        "_server",
        "context",
        "handler",
        "headers",
        "stream",
    )

    def __init__(self, server: Engine, stream: Stream, headers: CallHeaders) -> None:
        self._server = server
        self.stream = stream
        self.headers = headers
        self.context = Context(headers, peer=stream.sender.peer, cancel=self._cancel_soon)
        self.handler: Any = None
        self._reader = MessageReader(
            encoding=headers.encoding,
            max_bytes=server.limits.receive_bytes,
            max_decompressed=server.limits.held_bytes,
        )
        self._message: Message | None = None  # the message of a unary request
        # The messages of a request stream.
        self._requests: queue.SimpleQueue[Message | None] | None = None
        self._due_s = time.monotonic() + server.limits.connection.body_s
        self._held_bytes = 0
        self._is_refused = False
        self._sent: threading.Event | None = None  # set while no response message is pending

    # -- in the event loop

    def begin(self) -> None:
        """Find the handler, or end the call if it cannot be handled."""
        headers = self.headers
        if headers.refusal is not None:
            self.end(*headers.refusal)
            return
        self.handler, refused = self._server.handler_of(Details(headers.path, headers.metadata))
        if self.handler is None:
            self.end(Code.UNIMPLEMENTED, "Method not found!")
            return
        self.stream.call = self
        if refused:  # answered now, without waiting for the message
            self._is_refused = True
            self._server.work(self, b"")
            return
        if self.handler.response_streaming and not _is_non_blocking(self.handler):
            self._sent = threading.Event()
            self.stream.on_sent = self._sent.set
        if self.handler.request_streaming:
            self._requests = queue.SimpleQueue()
            self._server.work(self, None)

    def receive(self, data: bytes, *, ended: bool) -> None:
        """Handle the next bytes of the request."""
        if self._is_refused or not self.stream.is_open:
            return
        try:
            self._hold(len(data))
            messages = self._reader.feed(data) if data else []
        except ServeError as error:
            self.end(error.code, error.message)
            return
        if self._requests is None:
            self._receive_unary(messages, ended=ended)
            return
        for message in messages:
            self._requests.put(message)
        if ended:
            self._requests.put(None)

    def _hold(self, size: int) -> None:
        """Add bytes to those that the call holds.

        Raises:
            ServeError: all calls together hold too many bytes, and this call is not small.
        """
        self._due_s += size / MIN_RECEIVE_BYTES_PER_S
        self._held_bytes += size
        self._server.held_bytes += size
        limit = max(self._server.limits.held_bytes, self._held_bytes)  # a single call may be larger
        if self._held_bytes > SMALL_CALL_BYTES and self._server.held_bytes > limit:
            raise ServeError(
                Code.RESOURCE_EXHAUSTED, "the messages in progress take too much memory"
            )

    def _receive_unary(self, messages: list[Message], *, ended: bool) -> None:
        if len(messages) + (self._message is not None) > 1:
            self.end(Code.UNIMPLEMENTED, "a call of this method must have exactly one message")
            return
        if messages:
            self._message = messages[0]
        if ended and self._message is not None and not self._reader.is_partial:
            self._server.begin(self, self._message)
        elif ended:
            self.end(Code.INVALID_ARGUMENT, "the call ended before its message was complete")

    def check_timeout(self, now_s: float) -> None:
        """End the call if the client sends the request too slowly."""
        waits = self._requests is None and self.stream.sender.is_receiving(self.stream)
        if waits and now_s > self._due_s:
            self.end(Code.DEADLINE_EXCEEDED, "the message did not arrive in time")

    def end(self, code: Code | int, message: str) -> None:
        """End the call with a status."""
        self.stream.end(int(code), message, metadata=self.context.trailing)
        self.over()

    def worked(self, response: bytes) -> None:
        """Send the response or the status of a handler that has returned."""
        context = self.context
        code = context.code.value[0]
        if not self.stream.is_open:
            self.over()
        elif code == 0 and not self.handler.response_streaming:
            if len(response) > self._server.limits.send_bytes:
                self.end(Code.RESOURCE_EXHAUSTED, "Sent message larger than max")
                return
            self.stream.respond(response, metadata=context.trailing)
            self.over()
        elif code != 0 or not _is_non_blocking(self.handler):
            self.end(code, context.details)

    def cancelled(self) -> None:
        """Handle that the client has reset the stream or closed the connection."""
        self.over()

    def end_streaming(self) -> None:
        """Shutdown: end a call with a response stream, which otherwise only the client would end."""
        if self.handler is not None and self.handler.response_streaming:
            self.end(Code.UNAVAILABLE, "the server shuts down")

    def cancel(self) -> None:
        """End the call with CANCELLED: the grace period of the shutdown is over."""
        self.end(Code.CANCELLED, "the server shuts down")

    def over(self) -> None:
        """Free the call's memory, and notify its handler. Further calls of this method have no effect."""
        self._server.held_bytes -= self._held_bytes
        self._held_bytes = 0
        self._message = None
        if self._requests is not None:
            self._requests.put(None)
        self.context.over()
        if self._sent is not None:
            self._sent.set()

    def _cancel_soon(self) -> None:
        """Cancel the call, from any thread."""
        with contextlib.suppress(RuntimeError):  # raised if the loop is closed
            self._server.loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        if self.stream.is_open:
            self.stream.reset(Error.CANCEL)
            self.stream.sender.flush()
        self.over()

    # -- in a thread

    def answer(self, message: Any) -> bytes:
        """Run the handler, and return its response.

        Messages of a response stream are sent here, and the result is empty.

        Raises:
            Aborted, ServeError: the call is refused.
        """
        handler, context = self.handler, self.context
        if handler.request_streaming:
            self._send_all(handler.stream_stream(self._read_requests(), context))
            return b""
        request = self._parse(message) if isinstance(message, Message) else message
        if not handler.response_streaming:
            response = handler.unary_unary(request, context)
            return b"" if context.code.value[0] else self._serialized(response)
        if _is_non_blocking(handler):
            handler.unary_stream(request, context, self._send_soon)
        else:
            self._send_all(handler.unary_stream(request, context))
        return b""

    def _read_requests(self) -> Iterator[Any]:
        requests = self._requests
        assert requests is not None  # set by `begin`
        while (message := requests.get()) is not None:
            yield self._parse(message)

    def _parse(self, message: Message) -> Any:
        if isinstance(message, CompressedMessage):
            message = message.decompress()
        parse = self.handler.request_deserializer
        if parse is None:
            return message
        try:
            return parse(message)
        except DecodeError:
            raise ServeError(
                Code.INVALID_ARGUMENT, f"the message of {self.headers.path[:200]} is damaged"
            ) from None

    def _serialized(self, response: Any) -> bytes:
        serialize = self.handler.response_serializer
        raw: bytes = response if serialize is None else serialize(response)
        return raw

    def _send_all(self, responses: Iterator[Any]) -> None:
        """Send messages, each only after the previous one was sent.

        So they do not pile up if the client does not read.
        """
        sent = self._sent
        assert sent is not None  # set by `begin`
        for response in responses:
            sent.clear()
            self._send_soon(response)
            while self.context.is_active() and not sent.wait(CHECK_S):
                pass
            if not self.context.is_active():
                return

    def _send_soon(self, response: Any) -> None:
        """Send one message, from any thread; None ends the call."""
        raw = None if response is None else self._serialized(response)
        with contextlib.suppress(RuntimeError):  # raised if the loop is closed
            self._server.loop.call_soon_threadsafe(self._send, raw)

    def _send(self, raw: bytes | None) -> None:
        if not self.stream.is_open:
            return
        if raw is None:
            self.end(Code.OK, "")
        else:
            self.stream.send_message(raw)
        self.stream.sender.flush()


def _is_non_blocking(handler: Any) -> bool:
    """Return whether a handler, like grpcio's health service, holds no thread: it sends messages by a function."""
    return bool(getattr(handler.unary_stream, "experimental_non_blocking", False))
