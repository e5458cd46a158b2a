"""The serving process from its start to SIGTERM and its exit."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from stoker.core.files import write_json
from stoker.serve.config import ServeConfig
from stoker.serve.extra_routes import ExtraRoutes
from stoker.serve.process.ready import Ready
from stoker.serve.process.server import Server
from stoker.serve.process.signals import ending_on_signals
from stoker.serve.routing import Router
from stoker.serve.runtime.machine import limit_memory


def run_server(
    config: ServeConfig,
    on_ready: Callable[[Ready], None] = lambda _: None,
    *,
    router: Router | None = None,
    extra: ExtraRoutes | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return. Must be called in the main thread.

    Args:
        config: The configuration.
        on_ready: Called once, when the models can be called and the ready file is written.
        router: Decides which version answers; None: the newest.
        extra: Answers further paths on the REST port; None: no further paths.

    Raises:
        ConfigError: a port is taken.
        UserError: a model cannot be loaded, but the configuration requires all models before the ports open.
    """
    asked_to_end = threading.Event()
    if config.max_memory_bytes:
        limit_memory(config.max_memory_bytes)
    with ending_on_signals(asked_to_end):
        server = Server(config, router=router, extra=extra)
        try:
            if config.listen_when_loaded or config.listen_when_tried:
                server.load()
                while not asked_to_end.wait(_LOOK_S) and not server.may_listen():
                    pass
                if not asked_to_end.is_set():
                    server.listen()
            else:
                server.start()
            _announce(server, asked_to_end, on_ready)
            asked_to_end.wait()
        finally:
            server.stop()
            if server.is_stuck:
                logging.shutdown()
                os._exit(0)  # a normal exit would wait for the thread that is blocked in a model


def _announce(
    server: Server, asked_to_end: threading.Event, on_ready: Callable[[Ready], None]
) -> None:
    while not asked_to_end.is_set():
        if server.wait_until_ready(_LOOK_S):
            if server.config.ready_file is not None:
                write_json(server.config.ready_file, server.ready().as_json())
            on_ready(server.ready())
            return


_LOOK_S = 0.1
"""Seconds between two checks whether the server must end, while it waits for its models."""
