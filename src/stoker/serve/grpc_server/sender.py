"""Sends the responses of a connection's streams, within the client's flow-control windows."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from stoker.serve.grpc_server import frames, headers
from stoker.serve.grpc_server.frames import Error
from stoker.serve.grpc_server.limits import MIN_PROGRESS_BYTES, STREAM_WINDOW
from stoker.serve.grpc_server.messages import PREFIX


class Call(Protocol):
    """The parts of a call that its stream uses."""

    def receive(self, data: bytes, *, ended: bool) -> None:
        """Handle the next bytes of the request.

        Args:
            data: The bytes.
            ended: Whether the request ends after them.
        """

    def cancelled(self) -> None:
        """Handle that the client has reset the stream or closed the connection."""

    def check_timeout(self, now_s: float) -> None:
        """End the call if the client sends the request too slowly."""

    def end_streaming(self) -> None:
        """Shutdown: end a call with a response stream, which otherwise only the client would end."""

    def cancel(self) -> None:
        """End the call with CANCELLED: the grace period of the shutdown is over."""


class Sender:
    """The open streams of a connection and its outgoing bytes. Only the event loop's thread uses it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        """Args: transport: the transport that the bytes are written to."""
        self.transport = transport
        self.peer = _peer_text(transport)
        self.streams: dict[int, Stream] = {}
        self.receiving: set[int] = set()  # streams whose request is not complete
        self.waiting: dict[int, Stream] = {}  # streams that the connection's window blocks
        self.stalled: dict[int, Stream] = {}  # streams that their own window blocks
        self.initial_window = self.window = frames.DEFAULT_WINDOW
        self.max_frame = frames.DEFAULT_FRAME
        self.is_paused = False  # whether the client does not read its responses
        # When the client last sent data, and when it last read data.
        self.received_s = self.progress_s = time.monotonic()
        self.blocked_s = 0.0  # since when data has been waiting for the client
        self.pings = 0.0  # the client's pings and settings since the last response
        self._progress_bytes = 0  # bytes sent since `progress_s`
        self._table_update = b""  # bytes that the next header block must begin with
        self._out: list[bytes] = []

    def put(self, data: bytes) -> None:
        """Send bytes with the next `flush`."""
        self._out.append(data)

    def put_headers(self, stream: Stream, block: bytes, *, last: bool) -> None:
        """Send a header block with the next `flush`."""
        flags = frames.END_HEADERS | (frames.END_STREAM if last else 0)
        self.put(frames.frame(frames.HEADERS, flags, stream.number, self._table_update + block))
        self._table_update = b""

    def shrink_header_table(self) -> None:
        """Set the HPACK table's size to 0 with the next header block: the client's limit is below the default size.

        Source: RFC 7541, 4.2. No header block of this server uses the table.
        """
        self._table_update = headers.EMPTY_TABLE

    def flush(self) -> None:
        """Write all bytes that `put` has collected."""
        if self._out:
            data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
            self._out.clear()
            if not self.transport.is_closing():
                self.transport.write(data)

    def has(self, stream: Stream) -> bool:
        """Return whether a stream is open."""
        return self.streams.get(stream.number) is stream

    def is_receiving(self, stream: Stream) -> bool:
        """Return whether the request of a stream is not complete."""
        return stream.number in self.receiving

    def remove(self, stream: Stream) -> None:
        """Remove a finished stream; reset it if the client still sends."""
        number = stream.number
        self.streams.pop(number, None)
        self.unblock(stream)
        stream.call = None
        if number in self.receiving:
            self.receiving.discard(number)
            self.put(frames.reset(number, Error.NO_ERROR))

    def block(self, stream: Stream) -> None:
        """Record that a stream is blocked by a flow-control window."""
        if not self.waiting and not self.stalled:
            self.blocked_s = time.monotonic()
        self.unblock(stream)
        (self.stalled if stream.window <= 0 else self.waiting)[stream.number] = stream

    def unblock(self, stream: Stream) -> None:
        """Record that a stream is no longer blocked by a flow-control window."""
        self.waiting.pop(stream.number, None)
        self.stalled.pop(stream.number, None)

    def progressed(self, size: int) -> None:
        """Count sent bytes. The client makes progress once it has read `MIN_PROGRESS_BYTES`."""
        self._progress_bytes += size
        self.pings = 0.0
        if self._progress_bytes >= MIN_PROGRESS_BYTES:
            self._progress_bytes = 0
            self.progress_s = time.monotonic()

    def send_waiting(self) -> None:
        """Send pending data of the streams that waited for the connection's window."""
        for stream in list(self.waiting.values()):
            if self.window <= 0 or self.is_paused:
                return
            stream.send_pending()


