"""The gRPC server's connections against the `h2` library as the client, over bytes in memory.

`h2` checks every byte of the server against RFC 9113: an illegal frame, or one beyond a window, is an
error in it. Two machines drive it: a client that keeps the protocol, each of whose calls must get its
response, and one that also sends anything else, which must neither raise nor leave anything behind.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    ResponseReceived,
    SettingsAcknowledged,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import FlowControlError, TooManyStreamsError
from h2.settings import SettingCodes, Settings
from hpack import Decoder
from hyperframe.frame import Frame, GoAwayFrame, HeadersFrame
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from stoker.serve.grpc_server import frames, headers
from stoker.serve.grpc_server.connection import Connection
from stoker.serve.grpc_server.limits import MAX_FRAME_BYTES, ServerLimits
from stoker.serve.grpc_server.server import GrpcServer
from stoker.serve.limits import HttpLimits

EXAMPLES = int(os.environ.get("STOKER_FUZZ_EXAMPLES", "40"))
"""Of each machine: together about 12 s; `make soak` sets more."""

STEPS = 40
"""Most actions of a client. Fewer than the pings that the server allows without a response."""

MAX_STREAMS = 5
MAX_MESSAGE = 50_000
LIMITS = ServerLimits(
    connection=HttpLimits(head_bytes=4096),
    in_flight=100,
    held_bytes=1 << 20,
    receive_bytes=MAX_MESSAGE,
    streams=MAX_STREAMS,
)

ECHO, REPEAT, REFUSE, UNKNOWN = "/fuzz.S/Echo", "/fuzz.S/Repeat", "/fuzz.S/Refuse", "/fuzz.S/None"
REPEATS = 3


class InThisThread(Executor):
    """Runs work at once, so that an example always runs the same way."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


def repeat(request: bytes, _context: Any, send: Callable[[bytes | None], None]) -> None:
    for _ in range(REPEATS):
        send(request)
    send(None)


repeat.experimental_non_blocking = True  # type: ignore[attr-defined] # as grpcio marks it


def refuse(_request: bytes, context: Any) -> None:
    context.abort(grpc.StatusCode.NOT_FOUND, "nothing here")


def make_server() -> GrpcServer:
    """A server that is not started: its loop turns when a test turns it."""
    server = GrpcServer(pool=ThreadPoolExecutor(1), limits=LIMITS)
    server._pool = InThisThread()  # type: ignore[assignment]  # replaced for this test
    handlers = {
        "Echo": grpc.unary_unary_rpc_method_handler(lambda request, _context: request),
        "Repeat": grpc.unary_stream_rpc_method_handler(repeat),
        "Refuse": grpc.unary_unary_rpc_method_handler(refuse),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("fuzz.S", handlers),))
    return server


class Pipe(asyncio.Transport):
    """A transport that keeps in memory what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.reads, self.closed = True, False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Link:
    """A connection of the server, and bytes on their way to it."""

    def __init__(self, server: GrpcServer) -> None:
        self.server = server
        self.pipe = Pipe()
        self.connection: Connection = server._protocol()
        self.connection.connection_made(self.pipe)
        self.to_server = bytearray()

    def deliver(self, size: int) -> None:
        """Let the server read some of the bytes, as asyncio would."""
        if self.pipe.reads and not self.pipe.closed and self.to_server:
            data = bytes(self.to_server[:size])
            del self.to_server[:size]
            self.connection.data_received(data)
            self.turn()

    def turn(self) -> None:
        """Let the server's loop turn, until what is under way in it is done."""
        for _ in range(2):
            self.server.loop.run_until_complete(asyncio.sleep(0))

    def take(self, size: int) -> bytes:
        """What the server has written."""
        data = bytes(self.pipe.written[:size])
        del self.pipe.written[:size]
        return data

    def lose(self) -> None:
        self.pipe.closed = True
        self.connection.connection_lost(None)
        self.turn()


