"""One connection: reads frames, updates the flow-control windows, and enforces the protocol and the limits."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import ClassVar, Protocol, cast

from stoker.serve.grpc_server import frames
from stoker.serve.grpc_server.frames import ConnectionFault, Error
from stoker.serve.grpc_server.headers import CallHeaders, HeaderDecoder
from stoker.serve.grpc_server.limits import (
    CONNECTION_WINDOW,
    EARLY_RESET_S,
    MAX_EARLY_RESETS,
    MAX_FRAME_BYTES,
    MAX_PINGS,
    MAX_SETTINGS,
    PING_REFILL_S,
    STREAM_WINDOW,
)
from stoker.serve.grpc_server.sender import Call, Sender, Stream


class Service(Protocol):
    """The parts of the server that a connection uses."""

    max_header_bytes: int
    """Maximum size of a call's headers, bytes."""

    max_streams: int
    """Maximum number of concurrent calls of a connection. A further call is refused, and the client may try again."""

    def call(self, stream: Stream, headers: CallHeaders) -> None:
        """Start a call, and set `stream.call` unless the call ends at once."""

    def opened(self, connection: Connection) -> bool:
        """Register a connection; return False if there are too many connections."""

    def closed(self, connection: Connection) -> None:
        """Remove a closed connection."""


