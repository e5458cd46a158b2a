"""What goes out of a connection: the answers of its streams, as its client's windows allow."""

from __future__ import annotations

import asyncio
import struct
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from stoker.serve.grpc.http2 import frames, heads
from stoker.serve.grpc.http2.frames import Error

STREAM_WINDOW = 8 << 20
"""What a client may send on a stream before it hears more."""

_MOVED_BYTES = 16 << 10
"""What a client takes within its time at least, of an answer that waits for it."""

_LAST = frames.END_HEADERS | frames.END_STREAM
_PREFIX = struct.Struct(">BI")
"""What stands before each message: whether it is compressed, and its length."""


class Consumer(Protocol):
    """What is done with the messages of a stream."""

    def feed(self, data: bytes, *, ended: bool) -> None:
        """Take more of what the client sends.

        Args:
            data: The next bytes.
            ended: Whether they are the last.
        """

    def cancelled(self) -> None:
        """The client has given it up, or is gone."""

    def look(self, now_s: float) -> None:
        """End it if its client keeps it waiting."""

    def leave(self) -> None:
        """The server ends: what would last as long as the client likes ends now."""

    def cut(self) -> None:
        """The server's time is over."""


class Exchange:
    """The streams of a connection and what is sent of them; used by the loop's thread only."""

    def __init__(self, transport: asyncio.Transport) -> None:
        """Args: transport: where bytes go."""
        self.transport = transport
        self.peer = _peer_text(transport)
        self.streams: dict[int, Stream] = {}
        self.unfinished: set[int] = set()  # streams whose client has more to say
        self.blocked: dict[int, Stream] = {}  # streams that the connection's window holds back
        self.stalled: dict[int, Stream] = {}  # those that their own window holds back
        self.initial_window = self.window = frames.DEFAULT_WINDOW
        self.frame = frames.DEFAULT_FRAME
        self.is_paused = False  # the client reads nothing
        self.heard_s = self.moved_s = time.monotonic()  # when he last spoke, and took something
        self.held_s = 0.0  # since when data waits for him
        self.pings = 0.0  # of the client, and settings, that nothing has paid for
        self._moved_bytes = 0  # since `moved_s`
        self._out: list[bytes] = []

    def put(self, data: bytes) -> None:
        """Send bytes with the next `flush`."""
        self._out.append(data)

    def flush(self) -> None:
        """Send what was put."""
        if self._out:
            data = self._out[0] if len(self._out) == 1 else b"".join(self._out)
            self._out.clear()
            if not self.transport.is_closing():
                self.transport.write(data)

    def has(self, stream: Stream) -> bool:
        """Whether a stream is open."""
        return self.streams.get(stream.number) is stream

    def hears(self, stream: Stream) -> bool:
        """Whether the client has more to say on a stream."""
        return stream.number in self.unfinished

    def forget(self, stream: Stream) -> None:
        """It is over; a client that is not done with it is told to be."""
        number = stream.number
        self.streams.pop(number, None)
        self.blocked.pop(number, None)
        self.stalled.pop(number, None)
        stream.call = None
        if number in self.unfinished:
            self.unfinished.discard(number)
            self.put(frames.reset(number, Error.NO_ERROR))

    def block(self, stream: Stream) -> None:
        """A stream has data that may not be sent yet."""
        if not self.blocked and not self.stalled:
            self.held_s = time.monotonic()
        here, there = self.blocked, self.stalled
        if stream.window <= 0:
            here, there = there, here
        here[stream.number] = stream
        there.pop(stream.number, None)

    def unblock(self, stream: Stream) -> None:
        """It has none any more."""
        self.blocked.pop(stream.number, None)
        self.stalled.pop(stream.number, None)

    def moved(self, size: int) -> None:
        """The client takes what waits for him; a few bytes now and then are not enough."""
        self._moved_bytes += size
        self.pings = 0.0
        if self._moved_bytes >= _MOVED_BYTES:
            self._moved_bytes = 0
            self.moved_s = time.monotonic()

    def pump(self) -> None:
        """Send what the connection's window lets go."""
        for stream in list(self.blocked.values()):
            if self.window <= 0 or self.is_paused:
                return
            stream.pump()