@dataclass(kw_only=True)
class Sent:
    """A call of the client."""

    path: str
    message: bytes
    left: bytes
    """What of the message is not sent."""

    is_ended: bool = False
    is_given_up: bool = False
    received: bytearray = field(default_factory=bytearray)
    trailers: dict[str, str] = field(default_factory=dict)
    is_answered: bool = False
    reset: int | None = None


def prefixed(message: bytes) -> bytes:
    return b"\x00" + len(message).to_bytes(4, "big") + message


def whole_frame(data: bytearray) -> int | None:
    """Where the first frame ends; None if more of it has to come."""
    end = 9 + int.from_bytes(data[:3], "big")
    return end if len(data) >= end else None


def client_connection() -> H2Connection:
    return H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))


def call_headers(path: str) -> list[tuple[str, str]]:
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", "fuzz"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]


MESSAGES = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([1000, 30_000, MAX_MESSAGE, MAX_MESSAGE + 1]).map(bytes),
)
SIZES = st.one_of(st.integers(0, 40), st.integers(0, 20_000), st.just(1 << 20))


class KeepsTheProtocol(RuleBasedStateMachine):
    """A client by `h2`; bytes of both directions arrive late and in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.server = make_server()
        self.link = Link(self.server)
        self.client = client_connection()
        self.calls: dict[int, Sent] = {}
        self.pings = self.settings = 0  # that are not acknowledged
        self.output = bytearray()  # of the server, until a frame is complete
        self.has_failed = False  # `h2` has refused what the server wrote

    @initialize(window=st.sampled_from([0, 1, 100, 65_535, 1 << 20]))
    def greet(self, window: int) -> None:
        self.client.local_settings = Settings(
            client=True, initial_values={SettingCodes.INITIAL_WINDOW_SIZE: window}
        )
        self.client.initiate_connection()
        self.settings += 1
        self._queue()

    def _queue(self) -> None:
        self.link.to_server += self.client.data_to_send()

    # -- what the client does

    @rule(
        path=st.sampled_from([ECHO, ECHO, REPEAT, REFUSE, UNKNOWN]),
        message=MESSAGES,
        metadata=st.integers(0, 3000),
        frame=st.sampled_from([20, 500, 16_384]),
    )
    def open_call(self, path: str, message: bytes, metadata: int, frame: int) -> None:
        stream = self.client.get_next_available_stream_id()
        self.client.max_outbound_frame_size = frame  # longer headers go on in CONTINUATION
        fields = [*call_headers(path), ("x-metadata", "m" * metadata)]
        try:
            self.client.send_headers(stream, fields)
        except TooManyStreamsError:  # before it has read the server's settings it knows no limit
            return
        self.calls[stream] = Sent(path=path, message=message, left=prefixed(message))
        self._queue()

    @rule(path=st.sampled_from([ECHO, REPEAT]), message=MESSAGES)
    def call(self, path: str, message: bytes) -> None:
        """A complete call in one piece."""
        before = len(self.calls)
        self.open_call(path=path, message=message, metadata=0, frame=16_384)
        if len(self.calls) > before:
            self._finish_whole(max(self.calls))

    def _finish_whole(self, stream: int) -> None:
        call = self.calls[stream]
        while call.left and self.client.local_flow_control_window(stream):
            self._send(stream, 1 << 20, None)
        if not call.left:
            self.client.end_stream(stream)
            call.is_ended = True
            self._queue()

    def _sending(self) -> list[int]:
        return [
            stream
            for stream, call in self.calls.items()
            if not (call.is_ended or call.is_given_up or call.is_answered or call.reset is not None)
        ]

    @precondition(lambda self: self._sending())
    @rule(data=st.data(), size=SIZES, padding=st.one_of(st.none(), st.integers(0, 255)))
    def send(self, data: st.DataObject, size: int, padding: int | None) -> None:
        stream = data.draw(st.sampled_from(self._sending()))
        self._send(stream, size, padding)

    def _send(self, stream: int, size: int, padding: int | None) -> None:
        call = self.calls[stream]
        extra = 0 if padding is None else padding + 1
        room = min(
            self.client.local_flow_control_window(stream),
            self.client.remote_settings.max_frame_size,
            16_384,
        )
        self.client.max_outbound_frame_size = 16_384
        part = call.left[: max(0, min(size, room - extra))]
        if room < extra:
            return
        call.left = call.left[len(part) :]
        self.client.send_data(stream, part, pad_length=padding)
        self._queue()

    @precondition(lambda self: self._sending())
    @rule(data=st.data(), by_trailers=st.booleans())
    def finish(self, data: st.DataObject, by_trailers: bool) -> None:
        """End the request, whether or not its message is whole."""
        stream = data.draw(st.sampled_from(self._sending()))
        if by_trailers:
            self.client.send_headers(stream, [("x-end", "1")], end_stream=True)
        else:
            self.client.end_stream(stream)
        self.calls[stream].is_ended = True
        self._queue()

    @precondition(lambda self: self._unanswered())
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self._unanswered()))
        self.client.reset_stream(stream, ErrorCodes.CANCEL)
        self.calls[stream].is_given_up = True
        self._queue()

    def _unanswered(self) -> list[int]:
        return [
            stream
            for stream, call in self.calls.items()
            if not (call.is_given_up or call.is_answered or call.reset is not None)
        ]

    @rule()
    def ping(self) -> None:
        self.client.ping(b"8 bytes.")
        self.pings += 1
        self._queue()

    # An acknowledgement means all pending settings to `h2`, so it may have those of one frame only.
    @precondition(lambda self: self.settings == 0)
    @rule(
        window=st.sampled_from([None, 0, 0, 1000, 65_535, 1 << 20]),
        frame=st.sampled_from([None, 16_384, 20_000, (1 << 24) - 1]),
        table=st.sampled_from([None, 0, 100, 4096]),
    )
    def change_settings(self, window: int | None, frame: int | None, table: int | None) -> None:
        changed = {
            SettingCodes.INITIAL_WINDOW_SIZE: window,
            SettingCodes.MAX_FRAME_SIZE: frame,
            SettingCodes.HEADER_TABLE_SIZE: table,
        }
        self.client.update_settings({k: v for k, v in changed.items() if v is not None})
        self.settings += 1
        self._queue()

    @rule(increment=st.sampled_from([1, 1000, 30_000, 100_000, 1 << 20]), data=st.data())
    def widen(self, increment: int, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from([None, *self._unanswered()]))
        self._widen(increment, stream)

    def _widen(self, increment: int, stream: int | None) -> None:
        try:
            self.client.increment_flow_control_window(increment, stream)
        except FlowControlError:  # beyond the largest window: `h2` has sent nothing
            return
        self._queue()

    @precondition(lambda self: self._unanswered())
    @rule(data=st.data(), weight=st.integers(1, 256))
    def prioritize(self, data: st.DataObject, weight: int) -> None:
        self.client.prioritize(data.draw(st.sampled_from(self._unanswered())), weight=weight)
        self._queue()

    # -- how bytes arrive

    @rule(size=st.one_of(st.integers(1, 30), st.integers(1, 5000), st.just(1 << 22)))
    def deliver(self, size: int) -> None:
        self.link.deliver(size)

    @rule(size=st.one_of(st.integers(1, 30), st.integers(1, 5000), st.just(1 << 22)))
    def read(self, size: int) -> None:
        self._read(size)

    def _read(self, size: int) -> None:
        self.output += self.link.take(size)
        self.has_failed = True
        # By the frame: `h2` applies a larger frame size only to bytes of the next call.
        while (end := whole_frame(self.output)) is not None:
            for event in self.client.receive_data(bytes(self.output[:end])):
                self._note(event)
            del self.output[:end]
        self.has_failed = False
        self._queue()  # `h2` acknowledges settings

    @rule()
    def exchange(self) -> None:
        """All bytes of both sides arrive."""
        self.link.deliver(1 << 24)
        self._read(1 << 24)
        self.link.deliver(1 << 24)

    @rule(pauses=st.booleans())
    def block_socket(self, pauses: bool) -> None:
        """The kernel's buffer of the server is full, or not any more."""
        if not pauses:
            self._unblock_socket()
        elif not self.link.connection.sender.is_paused:
            self.link.connection.pause_writing()

    def _unblock_socket(self) -> None:
        if self.link.connection.sender.is_paused:
            self.link.connection.resume_writing()
            self.link.turn()

    def _note(self, event: Event) -> None:
        assert not isinstance(event, ConnectionTerminated), event.additional_data
        if isinstance(event, PingAckReceived):
            self.pings -= 1
        elif isinstance(event, SettingsAcknowledged):
            self.settings -= 1
        elif isinstance(event, ResponseReceived | TrailersReceived):
            assert event.stream_id is not None
            self.calls[event.stream_id].trailers |= dict(event.headers or ())  # type: ignore[arg-type]  # h2 decodes them to text
        elif isinstance(event, DataReceived):
            assert event.stream_id is not None
            self.calls[event.stream_id].received += event.data or b""
        elif isinstance(event, StreamEnded):
            self.calls[event.stream_id].is_answered = True
        elif isinstance(event, StreamReset):
            call = self.calls[event.stream_id]
            if not call.is_answered:
                call.reset = int(event.error_code)
            call.is_ended = True  # the client may send no more

    # -- what must hold

    @invariant()
    def the_server_counts_right(self) -> None:
        sender = self.link.connection.sender
        assert len(sender.streams) <= MAX_STREAMS
        assert sender.receiving <= sender.streams.keys()
        assert sender.waiting.keys() | sender.stalled.keys() <= sender.streams.keys()
        assert not sender.waiting.keys() & sender.stalled.keys()
        assert self.server.held_bytes >= 0
        assert sum(map(len, self.link.connection._parts)) < MAX_FRAME_BYTES + (1 << 22)

    def _settle(self) -> None:
        """End every call, widen every window, and let all bytes arrive."""
        self._unblock_socket()
        for _ in range(40):
            for stream in self._sending():
                self._finish_whole(stream)
            self.link.deliver(1 << 24)
            self._read(1 << 24)
            if not self.link.to_server and not self.link.pipe.written and not self._unanswered():
                return
            for unanswered in [None, *self._unanswered()]:
                self._widen(1 << 20, unanswered)

    def teardown(self) -> None:
        try:
            if self.has_failed:
                return  # what it raised is the finding
            self._settle()
            assert (self.pings, self.settings) == (0, 0)
            for call in self.calls.values():
                if not call.is_given_up:
                    check_outcome(call)
        finally:
            self._end()

    def _end(self) -> None:
        self.link.lose()
        assert not self.link.connection.sender.streams
        assert self.server.held_bytes == 0
        assert self.server._in_flight == 0
        assert not self.server._connections
        self.server.stop(0)


