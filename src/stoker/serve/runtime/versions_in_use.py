"""Which versions a worker is running or loading, in a file that outlives it.

The process that starts the workers reads it when one has died, to learn which version killed it.
"""

from __future__ import annotations

import json
from pathlib import Path

from stoker.serve.routing import VersionInUse
from stoker.serve.runtime.shared_counters import SharedCounters, read_counters

REQUESTS, LOADING = 0, 1
"""Indexes in a version's row: the number of requests that use it; 1 while it is loaded."""

_MAX_ROWS = 10_000
"""Most versions that one worker records: rows are never removed."""


class VersionsInUse:
    """The record of this process."""

    def __init__(self, path: Path | None = None) -> None:
        """Args: path: the file; None: only in memory."""
        self._rows = SharedCounters(path)

    def row(self, model: str, base: Path, version: int) -> memoryview[float]:
        """[2] the row of a version; its servable writes `REQUESTS` and `LOADING`."""
        key = json.dumps([model, str(base), version])
        if not self._rows.has_room(key, most=_MAX_ROWS):
            return memoryview(bytearray(16)).cast("d")
        return self._rows.row(key, 2)


def versions_file(folder: Path, worker: int) -> Path:
    """The path of a worker's record."""
    return folder / f"{worker}.versions"


def read_versions_in_use(path: Path) -> list[VersionInUse]:
    """The current or last record of a worker; empty without a file."""
    found = []
    for key, values in read_counters(path).items():
        model, base, version = json.loads(key)
        found.append(
            VersionInUse(
                model=model,
                base=Path(base),
                version=version,
                requests=int(values[REQUESTS]),
                loading=values[LOADING] > 0.0,
            )
        )
    return found
