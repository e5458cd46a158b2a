"""A client that speaks HTTP/2 by the frame, and may break every rule of it."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from hpack import Decoder, Encoder
from tensorflow_serving.apis import predict_pb2

from stoker.serve.grpc_server import frames

PREDICT = "/tensorflow.serving.PredictionService/Predict"
CALL = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", PREDICT),
    (":authority", "localhost"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]
GREETING = frames.PREFACE + frames.settings({})


def message(rows: Any, model: str = "half") -> bytes:
    """A Predict request, with its prefix."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(rows))
    raw = request.SerializeToString()
    return b"\x00" + len(raw).to_bytes(4, "big") + raw


def head(stream: int, *, ended: bool = False, fields: Any = CALL) -> bytes:
    """A call's headers."""
    flags = frames.END_HEADERS | (frames.END_STREAM if ended else 0)
    return frames.frame(frames.HEADERS, flags, stream, Encoder().encode(fields))


def data(stream: int, raw: bytes, *, ended: bool = True) -> bytes:
    """What it sends."""
    return frames.frame(frames.DATA, frames.END_STREAM if ended else 0, stream, raw)


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One frame of the server."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class Talk:
    """A connection: bytes to the server, frames from it."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._rest = b""
        self._decoder = Decoder()
        self._ended: set[int] = set()
        self.closed = False

    def say(self, *parts: bytes) -> None:
        """Send; a server that has closed is noticed when it is heard."""
        with contextlib.suppress(ConnectionError):
            self._socket.sendall(b"".join(parts))

    def next(self, wait_s: float = 5.0) -> Frame | None:
        """The next frame; None if none comes, or the server has closed."""
        end_s = time.monotonic() + wait_s
        while not self._is_whole():
            self._socket.settimeout(max(0.001, end_s - time.monotonic()))
            try:
                came = self._socket.recv(1 << 16)
            except TimeoutError:
                return None
            except ConnectionError:
                came = b""
            if not came:
                self.closed = True
                return None
            self._rest += came
        high, low, kind, flags, stream = frames.HEADER.unpack_from(self._rest)
        end = 9 + (high << 8 | low)
        found = Frame(kind=kind, flags=flags, stream=stream, payload=self._rest[9:end])
        self._rest = self._rest[end:]
        return found

    def _is_whole(self) -> bool:
        if len(self._rest) < 9:
            return False
        high, low = struct.unpack_from(">HB", self._rest)
        return len(self._rest) >= 9 + (high << 8 | low)

    def until(self, kind: int, wait_s: float = 5.0) -> Frame | None:
        """The next frame of a kind."""
        while (found := self.next(wait_s)) is not None:
            if found.kind == kind:
                return found
        return None

    def answers(
        self, count: int = 1, wait_s: float = 5.0
    ) -> dict[int, tuple[dict[str, str], bytes]]:
        """What `count` streams end with: stream -> its trailers and its data."""
        ended: dict[int, tuple[dict[str, str], bytes]] = {}
        parts: dict[int, bytes] = {}
        while len(ended) < count and (found := self.next(wait_s)) is not None:
            if found.kind == frames.DATA:
                parts[found.stream] = parts.get(found.stream, b"") + found.payload
            elif found.kind == frames.HEADERS:
                decoded = self._decoder.decode(found.payload)
                fields = {str(name): str(value) for name, value in decoded}
                if found.flags & frames.END_STREAM:
                    self._ended.add(found.stream)
                    ended[found.stream] = (fields, parts.get(found.stream, b""))
            elif found.kind == frames.RST_STREAM and found.stream not in self._ended:
                error = frames.Error(int.from_bytes(found.payload, "big"))
                ended.setdefault(found.stream, ({"reset": error.name}, b""))
        return ended


@contextlib.contextmanager
def talk(port: int, *, greeted: bool = True) -> Iterator[Talk]:
    """A connection to a server."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connected:
        talking = Talk(connected)
        if greeted:
            talking.say(GREETING)
        yield talking


def values(raw: bytes) -> list[float]:
    """The rows that a Predict answer holds, from its data with the prefix."""
    assert len(raw) == 5 + int.from_bytes(raw[1:5], "big")
    answer = predict_pb2.PredictResponse.FromString(raw[5:])
    return list(answer.outputs["y"].float_val)