def check_outcome(call: Sent) -> None:
    """Every call that its client did not give up has its response."""
    if call.reset is not None:
        assert call.reset == ErrorCodes.REFUSED_STREAM
        return
    assert call.is_answered
    status = int(call.trailers["grpc-status"])
    if call.path == UNKNOWN:
        assert status == grpc.StatusCode.UNIMPLEMENTED.value[0]
    elif len(call.message) > MAX_MESSAGE:
        has_prefix = len(call.left) <= len(call.message)
        code = (
            grpc.StatusCode.RESOURCE_EXHAUSTED if has_prefix else grpc.StatusCode.INVALID_ARGUMENT
        )
        assert status == code.value[0]
    elif call.left:
        assert status == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    elif call.path == REFUSE:
        assert status == grpc.StatusCode.NOT_FOUND.value[0]
    else:
        assert status == 0, call.trailers
        times = REPEATS if call.path == REPEAT else 1
        assert bytes(call.received) == prefixed(call.message) * times


FRAMES = st.builds(
    frames.frame,
    st.one_of(st.integers(0, 9), st.integers(0, 255)),
    st.one_of(st.sampled_from([0, 1, 4, 5, 8, 0x20, 0x2D]), st.integers(0, 255)),
    st.one_of(st.integers(0, 12), st.sampled_from([0x7FFFFFFF, 0x80000001, 0xFFFFFFFF])),
    st.one_of(
        st.binary(max_size=40), st.binary(min_size=4, max_size=4), st.just(70_000).map(bytes)
    ),
)
NAMES = (
    ":method :path :scheme :status :x X te connection grpc-timeout content-type x-bin grpc-encoding"
)
VALUES = ["", "POST", ECHO, "1S", "99999999H", "%", "gzip", "a\nb", "\0", "x" * 5000]
FIELDS = st.lists(
    st.tuples(st.sampled_from(["", "a b", *NAMES.split()]), st.sampled_from(VALUES)), max_size=6
)


