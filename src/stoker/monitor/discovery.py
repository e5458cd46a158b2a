"""Tells Prometheus what to scrape on this machine: servers, and runs that publish their address in a file.

Source: prometheus.io, "Writing HTTP service discovery"; `file_sd_config` for the form of the files.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from stoker.core.errors import ConfigError
from stoker.telemetry.targets import Target, live_targets

_log = logging.getLogger(__name__)

SERVER_PATH = "/monitoring/prometheus/metrics"
"""Path of a server's metrics, as in TensorFlow Serving."""

_HOST = re.compile(r"[^\s/@?#]+")
_PORT = range(1, 1 << 16)


class Discovery:
    """Collects the scrape targets of this machine, again in each call."""

    def __init__(self, runs: Path, servers: Sequence[str]) -> None:
        """Check the servers' addresses.

        Args:
            runs: The folder of the runs.
            servers: Address of each server's REST port, HOST:PORT.

        Raises:
            ConfigError: An address is not HOST:PORT.
        """
        for address in servers:
            require_address(address, option="--server")
        self._runs = runs
        self._servers = tuple(servers)
        self._refused: set[str] = set()

    def content(self) -> str:
        """Return the answer to Prometheus as JSON."""
        return json.dumps([*live_targets(self._runs, self._refuse), *self._of_servers()], indent=1)

    def _refuse(self, path: Path, error: Exception) -> None:
        """Warn once about a file that cannot be read; only its run is left out, not all runs."""
        if path.name not in self._refused:
            self._refused.add(path.name)
            _log.warning("%s contains no valid targets: %s", path, error)

    def _of_servers(self) -> list[Target]:
        if not self._servers:
            return []
        return [{"targets": list(self._servers), "labels": {"__metrics_path__": SERVER_PATH}}]


def require_address(address: str, *, option: str) -> None:
    """Raise ConfigError if an address is not HOST:PORT.

    Args:
        address: Address from the command line.
        option: Name of the option that has the address.
    """
    host, _, port = address.rpartition(":")
    if not (_HOST.fullmatch(host) and port.isdecimal() and int(port) in _PORT):
        raise ConfigError(f"{option} must be HOST:PORT", got=address, fix="E.g. 127.0.0.1:8501.")
