"""Records which versions a worker is running or loading, in a file that outlives the worker.

After a worker has died, the process that starts the workers reads the file to find out which version killed it.
"""

from __future__ import annotations

import json
from pathlib import Path

from stoker.serve.routing import VersionInUse
from stoker.serve.runtime.shared_counters import SharedCounters, read_counters

REQUESTS, LOADING = 0, 1
"""Indexes in a version's row. `REQUESTS`: number of requests that use the version. `LOADING`: 1 while it is being
loaded."""

_MAX_ROWS = 10_000
"""Maximum number of versions that a worker records. Rows are never removed."""


class VersionsInUse:
    """The versions that this process is running or loading, in a file for other processes."""

    def __init__(self, path: Path | None = None) -> None:
        """Args: path: the file; None: only in memory."""
        self._rows = SharedCounters(path)

    def row(self, model: str, base: Path, version: int) -> memoryview[float]:
        """Return the row [2] of a version, in which its servable writes `REQUESTS` and `LOADING`."""
        key = json.dumps([model, str(base), version])
        if not self._rows.has_room(key, max_rows=_MAX_ROWS):
            return memoryview(bytearray(16)).cast("d")
        return self._rows.row(key, 2)


def versions_file(folder: Path, worker: int) -> Path:
    """Return the path of the file in which a worker records its versions."""
    return folder / f"{worker}.versions"


def read_versions_in_use(path: Path) -> list[VersionInUse]:
    """Return the versions that a worker has recorded; empty without a file."""
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
