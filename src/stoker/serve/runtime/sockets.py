"""Sockets that are bound before a model loads, and are closed without losing connections in their queue."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

BACKLOG = 2048
"""Maximum number of connections that wait in the kernel's queue until they are accepted."""

SETTLE_S = 0.2
"""Time that an accepted connection has to send its first request, seconds."""


def bound_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Return a socket that is bound but does not listen yet.

    Args:
        host: The address.
        port: The port; 0: a free port.
        shared: Whether other processes of this user may bind the port, too; the kernel distributes connections among
            the processes that listen.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound


def inherited_socket(descriptor: int) -> socket.socket:
    """Return a bound socket that this process shares with its parent.

    Once it listens, it listens until both processes have closed it; connections wait in its queue.
    """
    inherited = socket.socket(fileno=descriptor)
    inherited.set_inheritable(False)
    return inherited


def bound_path(path: Path) -> socket.socket:
    """Return a Unix socket that is bound but does not listen yet. An existing socket at the path is replaced.

    Raises:
        OSError: the path is another kind of file, or the folder is not writable.
    """
    if path.is_socket():
        path.unlink()  # the socket of a server that has ended, or that this server replaces
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(str(path))
    except OSError:
        bound.close()
        raise
    return bound


def rest_of_queue(listener: socket.socket) -> Iterator[socket.socket]:
    """Accept and yield all connections in the kernel's queue of a listener, and close the listener."""
    with listener:
        listener.setblocking(False)
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            yield connection