class Stream:
    """A call's way back to its client; used by the loop's thread only."""

    __slots__ = (
        "_begun",
        "_last",
        "_waiting",
        "began_s",
        "call",
        "exchange",
        "number",
        "on_sent",
        "room",
        "window",
    )

    def __init__(self, exchange: Exchange, number: int) -> None:
        """Args: exchange: the connection's; number: the stream's."""
        self.exchange = exchange
        self.number = number
        self.call: Consumer | None = None  # as long as it is open
        self.on_sent: Callable[[], None] | None = None  # called when no message waits any more
        self.began_s = exchange.heard_s
        self.room = STREAM_WINDOW  # what the client may still send
        self.window = exchange.initial_window  # what may still be sent to him
        self._begun = False
        self._waiting: deque[memoryview] = deque()  # of messages, until the windows let them go
        self._last = b""  # the header block of the end, until all else is sent

    @property
    def is_open(self) -> bool:
        """Whether the client still waits for it."""
        return self.exchange.has(self)

    def answer(self, message: bytes) -> None:
        """Send the one message of a call that went well, and its end.

        Args:
            message: Serialised.
        """
        exchange, number, size = self.exchange, self.number, len(message) + 5
        room = min(self.window, exchange.window, exchange.frame)
        if self._begun or exchange.is_paused or size > room or not exchange.has(self):
            self.send(message)
            self.end()
            return
        exchange.window -= size
        pack = frames.HEAD.pack
        exchange.put(
            b"".join(
                (
                    pack(0, len(heads.ANSWER), frames.HEADERS, frames.END_HEADERS, number),
                    heads.ANSWER,
                    pack(size >> 8, size & 0xFF, frames.DATA, 0, number),
                    _PREFIX.pack(0, size - 5),
                    message,
                    pack(0, len(heads.OK), frames.HEADERS, _LAST, number),
                    heads.OK,
                )
            )
        )
        exchange.pings = 0.0
        exchange.forget(self)

    def send(self, message: bytes) -> None:
        """Send one message.

        Args:
            message: Serialised.
        """
        if not self._begun:
            self._begun = True
            begin = frames.frame(frames.HEADERS, frames.END_HEADERS, self.number, heads.ANSWER)
            self.exchange.put(begin)
        self._waiting.append(memoryview(_PREFIX.pack(0, len(message)) + message))
        self.pump()

    def end(self, code: int = 0, said: str = "") -> None:
        """End the call, once all messages are sent.

        Args:
            code: gRPC's status.
            said: The reason, if it is none.
        """
        self._last = heads.OK if code == 0 else heads.ending(code, said)
        if not self._begun:
            self._begun = True
            self._last = heads.ANSWER + self._last
        self.pump()

    def refuse(self, status: int) -> None:
        """Answer what is no call of gRPC by an HTTP status."""
        self._begun = True
        self._last = heads.refusal(status)
        self.pump()

    def reset(self, error: Error) -> None:
        """End it at once."""
        self.exchange.put(frames.reset(self.number, error))
        self.exchange.unfinished.discard(self.number)
        self.exchange.forget(self)

    def pump(self) -> None:
        """Send what the windows allow."""
        exchange = self.exchange
        if not exchange.has(self):
            self._waiting.clear()
            return
        while self._waiting:
            data = self._waiting[0]
            size = min(len(data), self.window, exchange.window, exchange.frame)
            if exchange.is_paused or size <= 0:
                exchange.block(self)
                return
            self._waiting.popleft()
            if size < len(data):
                self._waiting.appendleft(data[size:])
                data = data[:size]
            self.window -= size
            exchange.window -= size
            exchange.put(frames.frame(frames.DATA, 0, self.number, bytes(data)))
            exchange.moved(size)
            if self._waiting:
                exchange.flush()  # which may say that the client does not read
        exchange.unblock(self)
        if self.on_sent is not None:
            self.on_sent()
        if self._last:
            exchange.put(frames.frame(frames.HEADERS, _LAST, self.number, self._last))
            exchange.forget(self)


def _peer_text(transport: asyncio.Transport) -> str:
    """The client's address as gRPC writes it."""
    found = transport.get_extra_info("peername")
    if not isinstance(found, tuple):
        return "unix:"
    host, port = found[:2]
    return f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
