"""Several processes on the same two ports: the kernel spreads the connections over them.

The process here loads no model. It holds the ports, starts the workers, starts one again that has
died, and ends them all when it is asked to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stoker.core.errors import ConfigError, Plain
from stoker.core.files import read_json, write_json
from stoker.serve.config import ServeConfig
from stoker.serve.ready import Ready
from stoker.serve.signals import ending_on_signals

_log = logging.getLogger(__name__)

_LOOK_S = 0.1
"""How soon the end of a worker, or the wish to end, is seen."""

_MAX_BACKOFF_S = 30.0
"""Longest wait before a worker that dies again and again is started again."""

_GRACE_S = 5.0
"""What a worker gets beyond its own drain before it is killed."""


def run_workers(
    config: ServeConfig,
    command: Sequence[str],
    on_ready: Callable[[Ready], None] = lambda _: None,
) -> None:
    """Serve by several processes until SIGTERM or SIGINT; for a process's main thread.

    Args:
        config: How many workers, and where they listen.
        command: `stoker serve` with all its options; those of a worker are added to it.
        on_ready: Called once, when every worker is ready.

    Raises:
        ConfigError: a port is taken, or a worker ended before it was ready.
    """
    asked_to_end = threading.Event()
    with (
        ending_on_signals(asked_to_end),
        _reserved(config.host, config.rest_port) as rest_port,
        _reserved(config.host, config.grpc_port) as grpc_port,
        tempfile.TemporaryDirectory(prefix="stoker-serve-") as folder,
    ):
        ports = ["--rest_api_port", str(rest_port), "--port", str(grpc_port)]
        shared = [*command, *ports, "--workers", "1", "--shared-ports", "--stop-with-stdin"]
        workers = [
            Worker([*shared, "--ready-file", str(ready)], ready)
            for ready in (Path(folder, f"{number}.json") for number in range(config.workers))
        ]
        try:
            _wait_until_ready(workers, asked_to_end)
            if not asked_to_end.is_set():
                models = read_json(workers[0].ready_file)["models"]
                ready = Ready(
                    host=config.host,
                    rest_port=rest_port,
                    grpc_port=grpc_port,
                    pid=os.getpid(),
                    models=tuple(models),
                )
                if config.ready_file is not None:
                    write_json(config.ready_file, ready.as_json())
                on_ready(ready)
            while not asked_to_end.wait(_LOOK_S):
                for worker in workers:
                    worker.start_again_if_dead()
        finally:
            for worker in workers:
                worker.ask_to_end()
            for worker in workers:
                worker.wait(config.lame_duck_s + config.drain_s + _GRACE_S)


class Worker:
    """One process, and the next one where it dies."""

    def __init__(self, command: Sequence[str], ready_file: Path) -> None:
        """Start it."""
        self.ready_file = ready_file
        self._command = list(command)
        self._deaths = 0
        self._start_at_s: float | None = None
        self._process = self._start()

    @property
    def ended(self) -> int | None:
        """Its exit code, None while it runs."""
        return self._process.poll()

    @property
    def is_ready(self) -> bool:
        """Whether its models can be called."""
        return self.ready_file.is_file()

    def start_again_if_dead(self) -> None:
        """Start another in its place, later each time that it dies."""
        code = self.ended
        if code is None:
            return
        if self._start_at_s is None:
            wait_s = min(2.0**self._deaths - 1.0, _MAX_BACKOFF_S)
            self._deaths += 1
            self._start_at_s = time.monotonic() + wait_s
            _log.error("worker %d ended by %d; another follows", self._process.pid, code)
        if time.monotonic() >= self._start_at_s:
            self._start_at_s = None
            self._close_stdin()
            self._process = self._start()

    def ask_to_end(self) -> None:
        """SIGTERM: it drains and ends."""
        if self.ended is None:
            self._process.terminate()

    def wait(self, timeout_s: float) -> None:
        """Wait for its end; kill it when that takes too long."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _log.error("worker %d did not end in %g s and is killed", self._process.pid, timeout_s)
            self._process.kill()
            self._process.wait()
        self._close_stdin()

    def _start(self) -> subprocess.Popen[bytes]:
        # Its standard input ends with this process, however that dies, and the worker with it.
        return subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def _close_stdin(self) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()


def _wait_until_ready(workers: Sequence[Worker], asked_to_end: threading.Event) -> None:
    while not all(worker.is_ready for worker in workers):
        for worker in workers:
            if worker.ended is not None:
                raise ConfigError(
                    "every worker must start",
                    got=Plain(f"one ended with exit code {worker.ended}"),
                    fix="The lines above say why.",
                )
        if asked_to_end.wait(_LOOK_S):
            return


@contextmanager
def _reserved(host: str, port: int) -> Iterator[int]:
    """Hold a port that the workers share; a socket that does not listen gets no connection."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            held.bind((host, port))
        except OSError as error:
            raise ConfigError(
                "a port must be free on this machine",
                got=Plain(f"{host}:{port} ({error.strerror})"),
                fix="Choose another --rest_api_port and --port, or 0 for free ones.",
            ) from error
        yield held.getsockname()[1]