class Connection(asyncio.Protocol):
    """The server side of an HTTP/2 connection."""

    def __init__(self, service: Service) -> None:
        """Args: service: the server, which answers the calls."""
        self._service = service
        self._decoder = HeaderDecoder(service.max_header_bytes)
        self.opened_s = self.last_call_s = time.monotonic()
        self.goaway_s = 0.0  # when GOAWAY was sent; 0 if it was not
        self.refuses_calls = False  # whether no new call is accepted
        self.has_preface = False  # whether the client has sent the preface
        # Since when the preface, a frame or headers have been incomplete.
        self.partial_s = self.opened_s
        self._last_stream = 0  # number of the newest stream of the client
        self._last_accepted = frames.MAX_31_BITS  # streams with higher numbers are ignored
        self._window = CONNECTION_WINDOW
        # Incomplete headers: stream, flags, bytes.
        self._headers: tuple[int, int, bytearray] | None = None
        self._parts: list[bytes] = []  # parts of an incomplete frame
        self._received, self._needed = 0, len(frames.PREFACE)
        self._window_grew = False  # whether more may be sent since the last `send_waiting`
        self._closing_s = 0.0  # since when the connection has been closing; 0: it is not
        self._pinged_s = self.opened_s
        self._early_resets = (0.0, 0)  # start of the current second, and resets in it

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the server's settings, or close the connection if there are too many connections."""
        self.sender = Sender(cast("asyncio.Transport", transport))
        if not self._service.opened(self):
            self.sender.transport.abort()
            return
        self.sender.put(
            frames.settings(
                {
                    frames.MAX_STREAMS: self._service.max_streams,
                    frames.INITIAL_WINDOW: STREAM_WINDOW,
                    frames.MAX_FRAME: MAX_FRAME_BYTES,
                    frames.MAX_HEADERS: self._service.max_header_bytes,
                }
            )
            + frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
        )
        self.sender.flush()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Cancel the running calls."""
        self._service.closed(self)
        for stream in list(self.sender.streams.values()):
            self._cancel(stream)

    def pause_writing(self) -> None:
        """Stop reading requests from a client that does not read its responses, so that responses do not pile up."""
        self.sender.is_paused = True
        self.sender.progress_s = time.monotonic()
        self.sender.transport.pause_reading()

    def resume_writing(self) -> None:
        """Read and write again."""
        self.sender.is_paused = False
        self.sender.progress_s = time.monotonic()
        if not self.sender.transport.is_closing():
            self.sender.transport.resume_reading()
            self.sender.send_waiting()
            self.sender.flush()

    def data_received(self, data: bytes) -> None:
        """Handle all complete frames."""
        self.sender.received_s = time.monotonic()
        if self._parts or len(data) < self._needed:
            self._parts.append(data)
            self._received += len(data)
            if self._received < self._needed:
                return
            data = b"".join(self._parts)
            self._parts.clear()
        try:
            self._read(data)
            if self._window_grew:
                self._window_grew = False
                self.sender.send_waiting()
        except ConnectionFault as fault:
            self._fail(fault)
        self.sender.flush()

    # -- frames of the client

    def _read(self, data: bytes) -> None:
        at, end = 0, len(data)
        if not self.has_preface:
            at = len(frames.PREFACE)
            if not data.startswith(frames.PREFACE):
                raise ConnectionFault(Error.PROTOCOL_ERROR, "only HTTP/2 is supported on this port")
            self.has_preface = True
        needed = frames.HEADER.size
        while end - at >= frames.HEADER.size:
            high, low, kind, flags, stream = frames.HEADER.unpack_from(data, at)
            begin = at + frames.HEADER.size
            stop = begin + (high << 8 | low)
            if stop - begin > MAX_FRAME_BYTES:
                raise ConnectionFault(
                    Error.FRAME_SIZE_ERROR, f"a frame may have at most {MAX_FRAME_BYTES} bytes"
                )
            if stop > end:
                needed = stop - at
                break
            at = stop
            self._handle(kind, flags, stream & frames.MAX_31_BITS, data[begin:stop])
            if self.sender.transport.is_closing():
                return
        if at < end:
            self._parts.append(data[at:])
            if self._headers is None:  # else the headers began earlier
                self.partial_s = self.sender.received_s
        self._received, self._needed = end - at, needed

    def _handle(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._headers is not None and (
            kind != frames.CONTINUATION or stream != self._headers[0]
        ):
            raise ConnectionFault(Error.PROTOCOL_ERROR, "headers must continue without a gap")
        handler = self._HANDLERS.get(kind)
        if handler is not None:  # frames of unknown types are ignored
            handler(self, flags, stream, payload)

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._window -= size
        if self._window < 0:
            raise ConnectionFault(Error.FLOW_CONTROL_ERROR, "more data than the window allows")
        if self._window < CONNECTION_WINDOW // 2:
            self.sender.put(frames.window_update(0, CONNECTION_WINDOW - self._window))
            self._window = CONNECTION_WINDOW
        if number not in self.sender.receiving:
            self._on_finished_stream(number)
            return
        stream, ended = self.sender.streams[number], bool(flags & frames.END_STREAM)
        stream.receive_window -= size
        if stream.receive_window < 0:
            raise ConnectionFault(Error.FLOW_CONTROL_ERROR, "more data than the window allows")
        if flags & frames.PADDED:
            payload = frames.without_padding(flags & frames.PADDED, payload)
        if ended:
            self.sender.receiving.discard(number)
        elif stream.receive_window < STREAM_WINDOW // 2:
            self.sender.put(frames.window_update(number, STREAM_WINDOW - stream.receive_window))
            stream.receive_window = STREAM_WINDOW
        if stream.call is not None:
            stream.call.receive(payload, ended=ended)

    def _on_finished_stream(self, number: int) -> None:
        """Handle data for a stream that has ended.

        If the server has ended it, the data is ignored; else it is a fault.
        """
        if number == 0 or number > self._last_stream:
            raise ConnectionFault(Error.PROTOCOL_ERROR, "data of a stream that was never opened")
        if number in self.sender.streams:  # the client has ended it
            self._reset(self.sender.streams[number], Error.STREAM_CLOSED)

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if number % 2 == 0:
            raise ConnectionFault(Error.PROTOCOL_ERROR, "streams of a client must have odd numbers")
        if flags & (frames.PADDED | frames.HAS_PRIORITY):
            payload = frames.without_padding(flags, payload)
        self._check_size(payload)
        if flags & frames.END_HEADERS:
            self._on_header_block(number, payload, ended=bool(flags & frames.END_STREAM))
        else:
            self._headers = (number, flags, bytearray(payload))
            self.partial_s = self.sender.received_s

    def _check_size(self, block: bytes | bytearray) -> None:
        """Raise if a header block is too large. HPACK is hardly ever larger than the headers that it encodes."""
        if len(block) > 2 * self._service.max_header_bytes:
            raise ConnectionFault(Error.ENHANCE_YOUR_CALM, "the headers are too large")

    def _on_continuation(self, flags: int, _number: int, payload: bytes) -> None:
        if self._headers is None:
            raise ConnectionFault(Error.PROTOCOL_ERROR, "CONTINUATION without HEADERS")
        number, first, block = self._headers
        block += payload
        self._check_size(block)
        if not payload:
            raise ConnectionFault(Error.ENHANCE_YOUR_CALM, "an empty CONTINUATION")
        if flags & frames.END_HEADERS:
            self._headers = None
            self._on_header_block(number, bytes(block), ended=bool(first & frames.END_STREAM))

    def _on_header_block(self, number: int, block: bytes, *, ended: bool) -> None:
        headers = self._decoder.decode(block)  # in any case, because the next block depends on it
        if number <= self._last_stream:
            self._on_trailers(number, ended=ended)
            return
        self._last_stream = number
        if number > self._last_accepted:
            return  # the client knows from GOAWAY that this stream is not processed
        stream = Stream(self.sender, number)
        if len(self.sender.streams) >= self._service.max_streams:
            self.sender.put(frames.reset(number, Error.REFUSED_STREAM))
            return
        self.sender.streams[number] = stream
        if not ended:
            self.sender.receiving.add(number)
        if headers.malformed:
            self._reset(stream, Error.PROTOCOL_ERROR)
        elif headers.http_status:
            stream.refuse(headers.http_status)
        else:
            self._service.call(stream, headers)
            if ended and stream.call is not None:
                stream.call.receive(b"", ended=True)

    def _on_trailers(self, number: int, *, ended: bool) -> None:
        """Handle headers that follow the messages and end the request. gRPC clients send no content in them."""
        if number not in self.sender.receiving:
            self._on_finished_stream(number)
        elif not ended:
            raise ConnectionFault(Error.PROTOCOL_ERROR, "headers between the messages of a call")
        else:
            self.sender.receiving.discard(number)
            call = self.sender.streams[number].call
            if call is not None:
                call.receive(b"", ended=True)

    def _on_reset(self, _flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Error.FRAME_SIZE_ERROR, "RST_STREAM must have 4 bytes")
        if number == 0 or number > self._last_stream:
            raise ConnectionFault(
                Error.PROTOCOL_ERROR, "RST_STREAM of a stream that was never opened"
            )
        stream = self.sender.streams.get(number)
        if stream is not None:
            # Discarded, so that the server does not reset the stream, too.
            self.sender.receiving.discard(number)
            self._cancel(stream)
            self._count_reset(stream)

    def _reset(self, stream: Stream, error: Error) -> None:
        """Reset a stream because of a fault of the client. It is counted like a reset by the client."""
        call = stream.call
        stream.reset(error)
        if call is not None:
            call.cancelled()
        self._count_reset(stream)

    def _cancel(self, stream: Stream) -> None:
        call = stream.call
        self.sender.remove(stream)
        if call is not None:
            call.cancelled()

    def _on_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(Error.PROTOCOL_ERROR, "SETTINGS must not name a stream")
        if flags & frames.ACK:
            return
        self._count_ping()
        settings = frames.read_settings(payload)
        if len(settings) > MAX_SETTINGS:
            raise ConnectionFault(Error.ENHANCE_YOUR_CALM, "too many settings in one frame")
        for name, value in settings:
            self._apply_setting(name, value)
        self.sender.put(frames.frame(frames.SETTINGS, frames.ACK, 0))
        # Data is sent after the ACK, from which on the client counts with the new size.
        for stream in list(self.sender.stalled.values()):
            if stream.window > 0:
                stream.send_pending()

    def _apply_setting(self, name: int, value: int) -> None:
        if name == frames.INITIAL_WINDOW:
            self._resize_windows(value)
        elif name == frames.MAX_FRAME:
            if not frames.DEFAULT_FRAME <= value < 1 << 24:
                raise ConnectionFault(Error.PROTOCOL_ERROR, "MAX_FRAME_SIZE is out of range")
            self.sender.max_frame = min(value, MAX_FRAME_BYTES)
        elif name == frames.HEADER_TABLE and value < frames.DEFAULT_HEADER_TABLE:
            self.sender.shrink_header_table()

    def _resize_windows(self, window: int) -> None:
        streams = self.sender.streams.values()
        for stream in streams:
            stream.window += window - self.sender.initial_window
        self.sender.initial_window = window
        if max([window, *(stream.window for stream in streams)]) > frames.MAX_31_BITS:
            raise ConnectionFault(Error.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE is out of range")

    def _on_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise ConnectionFault(Error.FRAME_SIZE_ERROR, "PING must have 8 bytes and no stream")
        if not flags & frames.ACK:
            self._count_ping()
            self.sender.put(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _on_window_update(self, _flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Error.FRAME_SIZE_ERROR, "WINDOW_UPDATE must have 4 bytes")
        increment = int.from_bytes(payload, "big") & frames.MAX_31_BITS
        if number == 0:
            self.sender.window += increment
            if not increment or self.sender.window > frames.MAX_31_BITS:
                raise ConnectionFault(Error.FLOW_CONTROL_ERROR, "the window is out of range")
            self._window_grew = True
            return
        if number > self._last_stream:
            raise ConnectionFault(
                Error.PROTOCOL_ERROR, "WINDOW_UPDATE of a stream that was never opened"
            )
        stream = self.sender.streams.get(number)
        if stream is None:
            return
        stream.window += increment
        if not increment or stream.window > frames.MAX_31_BITS:
            self._reset(stream, Error.FLOW_CONTROL_ERROR)
        elif number in self.sender.stalled:
            stream.send_pending()

    def _on_push_promise(self, _flags: int, _number: int, _payload: bytes) -> None:
        raise ConnectionFault(Error.PROTOCOL_ERROR, "a client must not send PUSH_PROMISE")

    def _count_ping(self) -> None:
        now_s, sender = self.sender.received_s, self.sender
        sender.pings = max(0.0, sender.pings - (now_s - self._pinged_s) / PING_REFILL_S) + 1
        self._pinged_s = now_s
        if sender.pings > MAX_PINGS:
            raise ConnectionFault(Error.ENHANCE_YOUR_CALM, "too_many_pings")

    def _count_reset(self, stream: Stream) -> None:
        """Count a stream that was reset right after its start: such streams cost the server more than the client."""
        if self.sender.received_s - stream.started_s > EARLY_RESET_S:
            return
        since_s, count = self._early_resets
        if self.sender.received_s - since_s > 1.0:
            since_s, count = self.sender.received_s, 0
        self._early_resets = since_s, count + 1
        if count >= MAX_EARLY_RESETS:
            raise ConnectionFault(Error.ENHANCE_YOUR_CALM, "too many streams are reset")

    _HANDLERS: ClassVar[dict[int, Callable[[Connection, int, int, bytes], None]]] = {
        frames.DATA: _on_data,
        frames.HEADERS: _on_headers,
        frames.RST_STREAM: _on_reset,
        frames.SETTINGS: _on_settings,
        frames.PUSH_PROMISE: _on_push_promise,
        frames.PING: _on_ping,
        frames.WINDOW_UPDATE: _on_window_update,
        frames.CONTINUATION: _on_continuation,
    }
    """Frame type -> its handler. PRIORITY and GOAWAY are ignored."""

    # -- shutdown

    @property
    def calls(self) -> list[Call]:
        """The running calls."""
        calls = [stream.call for stream in self.sender.streams.values()]
        return [call for call in calls if call is not None]

    @property
    def is_partial(self) -> bool:
        """Whether the rest of a frame or of headers is missing."""
        return bool(self._parts) or self._headers is not None

    def go_away(self, *, now: bool) -> None:
        """Send GOAWAY, so that the client opens no more calls on this connection.

        Args:
            now: Whether calls that the client opens before it receives GOAWAY are refused, too.
        """
        if now:
            self._last_accepted, self.refuses_calls = self._last_stream, True
        self.goaway_s = self.goaway_s or time.monotonic()
        self.sender.put(frames.goaway(self._last_accepted, Error.NO_ERROR))
        self.sender.flush()

    def cut(self, reason: str) -> None:
        """Close the connection of a client that is too slow."""
        self._fail(ConnectionFault(Error.ENHANCE_YOUR_CALM, reason))
        if self.sender.is_paused:
            self.sender.transport.abort()

    def abort_after(self, seconds: float) -> None:
        """Abort a closing connection if the client has not read the rest within this many seconds."""
        now_s = time.monotonic()
        self._closing_s = self._closing_s or now_s
        if now_s - self._closing_s > seconds:
            self.sender.transport.abort()

    def _fail(self, fault: ConnectionFault) -> None:
        self.sender.put(frames.goaway(self._last_stream, fault.error, str(fault)))
        self.sender.flush()
        self.sender.transport.close()