class BreaksTheProtocol(KeepsTheProtocol):
    """The same client, which also sends whatever else, loses bytes, and sends some twice."""

    def __init__(self) -> None:
        super().__init__()
        self.is_wild = False
        self.decoder = Decoder()
        self.last_goaway: GoAwayFrame | None = None

    @rule(frame=FRAMES)
    def send_frame(self, frame: bytes) -> None:
        self._send_wild(frame)

    @rule(raw=st.binary(min_size=1, max_size=60))
    def send_bytes(self, raw: bytes) -> None:
        self._send_wild(raw)

    @rule(
        stream=st.integers(0, 15),
        block=st.one_of(
            st.binary(max_size=40),
            FIELDS.map(headers.encode),
            FIELDS.map(lambda more: headers.encode([*call_headers(ECHO), *more])),
        ),
        flags=st.sampled_from([0, 1, 4, 5]),
        goes_on=st.lists(st.tuples(st.binary(max_size=30), st.sampled_from([0, 4])), max_size=3),
    )
    def send_header_block(
        self, stream: int, block: bytes, flags: int, goes_on: list[tuple[bytes, int]]
    ) -> None:
        raw = frames.frame(frames.HEADERS, flags, stream, block)
        for more, end in goes_on:
            raw += frames.frame(frames.CONTINUATION, end, stream, more)
        self._send_wild(raw)

    @rule(increment=st.integers(0, (1 << 31) - 1), stream=st.integers(0, 15))
    def send_window(self, increment: int, stream: int) -> None:
        self._send_wild(frames.window_update(stream, increment))

    @rule(name=st.integers(0, 8), value=st.integers(0, (1 << 32) - 1))
    def send_setting(self, name: int, value: int) -> None:
        self._send_wild(frames.settings({name: value}))

    @precondition(lambda self: self.link.to_server)
    @rule(begin=st.integers(0, 200), size=st.integers(1, 200))
    def lose_bytes(self, begin: int, size: int) -> None:
        self._send_wild(b"")
        del self.link.to_server[begin : begin + size]

    @precondition(lambda self: self.link.to_server)
    @rule(size=st.integers(1, 200))
    def repeat_bytes(self, size: int) -> None:
        self._send_wild(bytes(self.link.to_server[-size:]))

    def _send_wild(self, raw: bytes) -> None:
        if not self.is_wild:  # from here on `h2` could not follow
            self._read(1 << 24)
        self.is_wild = True
        self.link.to_server += raw

    def _read(self, size: int) -> None:
        if not self.is_wild:
            super()._read(size)
            return
        self.output += self.link.take(size)
        while (end := whole_frame(self.output)) is not None:
            frame, _ = Frame.parse_frame_header(memoryview(self.output)[:9])
            frame.parse_body(memoryview(bytes(self.output[9:end])))
            del self.output[:end]
            assert self.last_goaway is None or not self.last_goaway.error_code, "it had ended"
            if isinstance(frame, HeadersFrame):
                self.decoder.decode(frame.data)
            elif isinstance(frame, GoAwayFrame):
                self.last_goaway = frame

    @invariant()
    def headers_are_bounded(self) -> None:
        held = self.link.connection._headers
        assert held is None or len(held[2]) <= 2 * LIMITS.connection.head_bytes

    def teardown(self) -> None:
        try:
            if not self.is_wild:
                return
            self._unblock_socket()
            self.link.deliver(1 << 24)
            self._read(1 << 24)
            assert not self.output, "half a frame"
            if self.link.pipe.closed:
                assert self.last_goaway is not None
                assert self.last_goaway.error_code
            check_others(self.server)
        finally:
            self._end()