class Stream:
    """The response side of a call. Only the event loop's thread uses it."""

    __slots__ = (
        "_has_headers",
        "_pending",
        "_trailers",
        "call",
        "number",
        "on_sent",
        "receive_window",
        "sender",
        "started_s",
        "window",
    )

    def __init__(self, sender: Sender, number: int) -> None:
        """Args: sender: the connection's sender; number: the number of the stream."""
        self.sender = sender
        self.number = number
        self.call: Call | None = None  # the call, while the stream is open
        self.on_sent: Callable[[], None] | None = None  # called when all messages were sent
        self.started_s = sender.received_s
        self.receive_window = STREAM_WINDOW  # bytes that the client may still send
        self.window = sender.initial_window  # bytes that may still be sent to the client
        self._has_headers = False
        self._pending: deque[memoryview] = deque()  # messages that wait for the windows
        self._trailers = b""  # the last header block, sent after all messages

    @property
    def is_open(self) -> bool:
        """Whether the client still waits for the response."""
        return self.sender.has(self)

    def respond(self, message: bytes, *, metadata: bytes = b"") -> None:
        """Send the only message of a successful call, and end the call.

        Args:
            message: The response message.
            metadata: Trailing metadata, as `headers.encode` returns it.
        """
        sender, size = self.sender, len(message) + PREFIX.size
        room = min(self.window, sender.window, sender.max_frame)
        if self._has_headers or sender.is_paused or size > room or not sender.has(self):
            self.send_message(message)
            self.end(metadata=metadata)
            return
        sender.window -= size
        sender.put_headers(self, headers.RESPONSE, last=False)
        sender.put(frames.HEADER.pack(size >> 8, size & 0xFF, frames.DATA, 0, self.number))
        sender.put(PREFIX.pack(0, len(message)))
        sender.put(message)
        sender.put_headers(self, headers.OK + metadata, last=True)
        sender.pings = 0.0
        sender.remove(self)

    def send_message(self, message: bytes) -> None:
        """Send one message."""
        if not self._has_headers:
            self._has_headers = True
            self.sender.put_headers(self, headers.RESPONSE, last=False)
        self._pending.append(memoryview(PREFIX.pack(0, len(message)) + message))
        self.send_pending()

    def end(self, code: int = 0, message: str = "", *, metadata: bytes = b"") -> None:
        """End the call after all its messages were sent.

        Args:
            code: The gRPC status.
            message: The status message of a failure.
            metadata: Trailing metadata, as `headers.encode` returns it.
        """
        status = headers.OK if code == 0 else headers.trailers(code, message)
        self._trailers = status + metadata
        if not self._has_headers:
            self._has_headers = True
            self._trailers = headers.RESPONSE + self._trailers
        self.send_pending()

    def refuse(self, status: int) -> None:
        """Answer a request that is not a gRPC call with an HTTP status."""
        self._has_headers = True
        self._trailers = headers.http_refusal(status)
        self.send_pending()

    def reset(self, error: Error) -> None:
        """End the stream at once."""
        self.sender.put(frames.reset(self.number, error))
        self.sender.receiving.discard(self.number)
        self.sender.remove(self)

    def send_pending(self) -> None:
        """Send pending messages and trailers, as far as the windows allow."""
        sender = self.sender
        if not sender.has(self):
            self._pending.clear()
            return
        while self._pending:
            data = self._pending[0]
            size = min(len(data), self.window, sender.window, sender.max_frame)
            if sender.is_paused or size <= 0:
                sender.block(self)
                return
            self._pending.popleft()
            if size < len(data):
                self._pending.appendleft(data[size:])
                data = data[:size]
            self.window -= size
            sender.window -= size
            sender.put(frames.frame(frames.DATA, 0, self.number, bytes(data)))
            sender.progressed(size)
            if self._pending:
                sender.flush()  # the transport may pause writing here
        sender.unblock(self)
        if self.on_sent is not None:
            self.on_sent()
        if self._trailers:
            sender.put_headers(self, self._trailers, last=True)
            sender.remove(self)


def _peer_text(transport: asyncio.Transport) -> str:
    """Return the client's address as gRPC writes it."""
    found = transport.get_extra_info("peername")
    if not isinstance(found, tuple):
        return "unix:"
    host, port = found[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
