"""One connection: frames in and out, the windows of both sides, and what a client may not do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import ClassVar, Protocol, cast

from stoker.serve.grpc.http2 import frames
from stoker.serve.grpc.http2.exchange import STREAM_WINDOW, Consumer, Exchange, Stream
from stoker.serve.grpc.http2.frames import ConnectionFault, Error
from stoker.serve.grpc.http2.heads import CallHead, HeaderBlocks

_FRAME = 1 << 20
"""Largest frame that is taken: an image is one or few."""

_WINDOW = 64 << 20
"""The same of a connection."""

_PINGS = 100
"""Pings and settings that a client may send between two answers, each of which is answered itself;
and one more each `_PING_S`."""

_PING_S = 1.0

_SETTINGS = 32
"""Most settings in a frame; six are known."""

_RESETS = 1000
"""Calls that a client may give up in a second, each within `_SOON_S` of its begin."""

_SOON_S = 0.05


class Service(Protocol):
    """What answers calls."""

    max_header_bytes: int
    """Largest headers of a call."""

    max_streams: int
    """Most calls of a connection at once; another is refused, and its client may try again."""

    def call(self, stream: Stream, head: CallHead) -> None:
        """A new call: becomes the stream's, if it does not end at once."""

    def opened(self, connection: Connection) -> bool:
        """Whether another connection may be; it is known from here on."""

    def closed(self, connection: Connection) -> None:
        """It is gone."""


