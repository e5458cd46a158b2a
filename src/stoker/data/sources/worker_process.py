"""A worker process that reads parts of a source, and the messages between it and its parent.

A message is pickled. Large buffers (of Arrow and NumPy) are not part of the pickle: they are in an in-memory file,
whose descriptor is sent with the message, and which the receiver maps. Both processes belong to the same program and
user, and are connected by a socket pair that no other process can reach.
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

_HEAD = struct.Struct("<QQ")
"""Head of a message: size of the pickle in bytes, number of buffers. One `_PLACE` per buffer follows, then the
pickle."""

_PLACE = np.dtype([("start", "<u8"), ("size", "<u8")])
"""Position and size of a buffer in the message's in-memory file, bytes."""

_ALIGNMENT = 64
"""Every buffer starts at a multiple of this number of bytes, as Arrow recommends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The answer of a worker whose task failed."""

    error: BaseException
    """The exception; a note of it shows where it was raised."""


def send(link: socket.socket, message: object) -> None:
    """Send a message.

    Args:
        link: One end of a socket pair.
        message: Anything that can be pickled.

    Raises:
        OSError: the other end is closed, or there is not enough memory.
    """
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    places = np.zeros(len(buffers), _PLACE)
    head = _HEAD.pack(len(body), len(buffers))
    if not buffers:
        link.sendall(head + body)
        return
    with os.fdopen(os.memfd_create("stoker-message", os.MFD_CLOEXEC), "wb") as file:
        for place, buffer in zip(places, buffers, strict=True):
            data = buffer.raw()
            place["start"], place["size"] = file.tell(), len(data)
            file.write(data)
            file.write(bytes(-len(data) % _ALIGNMENT))
        file.flush()
        sent = socket.send_fds(link, [head], [file.fileno()])
        link.sendall(head[sent:] + places.tobytes() + body)


def receive(link: socket.socket) -> Any:
    """Wait for the next message.

    Args:
        link: The other end of the socket pair.

    Returns:
        The message. Its buffers are read-only; they are in the sender's in-memory file, which is freed with the
        last buffer.

    Raises:
        EOFError: the other end was closed.
        OSError: the connection is broken, or this process cannot open more files (EMFILE).
    """
    head, files, flags, _ = socket.recv_fds(link, _HEAD.size, 1)
    try:
        if flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        if not head:
            raise EOFError("the other end is closed")
        length, count = _HEAD.unpack(head + _exactly(link, _HEAD.size - len(head)))
        places = np.frombuffer(_exactly(link, count * _PLACE.itemsize), _PLACE)
        body = _exactly(link, length)
        whole = memoryview(_mapping(files[0]) if places["size"].any() else b"")
        buffers = [whole[start : start + size] for start, size in places.tolist()]
        return pickle.loads(body, buffers=buffers)  # noqa: S301  # sent by a process of our own
    finally:
        for file in files:
            os.close(file)


def _mapping(file: int) -> mmap.mmap:
    """Map a file into memory; before Python 3.13, the mapping keeps a file descriptor open."""
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
    """Run tasks until the other end of the socket is closed. TensorFlow is not imported.

    A task is a function and its argument; the answer is the result of the function, or a `Failure`.

    Args:
        descriptor: This process's end of the socket pair.
    """
    # If the other end is closed, an error cannot be reported.
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
            except OSError as error:  # no memory for the buffers; no part of the message was sent
                send(link, _failure(error))


def _answer(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except Exception as error:  # noqa: BLE001  # the process that sent the request raises it again
        return _failure(error)


def _failure(error: Exception) -> Failure:
    """Return the error or, if it cannot be pickled, a `RuntimeError` with its text."""
    text = f"In a worker process:\n{''.join(traceback.format_exception(error)).rstrip()}"
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  # what was dumped here
    except Exception:  # noqa: BLE001  # an exception's own code may raise anything
        return Failure(error=RuntimeError(text))
    error.add_note(text)
    return Failure(error=error)
