"""uvicorn as this server runs it: bare, in a thread of its own, and without a loss at its end."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Callable, Iterator
from typing import cast

import uvicorn

from stoker.serve.rest.app import RestApp
from stoker.serve.rest.lane import Lane
from stoker.serve.rest.limits import HttpLimits
from stoker.serve.rest.protocol import limited

BACKLOG = 2048
"""Connections that the kernel holds until they are accepted."""

_SETTLE_S = 0.2
"""What an accepted connection gets, seconds, to bring the request that it was opened for."""


class HttpServer(uvicorn.Server):
    """Answers everything that reached it before the listener closed."""

    def __init__(
        self,
        app: RestApp,
        *,
        drain_s: float,
        limits: HttpLimits,
        tls: ssl.SSLContext | None,
        lane: Lane | None = None,
    ) -> None:
        """Answer by an application.

        Args:
            app: What answers.
            drain_s: Longest wait at the end.
            limits: Of connections.
            tls: Their encryption, if any.
            lane: Takes small requests before the application.
        """
        super().__init__(
            uvicorn.Config(
                app,
                http=limited(limits, lane),
                loop="uvloop",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_graceful_shutdown=max(1, round(drain_s)),
            )
        )
        self.config.load()
        self.config.ssl = tls

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept what waits in the kernel's queue, let it speak, then end as uvicorn does.

        A listener that is closed resets every connection in its queue, and uvicorn closes those
        that have not spoken yet: 1 of 3 runs under 300 new connections/s lost a request.
        """
        kept = [listener.dup() for listener in sockets or []]
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        protocol: Callable[[], asyncio.Protocol] = functools.partial(
            cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        for connection in [found for listener in kept for found in _rest_of_queue(listener)]:
            await loop.connect_accepted_socket(protocol, connection, ssl=self.config.ssl)
        await asyncio.sleep(_SETTLE_S)
        await super().shutdown(sockets)


def bound_socket(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket that is bound but does not listen yet.

    Args:
        host: The address.
        port: The port, 0 for a free one.
        shared: Whether other processes of this user may bind it too; the kernel spreads the
            connections over those that listen.

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


def _rest_of_queue(listener: socket.socket) -> Iterator[socket.socket]:
    """Everything that the kernel has accepted for a listener, which is closed right after."""
    with listener:
        listener.setblocking(False)
        while True:
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            connection.setblocking(False)
            yield connection