class Connection(asyncio.Protocol):
    """Reads frames, keeps the streams, and holds the client to the protocol."""

    def __init__(self, service: Service) -> None:
        """Args: service: what answers its calls."""
        self._service = service
        self._heads = HeaderBlocks(service.max_header_bytes)
        self.began_s = self.used_s = time.monotonic()  # and when its last call ended
        self.left_s = 0.0  # since when its client is told to go; 0 if he is not
        self.has_left = False  # whether no call of his is begun any more
        self.greeted = False  # the client has said that he speaks HTTP/2
        self.amid_s = self.began_s  # since when a frame, or the greeting, is not whole
        self._last = 0  # the newest stream
        self._limit = frames.STREAM_BITS  # the last stream that is answered
        self._room = _WINDOW
        self._block: tuple[int, int, bytearray] | None = None  # headers that go on
        self._parts: list[bytes] = []  # of a frame that is not whole
        self._have, self._need = 0, len(frames.PREFACE)
        self._widened = False  # whether more may be sent since the last `pump`
        self._closing_s = 0.0  # since when it is seen to be closing
        self._pinged_s = self.began_s
        self._resets = (0.0, 0)  # since when, and how many

    # -- asyncio's

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say what this side takes."""
        self.exchange = Exchange(cast("asyncio.Transport", transport))
        if not self._service.opened(self):
            self.exchange.transport.abort()
            return
        self.exchange.put(
            frames.settings(
                {
                    frames.MAX_STREAMS: self._service.max_streams,
                    frames.INITIAL_WINDOW: STREAM_WINDOW,
                    frames.MAX_FRAME: _FRAME,
                    frames.MAX_HEADERS: self._service.max_header_bytes,
                }
            )
            + frames.window_update(0, _WINDOW - frames.DEFAULT_WINDOW)
        )
        self.exchange.flush()

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - asyncio's
        """Whoever works for it is told."""
        self._service.closed(self)
        for stream in list(self.exchange.streams.values()):
            self._give_up(stream)

    def pause_writing(self) -> None:
        """The client does not read: what he sends is not read either, so that no answer piles up."""
        self.exchange.is_paused = True
        self.exchange.moved_s = time.monotonic()
        self.exchange.transport.pause_reading()

    def resume_writing(self) -> None:
        """He reads again."""
        self.exchange.is_paused = False
        self.exchange.moved_s = time.monotonic()
        if not self.exchange.transport.is_closing():
            self.exchange.transport.resume_reading()
            self.exchange.pump()
            self.exchange.flush()

    def data_received(self, data: bytes) -> None:
        """Read all whole frames."""
        self.exchange.heard_s = time.monotonic()
        if self._parts or len(data) < self._need:
            self._parts.append(data)
            self._have += len(data)
            if self._have < self._need:
                return
            data = b"".join(self._parts)
            self._parts.clear()
        try:
            self._read(data)
            if self._widened:
                self._widened = False
                self.exchange.pump()
        except ConnectionFault as fault:
            self._fail(fault)
        self.exchange.flush()

    # -- what comes in

    def _read(self, data: bytes) -> None:
        at, end = 0, len(data)
        if not self.greeted:
            at = len(frames.PREFACE)
            if not data.startswith(frames.PREFACE):
                raise ConnectionFault(Error.PROTOCOL_ERROR, "only HTTP/2 is spoken here")
            self.greeted = True
        need = frames.HEAD.size
        while end - at >= frames.HEAD.size:
            high, low, kind, flags, stream = frames.HEAD.unpack_from(data, at)
            begin = at + frames.HEAD.size
            stop = begin + (high << 8 | low)
            if stop - begin > _FRAME:
                raise ConnectionFault(Error.FRAME_SIZE_ERROR, f"a frame has at most {_FRAME} bytes")
            if stop > end:
                need = stop - at
                break
            at = stop
            self._take(kind, flags, stream & frames.STREAM_BITS, data[begin:stop])
            if self.exchange.transport.is_closing():
                return
        if at < end:
            self._parts.append(data[at:])
            if self._block is None:  # else since the headers began
                self.amid_s = self.exchange.heard_s
        self._have, self._need = end - at, need

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or stream != self._block[0]):
            raise ConnectionFault(Error.PROTOCOL_ERROR, "headers must go on without a gap")
        take = self._TAKES.get(kind)
        if take is not None:  # what is unknown is passed over
            take(self, flags, stream, payload)

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._room -= size
        if self._room < 0:
            raise ConnectionFault(Error.FLOW_CONTROL_ERROR, "more data than the window holds")
        if self._room < _WINDOW // 2:
            self.exchange.put(frames.window_update(0, _WINDOW - self._room))
            self._room = _WINDOW
        if number not in self.exchange.unfinished:
            self._after_its_end(number)
            return
        stream, ended = self.exchange.streams[number], bool(flags & frames.END_STREAM)
        stream.room -= size
        if stream.room < 0:
            raise ConnectionFault(Error.FLOW_CONTROL_ERROR, "more data than the window holds")
        if flags & frames.PADDED:
            payload = frames.content(flags & frames.PADDED, payload)
        if ended:
            self.exchange.unfinished.discard(number)
        elif stream.room < STREAM_WINDOW // 2:
            self.exchange.put(frames.window_update(number, STREAM_WINDOW - stream.room))
            stream.room = STREAM_WINDOW
        if stream.call is not None:
            stream.call.feed(payload, ended=ended)

    def _after_its_end(self, number: int) -> None:
        """Data may still be under way for a stream that this side has ended; else it is a fault."""
        if number == 0 or number > self._last:
            raise ConnectionFault(Error.PROTOCOL_ERROR, "data of a stream that was never opened")
        if number in self.exchange.streams:  # the client has ended it
            self._reset(self.exchange.streams[number], Error.STREAM_CLOSED)

    def _take_headers(self, flags: int, number: int, payload: bytes) -> None:
        if number % 2 == 0:
            raise ConnectionFault(Error.PROTOCOL_ERROR, "a client's streams are odd")
        if flags & (frames.PADDED | frames.PRIORITISED):
            payload = frames.content(flags, payload)
        self._check_block(payload)
        if flags & frames.END_HEADERS:
            self._open(number, payload, ended=bool(flags & frames.END_STREAM))
        else:
            self._block = (number, flags, bytearray(payload))
            self.amid_s = self.exchange.heard_s

    def _check_block(self, block: bytes | bytearray) -> None:
        """Packed headers are hardly larger than what they mean."""
        if len(block) > 2 * self._service.max_header_bytes:
            raise ConnectionFault(Error.ENHANCE_YOUR_CALM, "headers are too large")

    def _take_continuation(self, flags: int, _number: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(Error.PROTOCOL_ERROR, "no headers are to go on")
        number, first, block = self._block
        block += payload
        self._check_block(block)
        if not payload:
            raise ConnectionFault(Error.ENHANCE_YOUR_CALM, "headers go on in nothing")
        if flags & frames.END_HEADERS:
            self._block = None
            self._open(number, bytes(block), ended=bool(first & frames.END_STREAM))

    def _open(self, number: int, block: bytes, *, ended: bool) -> None:
        head = self._heads.read(block)  # always: the next block builds upon it
        if number <= self._last:
            self._trailers(number, ended=ended)
            return
        self._last = number
        if number > self._limit:
            return  # the client knows that nobody answers it
        stream = Stream(self.exchange, number)
        if len(self.exchange.streams) >= self._service.max_streams:
            self.exchange.put(frames.reset(number, Error.REFUSED_STREAM))
            return
        self.exchange.streams[number] = stream
        if not ended:
            self.exchange.unfinished.add(number)
        if head.malformed:
            self._reset(stream, Error.PROTOCOL_ERROR)
        elif head.http_status:
            stream.refuse(head.http_status)
        else:
            self._service.call(stream, head)
            if ended and stream.call is not None:
                stream.call.feed(b"", ended=True)

    def _trailers(self, number: int, *, ended: bool) -> None:
        """Headers after the messages: nothing in them is needed."""
        if number not in self.exchange.unfinished:
            self._after_its_end(number)
        elif not ended:
            raise ConnectionFault(Error.PROTOCOL_ERROR, "headers amid the messages of a call")
        else:
            self.exchange.unfinished.discard(number)
            call = self.exchange.streams[number].call
            if call is not None:
                call.feed(b"", ended=True)

    def _take_reset(self, _flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Error.FRAME_SIZE_ERROR, "a reset has 4 bytes")
        if number == 0 or number > self._last:
            raise ConnectionFault(Error.PROTOCOL_ERROR, "a stream that was never opened is reset")
        stream = self.exchange.streams.get(number)
        if stream is not None:
            self.exchange.unfinished.discard(number)  # he knows
            self._give_up(stream)
            self._spend_reset(stream)

    def _reset(self, stream: Stream, error: Error) -> None:
        """End a stream for what its client did; that costs no less than a reset of his own."""
        call = stream.call
        stream.reset(error)
        if call is not None:
            call.cancelled()
        self._spend_reset(stream)

    def _give_up(self, stream: Stream) -> None:
        call = stream.call
        self.exchange.forget(stream)
        if call is not None:
            call.cancelled()

    def _take_settings(self, flags: int, number: int, payload: bytes) -> None:
        if number:
            raise ConnectionFault(Error.PROTOCOL_ERROR, "settings are of the connection")
        if flags & frames.ACK:
            return
        self._spend_ping()
        given = frames.read_settings(payload)
        if len(given) > _SETTINGS:
            raise ConnectionFault(Error.ENHANCE_YOUR_CALM, "too many settings in a frame")
        for name, value in given:
            if name == frames.INITIAL_WINDOW:
                self._resize(value)
            elif name == frames.MAX_FRAME:
                if not frames.DEFAULT_FRAME <= value < 1 << 24:
                    raise ConnectionFault(Error.PROTOCOL_ERROR, "no size of a frame")
                self.exchange.frame = min(value, _FRAME)
        self.exchange.put(frames.frame(frames.SETTINGS, frames.ACK, 0))

    def _resize(self, window: int) -> None:
        if window > frames.STREAM_BITS:
            raise ConnectionFault(Error.FLOW_CONTROL_ERROR, "no size of a window")
        for stream in self.exchange.streams.values():
            stream.window += window - self.exchange.initial_window
        self.exchange.initial_window = window
        for stream in list(self.exchange.stalled.values()):
            if stream.window > 0:
                stream.pump()

    def _take_ping(self, flags: int, number: int, payload: bytes) -> None:
        if number or len(payload) != 8:
            raise ConnectionFault(Error.FRAME_SIZE_ERROR, "a ping has 8 bytes, and no stream")
        if not flags & frames.ACK:
            self._spend_ping()
            self.exchange.put(frames.frame(frames.PING, frames.ACK, 0, payload))

    def _take_window(self, _flags: int, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(Error.FRAME_SIZE_ERROR, "a window has 4 bytes")
        by = int.from_bytes(payload, "big") & frames.STREAM_BITS
        if number == 0:
            self.exchange.window += by
            if not 0 < by <= self.exchange.window <= frames.STREAM_BITS:
                raise ConnectionFault(Error.FLOW_CONTROL_ERROR, "no size of a window")
            self._widened = True
            return
        if number > self._last:
            raise ConnectionFault(Error.PROTOCOL_ERROR, "a window of a stream never opened")
        stream = self.exchange.streams.get(number)
        if stream is None:
            return
        stream.window += by
        if not 0 < by <= stream.window <= frames.STREAM_BITS:
            self._reset(stream, Error.FLOW_CONTROL_ERROR)
        elif number in self.exchange.stalled:
            stream.pump()

    def _take_push(self, _flags: int, _number: int, _payload: bytes) -> None:
        raise ConnectionFault(Error.PROTOCOL_ERROR, "a client pushes nothing")

    def _spend_ping(self) -> None:
        now_s, exchange = self.exchange.heard_s, self.exchange
        exchange.pings = max(0.0, exchange.pings - (now_s - self._pinged_s) / _PING_S) + 1
        self._pinged_s = now_s
        if exchange.pings > _PINGS:
            raise ConnectionFault(Error.ENHANCE_YOUR_CALM, "too_many_pings")

    def _spend_reset(self, stream: Stream) -> None:
        """A call that is given up as soon as it is begun costs this side only."""
        if self.exchange.heard_s - stream.began_s > _SOON_S:
            return
        since_s, spent = self._resets
        if self.exchange.heard_s - since_s > 1.0:
            since_s, spent = self.exchange.heard_s, 0
        self._resets = since_s, spent + 1
        if spent >= _RESETS:
            raise ConnectionFault(Error.ENHANCE_YOUR_CALM, "too many calls are given up")

    _TAKES: ClassVar[dict[int, Callable[[Connection, int, int, bytes], None]]] = {
        frames.DATA: _take_data,
        frames.HEADERS: _take_headers,
        frames.RST_STREAM: _take_reset,
        frames.SETTINGS: _take_settings,
        frames.PUSH_PROMISE: _take_push,
        frames.PING: _take_ping,
        frames.WINDOW_UPDATE: _take_window,
        frames.CONTINUATION: _take_continuation,
    }
    """What is done with a frame, by its kind; priorities and farewells need nothing."""

    # -- its end

    @property
    def calls(self) -> list[Consumer]:
        """Those under way."""
        found = [stream.call for stream in self.exchange.streams.values()]
        return [call for call in found if call is not None]

    @property
    def is_amid_frame(self) -> bool:
        """Whether the client still has to say the rest of a frame, or of headers."""
        return bool(self._parts) or self._block is not None

    def leave(self, *, now: bool) -> None:
        """Take no new calls.

        Args:
            now: Whether those that the client has not heard of it in are refused.
        """
        if now:
            self._limit, self.has_left = self._last, True
        self.left_s = self.left_s or time.monotonic()
        self.exchange.put(frames.goaway(self._limit, Error.NO_ERROR))
        self.exchange.flush()

    def cut(self, said: str) -> None:
        """End it because its client keeps it waiting."""
        self._fail(ConnectionFault(Error.ENHANCE_YOUR_CALM, said))
        self.exchange.flush()
        self.exchange.transport.abort() if self.exchange.is_paused else self.exchange.transport.close()

    def end_within(self, seconds: float) -> None:
        """Of one that is closing: end it if its client takes nothing for so long."""
        now_s = time.monotonic()
        self._closing_s = self._closing_s or now_s
        if now_s - self._closing_s > seconds:
            self.exchange.transport.abort()

    def _fail(self, fault: ConnectionFault) -> None:
        self.exchange.put(frames.goaway(self._last, fault.error, str(fault)))
        self.exchange.flush()
        self.exchange.transport.close()
