"""A uvicorn server in a thread of its own, with a shutdown that loses no request."""

from __future__ import annotations

import asyncio
import functools
import socket
import ssl
from collections.abc import Callable
from typing import Any, cast

from stoker.serve.limits import HttpLimits
from stoker.serve.rest.app import RestApp
from stoker.serve.rest.inline_predict import InlinePredict
from stoker.serve.rest.protocol import limited
from stoker.serve.rest.uvicorn_adapter import Config, Server
from stoker.serve.runtime.sockets import BACKLOG, SETTLE_S, rest_of_queue


class HttpServer(Server):
    """A uvicorn server that answers every request that arrived before the listener was closed."""

    def __init__(
        self,
        app: RestApp,
        *,
        drain_s: float,
        limits: HttpLimits,
        tls: ssl.SSLContext | None,
        lane: InlinePredict | None = None,
    ) -> None:
        """Serve an application.

        Args:
            app: The application.
            drain_s: Maximum wait for running requests at the end, seconds.
            limits: Limits of connections.
            tls: TLS settings; None: no encryption.
            lane: Answers small requests, which then do not reach the application.
        """
        super().__init__(
            Config(
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
                timeout_keep_alive=round(limits.idle_s),
                timeout_graceful_shutdown=max(1, round(drain_s)),
            )
        )
        self.config.load()
        # uvicorn does not set the time limit of the TLS handshake; asyncio's default is a minute.
        self._tls: dict[str, Any] = (
            {} if tls is None else {"ssl": tls, "ssl_handshake_timeout": limits.head_s}
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, as uvicorn does."""
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(self._protocol(), sock=each, backlog=BACKLOG, **self._tls)
            for each in sockets or []
        ]
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept the connections in the kernel's queue, wait for their requests, then stop as uvicorn does.

        Without this, closing a listener resets every connection in its queue, and uvicorn closes connections whose
        request has not arrived yet: with 300 new connections/s, 1 of 3 shutdowns lost a request.
        """
        kept = [listener.dup() for listener in sockets or []]
        for server in self.servers:
            server.close()
        loop = asyncio.get_running_loop()
        for connection in [found for listener in kept for found in rest_of_queue(listener)]:
            await loop.connect_accepted_socket(self._protocol(), connection, **self._tls)
        await asyncio.sleep(SETTLE_S)  # time to read the requests of these connections
        await super().shutdown(sockets)

    def _protocol(self) -> Callable[[], asyncio.Protocol]:
        return functools.partial(
            cast("Callable[..., asyncio.Protocol]", self.config.http_protocol_class),
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
