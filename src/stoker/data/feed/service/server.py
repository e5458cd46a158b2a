"""One process of the service: a dispatcher or a worker, which runs until its standard input is closed.

`python -m stoker.data.feed.service.server` reads one line of JSON (a `ServerConfig`) from its standard input,
and writes its ready file (`{"port": ...}`) when it can be reached. If the process that started it ends for
any reason, the kernel closes the pipe to the standard input, and this process ends, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stoker.core.files import write_json

LOOPBACK = "127.0.0.1"
"""The default address to listen on."""

PROTOCOL = "grpc"
"""The only protocol in TensorFlow's wheels; it has no encryption and no authentication."""

HEARTBEAT_MS = 1000
"""Interval of a worker's reports to the dispatcher. TensorFlow's default, 30 s, would delay an epoch's end."""

DISPATCHER_TIMEOUT_MS = 60_000
"""Time for which a worker tries to reach a dispatcher that restarts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerConfig:
    """Settings of one process of the service."""

    role: Literal["dispatcher", "worker"]
    """Role of the process."""

    host: str
    """Address at which other processes reach it."""

    port: int
    """Port to listen on; 0: any free port."""

    ready_file: str = ""
    """File that the process writes when it is ready."""

    work_dir: str = ""
    """Folder of the dispatcher's journal, from which it continues after a restart; "" for a worker."""

    dispatcher: str = ""
    """`host:port` of a worker's dispatcher; "" for a dispatcher."""


def serve(config: ServerConfig) -> Any:
    """Start the dispatcher or worker; it runs until the returned object is deleted.

    Raises:
        RuntimeError: TensorFlow cannot start it, for example because a worker's dispatcher does not answer.
    """
    import tensorflow as tf

    service = tf.data.experimental.service
    if config.role == "dispatcher":
        server = service.DispatchServer(
            service.DispatcherConfig(
                port=config.port,
                protocol=PROTOCOL,
                work_dir=config.work_dir,
                fault_tolerant_mode=True,
            )
        )
    else:
        server = service.WorkerServer(
            service.WorkerConfig(
                dispatcher_address=config.dispatcher,
                worker_address=f"{config.host}:%port%",
                port=config.port,
                protocol=PROTOCOL,
                heartbeat_interval_ms=HEARTBEAT_MS,
                dispatcher_timeout_ms=DISPATCHER_TIMEOUT_MS,
            )
        )
    return server


def listening_ports(*, only_loopback: bool) -> list[int]:
    """Return the ports that this process listens on.

    Args:
        only_loopback: Whether to bind them to the loopback device. TensorFlow always listens on all
            addresses, and every client can run operations.

    Raises:
        PermissionError: the kernel allows only root to bind to a device (before Linux 5.7).
    """
    ports = []
    for handle in _sockets():
        with socket.socket(fileno=os.dup(handle)) as found:
            is_tcp = found.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                if only_loopback:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo")
                ports.append(int(found.getsockname()[1]))
    return ports


def _sockets() -> list[int]:
    handles = []
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since the folder was listed
            if str(path.readlink()).startswith("socket:"):
                handles.append(int(path.name))
    return handles


def main() -> None:
    """Serve with the settings in the first line of standard input."""
    # The import comes before the line is read, so that several processes can import at the same time.
    import tensorflow  # noqa: F401, ICN001 - only to have it in memory

    config = ServerConfig(**json.loads(sys.stdin.readline()))
    server = serve(config)
    (port,) = listening_ports(only_loopback=config.host == LOOPBACK)
    write_json(Path(config.ready_file), {"port": port})
    sys.stdin.read()
    del server
    # The journal is already on the disk; a normal exit could be delayed by TensorFlow's threads.
    os._exit(0)


if __name__ == "__main__":
    main()
