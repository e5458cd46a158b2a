"""A worker process that reads parts of a source, and the messages between it and its parent.

Large values of a message are in shared memory.

A message is pickled. Its buffers (Arrow's, NumPy's) are not part of the pickle: they are in
in-memory files, whose descriptors are sent with the message and which the receiver maps. Both ends
are processes of one program and one user, connected by a socket pair that no other process can
reach.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

_HEAD = struct.Struct("<QQ")
"""Size of the pickle in bytes, number of buffers; then one `_PLACE` per buffer; then the pickle."""

_PLACE = np.dtype([("file", "<u8"), ("start", "<u8"), ("size", "<u8")])
"""Index of the message's file that holds a buffer, and the position in it."""

_ALIGNMENT = 64
"""Every buffer starts at a multiple of this, as Arrow recommends."""

_MOST_FILES = 16
"""Most in-memory files in one message."""

_shared: dict[int, int] = {}
"""Address of each buffer that `share` made and that is not yet in a message -> its file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """What a worker sends instead of a result."""

    error: BaseException
    """The exception, with the place where it was raised as a note."""


def share(pieces: Iterable[bytes]) -> pa.Buffer:
    """Join bytes in an in-memory file, so that `send` need not copy them.

    The next message must hold them: it takes the file, and closes those that it does not hold.
    """
    file = os.memfd_create("stoker-bytes", os.MFD_CLOEXEC)
    for piece in pieces:
        _write(file, memoryview(piece))
    if not os.fstat(file).st_size:
        os.close(file)
        return pa.py_buffer(b"")
    buffer = pa.py_buffer(_mapping(file))
    _shared[buffer.address] = file
    return buffer


def send(link: socket.socket, message: object) -> None:
    """Send a message.

    Args:
        link: One end of a socket pair.
        message: Anything that can be pickled.

    Raises:
        OSError: the other end is closed, or memory ran out.
    """
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    files: list[int] = []
    try:
        places = _placed([pa.py_buffer(buffer.raw()) for buffer in buffers], files)
        head = _HEAD.pack(len(body), len(buffers))
        sent = socket.send_fds(link, [head], files) if files else 0
        link.sendall(head[sent:] + places.tobytes() + body)
    finally:
        while _shared:
            files.append(_shared.popitem()[1])
        for file in files:
            os.close(file)


def _placed(buffers: Sequence[pa.Buffer], files: list[int]) -> np.ndarray[Any, Any]:
    """The position of each buffer in the files; a buffer outside them is copied to a new one."""
    places = np.zeros(len(buffers), _PLACE)
    own, end = -1, 0
    for place, buffer in zip(places, buffers, strict=True):
        start, file = 0, _shared.pop(buffer.address, -1) if buffer.size else -1
        if file >= 0:
            files.append(file)
            number = len(files) - 1
        else:
            if own < 0:
                files.append(os.memfd_create("stoker-message", os.MFD_CLOEXEC))
                own = len(files) - 1
            number, start = own, end
            end += _write(files[own], memoryview(buffer), padded=True)
        place["file"], place["start"], place["size"] = number, start, buffer.size
    return places


def receive(link: socket.socket) -> Any:
    """Wait for the next message.

    Args:
        link: The other end of the socket pair.

    Returns:
        The message. Its buffers are read-only and are in the sender's in-memory file, which is
        freed with the last of them.

    Raises:
        EOFError: the other end was closed.
        OSError: the connection is broken, or this process has no descriptor left (EMFILE).
    """
    head, files, flags, _ = socket.recv_fds(link, _HEAD.size, _MOST_FILES)
    try:
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not head:
            raise EOFError("the other end is closed")
        length, count = _HEAD.unpack(head + _exactly(link, _HEAD.size - len(head)))
        places = np.frombuffer(_exactly(link, count * _PLACE.itemsize), _PLACE)
        body = _exactly(link, length)
        buffers = _mapped(files, places.tolist())
        return pickle.loads(body, buffers=buffers)  # noqa: S301  # sent by a process of our own
    finally:
        for file in files:
            os.close(file)


def _write(file: int, data: memoryview, *, padded: bool = False) -> int:
    """Write everything; return by how much that moved the end."""
    rest = data
    while len(rest):
        rest = rest[os.write(file, rest) :]
    padding = -len(data) % _ALIGNMENT if padded else 0
    return len(data) + (os.write(file, bytes(padding)) if padding else 0)


def _mapped(files: Sequence[int], places: Iterable[tuple[int, int, int]]) -> list[memoryview]:
    """The buffers, as views of the in-memory files."""
    whole = [
        memoryview(_mapping(file)) if os.fstat(file).st_size else memoryview(b"") for file in files
    ]
    return [whole[file][start : start + size] for file, start, size in places]


def _mapping(file: int) -> mmap.mmap:
    """The file, mapped; before Python 3.13 the mapping holds a descriptor of its own."""
    if sys.version_info >= (3, 13):
        return mmap.mmap(file, 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED, trackfd=False)
    return mmap.mmap(file, 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)


def _exactly(link: socket.socket, size: int) -> bytearray:
    found = bytearray(size)
    rest = memoryview(found)
    while rest:
        count = link.recv_into(rest)
        if not count:
            raise EOFError("the other end is closed")
        rest = rest[count:]
    return found


def main(descriptor: int) -> None:
    """Execute tasks until the other end of the socket closes; without importing TensorFlow.

    A task is a function and its argument; the answer is the function's result or a `Failure`.

    Args:
        descriptor: This process's end of the socket pair.
    """
    # If the other end is closed, there is no one to report an error to.
    with (
        socket.socket(fileno=descriptor) as link,
        contextlib.suppress(EOFError, ConnectionError),
    ):
        while True:
            function, argument = receive(link)
            answer = _answer(function, argument)
            try:
                send(link, answer)
            except ConnectionError:
                raise
            except OSError as error:  # no memory for its buffers: of the message nothing was sent
                send(link, _failure(error))


def _answer(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except Exception as error:  # noqa: BLE001  # the process that asked raises it again
        return _failure(error)


def _failure(error: Exception) -> Failure:
    """The error, or its text where it cannot be sent to another process."""
    text = f"In a worker process:\n{''.join(traceback.format_exception(error)).rstrip()}"
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  # what was dumped here
    except Exception:  # noqa: BLE001  # an exception's own code may raise anything
        return Failure(error=RuntimeError(text))
    error.add_note(text)
    return Failure(error=error)
