"""The processes of the service on one machine: start, watch, restart and end them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from stoker.cluster.processes import Child, Lines, ProcessOptions
from stoker.cluster.resolver import why_taken
from stoker.core.errors import BusyError, ConfigError, Plain, UserError
from stoker.core.files import read_json, remove
from stoker.data.feed.service.server import ServerConfig

START_S = 120.0
"""Maximum time that a process may take to start, seconds; importing TensorFlow takes about 5 s."""

END_S = 10.0
"""Time that a process has to end before it is killed, seconds."""

POLL_S = 0.2
"""Pause between checks of the processes, seconds."""

MAX_DEATHS = 5
"""Maximum number of deaths within `DEATHS_S`; with more, the cause is considered permanent."""

DEATHS_S = 120.0
"""Time over which deaths are counted, seconds."""

Log = Callable[[str], None]
"""Function that is called with each line of text to log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """Settings of the service's processes on one machine."""

    host: str = "127.0.0.1"
    """Address at which other processes reach these processes. Only 127.0.0.1 limits them to this machine: with
    any other address, TensorFlow listens on every address."""

    port: int = 5050
    """The dispatcher's port; 0: any free port."""

    workers: int = 1
    """Number of workers."""

    worker_port: int = 0
    """The first worker's port; the other workers get the next ports. 0: any free ports. A machine that may
    restart needs fixed ports: a worker can continue an epoch only at its old address."""

    dispatcher: str | None = None
    """`host:port` of a dispatcher on another machine; None: a dispatcher is started here."""

    work_dir: Path
    """Folder of the dispatcher's journal."""

    def __post_init__(self) -> None:
        if self.workers < (self.dispatcher is not None):
            raise ConfigError(
                "--workers must be at least 1 with --dispatcher, and at least 0 without it",
                got=self.workers,
            )
        for name, port in (("port", self.port), ("worker-port", self.worker_port)):
            if not 0 <= port < 1 << 16:
                raise ConfigError(f"--{name} must be from 0 to 65535", got=port)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Addresses of the running service."""

    address: str
    """`grpc://host:port` of the dispatcher, in the form of the setting `data.service.address`."""

    workers: tuple[str, ...]
    """`host:port` of each worker that was started here."""

    pids: dict[str, int]
    """Name of a process (`dispatcher`, `worker 1`) -> its process id."""


class Member:
    """One process of the group. It gets its configuration as a line on its input; closing its input ends it."""

    def __init__(self, name: str, folder: Path, log: Log) -> None:
        """Start the process; it imports TensorFlow and waits for its configuration.

        Args:
            name: Name for messages.
            folder: Folder in which the process writes its ready file.
            log: Called with each line that the process prints once it is ready; earlier lines are shown
                only if it does not start.
        """
        self.name, self._log = name, log
        self._ready_file = folder / f"{name}.json"
        self._config: ServerConfig | None = None
        self._start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._child.pid

    @property
    def address(self) -> str:
        """`host:port` of the process; call it only when the process is ready."""
        assert self._config is not None
        return f"{self._config.host}:{self._config.port}"

    def configure(self, config: ServerConfig) -> None:
        """Send the process its configuration."""
        self._config = config
        line = json.dumps(asdict(config) | {"ready_file": str(self._ready_file)})
        try:
            self._child.tell(line)
        except BrokenPipeError:
            raise self._start_error() from None

    def wait_until_ready(self) -> None:
        """Wait until the process can be reached.

        Raises:
            UserError: the process ended, or took too long; the message contains its last line.
        """
        assert self._config is not None
        if not self._child.wait_until_ready(START_S):
            raise self._start_error()
        self._config = replace(self._config, port=read_json(self._ready_file)["port"])

    def has_ended(self) -> bool:
        """Return whether the process has ended."""
        return self._child.code is not None

    def restart(self) -> None:
        """Start the process again with the same settings and port; its process id is new."""
        assert self._config is not None
        self._lines.drain()
        self._start()
        self.configure(self._config)
        self.wait_until_ready()

    def close_input(self) -> None:
        """Close the input of the process, which ends it."""
        self._child.close_input()

    def end(self) -> None:
        """Wait until the process has ended; kill it if that takes too long."""
        self._child.end(END_S)

    def _start(self) -> None:
        self._child = Child(
            self.name,
            [sys.executable, "-m", "stoker.data.feed.service.server"],
            # The processes use only the CPU, and must not take memory of the GPU.
            ProcessOptions(
                environ={"TF_CPP_MIN_LOG_LEVEL": "1"} | os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
                stdin=subprocess.PIPE,
                output=subprocess.PIPE,
                parent_death=None,
                ready_file=self._ready_file,
            ),
        )
        self._lines = Lines(self._child.output, self._log_line)
        self._lines.follow()

    def _log_line(self, line: str) -> None:
        if self._child.is_ready:
            self._log(f"[{self.name}] {line}")

    def _start_error(self) -> UserError:
        code = self._child.code
        if code is not None:
            self._lines.drain()
        last = next((line for line in reversed(self._lines.tail) if line), "it printed nothing")
        return UserError(
            f"{self.name} of the tf.data service must start within {START_S:g} s",
            got=Plain("nothing yet" if code is None else f"exit code {code}: {last}"),
            fix="Run it again with --debug to see TensorFlow's own log.",
        )


class Group:
    """The service's processes on one machine. Use it as a context manager, which ends all of them."""

    def __init__(self, config: GroupConfig, log: Log) -> None:
        """Start the processes and wait until each can be reached.

        Raises:
            BusyError: a port is in use.
            UserError: a process does not start; the other processes are ended.
        """
        self._log = log
        self._deaths: list[float] = []
        for port in _fixed_ports(config):
            # TensorFlow would share the port silently (SO_REUSEPORT).
            if why := why_taken(port):
                raise BusyError(
                    f"port {port} must be free for the tf.data service",
                    got=Plain(why),
                    fix="Set a different --port or --worker-port, or 0 for any free port.",
                )
        self._folder = Path(tempfile.mkdtemp(prefix="stoker-data-service-"))
        self._members: list[Member] = []
        try:
            # All import TensorFlow at the same time, then wait for their configuration.
            names = ["dispatcher"] * (config.dispatcher is None)
            names += [f"worker {number + 1}" for number in range(config.workers)]
            for name in names:
                self._members.append(Member(name, self._folder, log))
            self.ready = self._configure_all(config)
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Self:
        """Return the group; its processes run already."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all processes."""
        self.end()

    def watch(self, stopped: threading.Event) -> None:
        """Restart processes that die, on the same ports, until `stopped` is set.

        A dispatcher continues from its journal. A worker loses its state: the records that it was reading are
        lost for the current epoch.

        Raises:
            UserError: processes keep dying, or a process does not start again.
        """
        while not stopped.wait(POLL_S):
            for member in self._members:
                if member.has_ended() and not stopped.is_set():
                    self._count_death(member)
                    member.restart()
                    self._log(f"{member.name} is running again at {member.address}")

    def end(self) -> None:
        """End every process, and wait until they are gone."""
        for member in self._members:
            member.close_input()
        for member in self._members:
            member.end()
        remove(self._folder)

    def _configure_all(self, config: GroupConfig) -> Ready:
        address, workers = config.dispatcher, self._members
        if address is None:
            dispatcher, *workers = self._members
            dispatcher.configure(
                ServerConfig(
                    role="dispatcher",
                    host=config.host,
                    port=config.port,
                    work_dir=str(config.work_dir),
                )
            )
            dispatcher.wait_until_ready()
            address = dispatcher.address
        for number, worker in enumerate(workers):
            port = config.worker_port + number if config.worker_port else 0
            worker.configure(
                ServerConfig(role="worker", host=config.host, port=port, dispatcher=address)
            )
        for worker in workers:
            worker.wait_until_ready()
        return Ready(
            address=f"grpc://{address}",
            workers=tuple(worker.address for worker in workers),
            pids={member.name: member.pid for member in self._members},
        )

    def _count_death(self, member: Member) -> None:
        now_s = time.monotonic()
        self._deaths = [at for at in self._deaths if now_s - at < DEATHS_S] + [now_s]
        self._log(f"{member.name} at {member.address} has died; restarting it")
        if len(self._deaths) > MAX_DEATHS:
            raise UserError(
                f"processes of the tf.data service must not die more than {MAX_DEATHS} times in "
                f"{DEATHS_S:g} s",
                got=Plain(f"{len(self._deaths)} deaths, most recently of {member.name}"),
                fix="Look for the cause in the lines above, for example too little memory.",
            )


def _fixed_ports(config: GroupConfig) -> list[int]:
    ports = [config.port] if config.dispatcher is None and config.port else []
    if config.worker_port:
        ports += range(config.worker_port, config.worker_port + config.workers)
    return ports
