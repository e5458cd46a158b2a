"""Writes metrics of this machine's memory, load, cores and disk, for alerts if no node_exporter runs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from stoker.telemetry.catalogue import host as catalogue
from stoker.telemetry.exposition import family

_MEMINFO = Path("/proc/meminfo")
_KIB = 1 << 10


def host_families(folder: Path) -> list[list[str]]:
    """Return the lines of each metric that the system reports.

    Args:
        folder: A folder on the file system to report; the metrics of the disk are left out until it exists.
    """
    memory = _memory()
    found = [
        family(catalogue.MEMORY, _one(memory.get("MemTotal"))),
        family(catalogue.MEMORY_AVAILABLE, _one(memory.get("MemAvailable"))),
        family(catalogue.LOAD, _one(_load())),
        family(catalogue.CORES, _one(os.cpu_count())),
    ]
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return found
    label = (str(folder.absolute()),)
    return [
        *found,
        family(catalogue.DISK, {label: disk.total}),
        family(catalogue.DISK_FREE, {label: disk.free}),
    ]


def _one(value: float | None) -> dict[Sequence[str], float]:
    return {} if value is None else {(): value}


def _memory() -> dict[str, float]:
    """Return the content of /proc/meminfo: the kernel's name of a value -> bytes."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return {}
    parts = (line.partition(":") for line in lines)
    return {name: float(rest.split()[0]) * _KIB for name, _, rest in parts if rest.split()}


def _load() -> float | None:
    try:
        return os.getloadavg()[0]
    except OSError:
        return None