def check_others(server: GrpcServer) -> None:
    """Whatever one connection did, another is answered."""
    link, client = Link(server), client_connection()
    client.initiate_connection()
    client.send_headers(1, call_headers(ECHO))
    client.send_data(1, prefixed(b"hello"), end_stream=True)
    link.to_server += client.data_to_send()
    link.deliver(1 << 20)
    events = client.receive_data(link.take(1 << 20))
    assert [e.data for e in events if isinstance(e, DataReceived)] == [prefixed(b"hello")]
    link.lose()


def test_a_client_without_a_header_table_can_read_the_headers() -> None:
    """Found by the fuzz test: the default table was not given up in the first header block."""
    client = KeepsTheProtocol()
    client.greet(window=65_535)
    client.exchange()
    client.change_settings(window=None, frame=None, table=0)
    client.call(path=ECHO, message=b"hello")
    client.teardown()


def test_data_in_a_larger_window_follows_the_acknowledgement_of_the_setting() -> None:
    """Found by the fuzz test: data that the window had held back went out before it."""
    client = KeepsTheProtocol()
    client.greet(window=0)
    client.call(path=ECHO, message=b"hello")
    client.exchange()
    client.change_settings(window=1000, frame=None, table=None)
    client.exchange()
    client.teardown()


def test_a_window_below_zero_can_be_widened_in_small_steps() -> None:
    """A smaller initial window may make a stream's window negative, which is not an error."""
    client = KeepsTheProtocol()
    client.greet(window=40_000)
    client.call(path=ECHO, message=bytes(MAX_MESSAGE))
    client.exchange()
    client.change_settings(window=0, frame=None, table=None)
    client.exchange()
    assert client.link.connection.sender.streams[1].window == -40_000
    for _ in range(3):
        client._widen(20_000, 1)
        client.exchange()
    client.teardown()


