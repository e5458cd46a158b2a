"""Messages between a server and the process that runs a version in shadow.

The server sends requests as pickle, with arrays as they lie in memory. The process answers in JSON only: if a malicious
model took over the process, it could not send a pickle to the server.
"""

from __future__ import annotations

import json
import pickle
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from numpy.typing import NDArray

from stoker.core.config import build

_COUNT, _LENGTH = struct.Struct("!I"), struct.Struct("!Q")

_MAX_ANSWER_BYTES = 16 << 20
"""Maximum size of an answer, bytes; an answer has a few numbers per row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowTarget:
    """The version to run in shadow, and the version to compare it with."""

    model: str
    """Name of the model."""

    baseline: str
    """Folder of the version that answers."""

    candidate: str
    """Folder of the version that gets the copies."""

    tolerance: float
    """See `compare.compare`."""

    allow_ops: tuple[str, ...] = ()
    """Operations that a model may contain: the server's setting."""

    saved_model_tags: tuple[str, ...] = ("serve",)
    """Tags of the graph to load: the server's setting."""

    def to_json(self) -> str:
        """Return the target as JSON text, for the command line of the process."""
        return json.dumps(asdict(self))


def target_of(text: str) -> ShadowTarget:
    """Parse the result of `to_json`."""
    return build(ShadowTarget, json.loads(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class CopiedRequest:
    """A copied request, as sent to the process."""

    signature: str
    inputs: Mapping[str, NDArray[Any]]
    outputs: Mapping[str, NDArray[Any]] | None
    """The baseline's answer; None if it failed."""


def send_request(channel: socket.socket, request: CopiedRequest) -> None:
    """Send a request.

    Raises:
        OSError: the process has ended, or did not read within the channel's timeout.
    """
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(
        (request.signature, dict(request.inputs), request.outputs and dict(request.outputs)),
        protocol=5,
        buffer_callback=buffers.append,
    )
    parts = [memoryview(pickled), *(buffer.raw() for buffer in buffers)]
    channel.sendall(_COUNT.pack(len(parts)) + b"".join(_LENGTH.pack(part.nbytes) for part in parts))
    for part in parts:
        channel.sendall(part)


def receive_request(channel: socket.socket) -> CopiedRequest | None:
    """Return the next request; None if the server has ended."""
    head = _received(channel, _COUNT.size)
    if head is None:
        return None
    (parts,) = _COUNT.unpack(head)
    received = []
    for _ in range(parts):
        length = _received(channel, _LENGTH.size)
        received.append(length)
    content = []
    for length in received:
        part = None if length is None else _received(channel, _LENGTH.unpack(length)[0])
        if part is None:
            return None
        content.append(part)
    signature, inputs, outputs = pickle.loads(content[0], buffers=content[1:])  # noqa: S301 - from the server that started this process
    return CopiedRequest(signature=signature, inputs=inputs, outputs=outputs)


def send_answer(channel: socket.socket, answer: Mapping[str, Any]) -> None:
    """Send a JSON object to the server."""
    text = json.dumps(answer).encode()
    channel.sendall(_LENGTH.pack(len(text)) + text)


def receive_answer(channel: socket.socket) -> dict[str, Any] | None:
    """Receive the process' answer; None if the process has ended.

    Raises:
        TimeoutError: the process did not answer within the channel's timeout.
        ValueError: the answer does not have the expected form.
    """
    head = _received(channel, _LENGTH.size)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > _MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {length} bytes")
    text = _received(channel, length)
    answer = None if text is None else json.loads(text)
    if answer is not None and not isinstance(answer, dict):
        raise ValueError(f"an answer that is not an object: {text!r}")
    return answer


def _received(channel: socket.socket, size: int) -> bytearray | None:
    """Read exactly this many bytes; None if the peer has closed the channel."""
    content = bytearray(size)
    view = memoryview(content)
    while view:
        try:
            count = channel.recv_into(view)
        except ConnectionResetError:
            return None
        if not count:
            return None
        view = view[count:]
    return content
