"""What Prometheus scrapes on this machine: servers, and runs that announce themselves with files.

Source: prometheus.io, "Writing HTTP service discovery"; `file_sd_config` for the form of the files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from stoker.core.errors import ConfigError
from stoker.telemetry.targets import Target, live_targets

_log = logging.getLogger(__name__)

SERVER_PATH = "/monitoring/prometheus/metrics"
"""Path of a server's metrics, as in TensorFlow Serving."""

_PORT = range(1, 1 << 16)


class Discovery:
    """The targets of this machine, collected again at each call."""

    def __init__(self, runs: Path, servers: Sequence[str]) -> None:
        """Check the servers' addresses.

        Args:
            runs: The folder of the runs.
            servers: HOST:PORT of each server's REST port.

        Raises:
            ConfigError: an address has another form.
        """
        for address in servers:
            _require_address(address)
        self._runs = runs
        self._servers = tuple(servers)
        self._refused: set[str] = set()

    def content(self) -> str:
        """Return the answer to Prometheus as JSON."""
        return json.dumps([*live_targets(self._runs, self._refuse), *self._of_servers()], indent=1)

    def _refuse(self, path: Path, error: Exception) -> None:
        """Warn about a file once: one bad file hides one run, not all of them."""
        if path.name not in self._refused:
            self._refused.add(path.name)
            _log.warning("%s names no targets: %s", path, error)

    def _of_servers(self) -> list[Target]:
        if not self._servers:
            return []
        return [{"targets": list(self._servers), "labels": {"__metrics_path__": SERVER_PATH}}]


def _require_address(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) in _PORT):
        raise ConfigError(
            "--server must be HOST:PORT of a server's REST port",
            got=address,
            fix="E.g. --server 127.0.0.1:8501.",
        )
