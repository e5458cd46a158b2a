"""The server: the models, the two interfaces, and their common end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from stoker.core.errors import ConfigError, Plain
from stoker.core.files import write_json
from stoker.serve.config import ServeConfig
from stoker.serve.dataplane import DataPlane
from stoker.serve.grpc.service import make_grpc_server
from stoker.serve.metrics import ServeMetrics
from stoker.serve.models import Models
from stoker.serve.rest.app import RestApp
from stoker.serve.rest.http import HttpServer, bound_socket
from stoker.serve.servable import LoadOptions

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Where a server that is ready listens."""

    host: str
    """The address."""

    rest_port: int
    """The real REST port."""

    grpc_port: int
    """The real gRPC port."""

    pid: int
    """The process."""

    models: tuple[str, ...]
    """The models that are served, by name."""

    def as_json(self) -> dict[str, object]:
        """What the ready file holds."""
        return {
            "host": self.host,
            "rest_port": self.rest_port,
            "grpc_port": self.grpc_port,
            "pid": self.pid,
            "models": list(self.models),
        }


class Server:
    """Both interfaces over one dataplane, each with its own threads."""

    def __init__(self, config: ServeConfig) -> None:
        """Bind both ports; nothing is answered before `start`.

        Raises:
            ConfigError: a port is taken.
        """
        self.config = config
        self._ready = threading.Event()
        metrics = ServeMetrics()
        options = LoadOptions(
            batching=config.batching,
            per_model_batching=config.per_model_batching,
            metrics=metrics,
        )
        self.models = Models(
            poll_s=config.poll_s, on_change=self._look_whether_ready, options=options
        )
        self.plane = DataPlane(self.models, metrics, check_method_names=config.check_method_names)
        self._socket = _bind(config.host, config.rest_port)
        self.rest_port: int = self._socket.getsockname()[1]
        try:
            self._grpc, self.grpc_port = make_grpc_server(
                self.plane, host=config.host, port=config.grpc_port, workers=config.grpc_workers
            )
        except ConfigError:
            self._socket.close()
            raise
        self._app = RestApp(
            self.plane, workers=config.rest_workers, max_body_bytes=config.max_body_bytes
        )
        self._rest = HttpServer(self._app, drain_s=config.drain_s)
        self._rest_thread = threading.Thread(
            target=self._rest.run, args=([self._socket],), name="stoker-rest-loop"
        )

    def start(self) -> None:
        """Listen, and look for models; returns at once."""
        self._rest_thread.start()
        self._grpc.start()
        for name, base in self.config.models.items():
            self.models.watch(name, base)
        if self.config.root is not None:
            self.models.watch_root(self.config.root)

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the models can be called; False if the time ran out before."""
        return self._ready.wait(timeout_s)

    def ready(self) -> Ready:
        """Where it listens."""
        return Ready(
            host=self.config.host,
            rest_port=self.rest_port,
            grpc_port=self.grpc_port,
            pid=os.getpid(),
            models=tuple(self.models.names()),
        )

    def stop(self) -> None:
        """Be ready no more, answer what is under way, and give everything back."""
        self.plane.drain()
        time.sleep(self.config.lame_duck_s)
        self._rest.should_exit = True
        self._grpc.stop(self.config.drain_s).wait()
        self._rest_thread.join()
        self._app.close()
        self.models.close()

    def _look_whether_ready(self) -> None:
        if not self._ready.is_set() and not self.plane.unready():
            self._ready.set()


def run_server(config: ServeConfig, on_ready: Callable[[Ready], None] = lambda _: None) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return; for a process's main thread.

    Args:
        config: What is served and where.
        on_ready: Called once, when the models can be called; the ready file is written before it.

    Raises:
        ConfigError: a port is taken.
    """
    asked_to_end = threading.Event()
    with _ending_on_signals(asked_to_end):
        server = Server(config)
        try:
            server.start()
            _announce(server, asked_to_end, on_ready)
            asked_to_end.wait()
        finally:
            server.stop()


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
"""How soon a server that waits for its first model sees that it is to end."""


@contextmanager
def _ending_on_signals(event: threading.Event) -> Iterator[None]:
    def end(_number: int, _frame: FrameType | None) -> None:
        event.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _bind(host: str, port: int) -> socket.socket:
    try:
        return bound_socket(host, port)
    except OSError as error:
        raise ConfigError(
            "the REST port must be free on this machine",
            got=Plain(f"{host}:{port} ({error.strerror})"),
            fix="Choose another --rest_api_port, or 0 for a free one.",
        ) from error
