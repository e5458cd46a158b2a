"""What Prometheus scrapes on this machine: runs that announce themselves by files, and servers.

Source: prometheus.io, "Writing HTTP service discovery"; `file_sd_config` for the form of the files.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stoker.core.errors import ConfigError

_log = logging.getLogger(__name__)

TARGETS = ".targets"
"""Folder among the runs: a file `*.json` for each run that can be scraped."""

SERVER_PATH = "/monitoring/prometheus/metrics"
"""Where a server has its metrics, as TensorFlow Serving has."""

_MOST_BYTES = 1 << 20
"""Of one file."""

_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_PORT = range(1, 1 << 16)

Target = dict[str, Any]
"""`targets` (HOST:PORT, ...) and their `labels`."""


class Discovery:
    """The targets of this machine, found again at each call."""

    def __init__(self, runs: Path, servers: Sequence[str]) -> None:
        """Check the servers' addresses.

        Args:
            runs: The folder of the runs.
            servers: HOST:PORT of each server's REST port.

        Raises:
            ConfigError: an address is not of this form.
        """
        for address in servers:
            _require_address(address)
        self._folder = runs / TARGETS
        self._servers = tuple(servers)
        self._refused: set[str] = set()

    def content(self) -> str:
        """Return the answer to Prometheus, JSON."""
        return json.dumps([*self._runs(), *self._of_servers()], indent=1)

    def _runs(self) -> list[Target]:
        found: list[Target] = []
        for path in sorted(self._folder.glob("*.json")):
            try:
                found += _parsed(path)
            except FileNotFoundError:
                continue  # the run has ended since
            except (OSError, ValueError, RecursionError) as error:
                # One bad file hides one run, not all of them.
                if path.name not in self._refused:
                    self._refused.add(path.name)
                    _log.warning("%s names no targets: %s", path, error)
        return found

    def _of_servers(self) -> list[Target]:
        if not self._servers:
            return []
        return [{"targets": list(self._servers), "labels": {"__metrics_path__": SERVER_PATH}}]


def _parsed(path: Path) -> list[Target]:
    """Raise ValueError if the file is not of the form of `file_sd_config`."""
    with path.open("rb") as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise ValueError(f"larger than {_MOST_BYTES} bytes")
    groups = json.loads(text)
    if not isinstance(groups, list):
        raise ValueError("not a list")
    return [_group(each) for each in groups]


def _group(value: Any) -> Target:
    if not isinstance(value, dict):
        raise ValueError("an entry is not an object")
    targets, labels = value.get("targets"), value.get("labels", {})
    if not isinstance(targets, list) or not all(isinstance(each, str) for each in targets):
        raise ValueError("targets is not a list of HOST:PORT")
    if not isinstance(labels, dict) or not all(
        _LABEL.fullmatch(name) and isinstance(text, str) for name, text in labels.items()
    ):
        raise ValueError("labels is not an object of names and texts")
    return {"targets": targets, "labels": labels}


def _require_address(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) in _PORT):
        raise ConfigError(
            "--server must be HOST:PORT of a server's REST port",
            got=address,
            fix="E.g. --server 127.0.0.1:8501.",
        )