def test_a_setting_that_widens_a_window_beyond_the_largest_ends_the_connection() -> None:
    client = BreaksTheProtocol()
    client.greet(window=0)
    client.call(path=ECHO, message=b"hello")
    client.exchange()
    client.send_window(increment=(1 << 31) - 1, stream=1)
    client.call(path=ECHO, message=b"hello")
    client.send_setting(name=frames.INITIAL_WINDOW, value=1)
    client.teardown()
    assert client.last_goaway is None  # the first stream is answered and gone

    client = BreaksTheProtocol()
    client.greet(window=0)
    client.open_call(path=ECHO, message=b"hello", metadata=0, frame=16_384)
    client.send_window(increment=(1 << 31) - 1, stream=1)
    client.send_setting(name=frames.INITIAL_WINDOW, value=1)
    client.teardown()
    assert client.last_goaway is not None
    assert client.last_goaway.error_code == ErrorCodes.FLOW_CONTROL_ERROR


FUZZ = settings(
    max_examples=EXAMPLES,
    stateful_step_count=STEPS,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestKeepsTheProtocol = KeepsTheProtocol.TestCase
TestKeepsTheProtocol.settings = FUZZ
TestBreaksTheProtocol = BreaksTheProtocol.TestCase
TestBreaksTheProtocol.settings = FUZZ
