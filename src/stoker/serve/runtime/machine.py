"""Memory in use by processes and GPUs, now."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Sequence
from pathlib import Path

from stoker.cluster.doctor.gpus import read_gpus
from stoker.telemetry.catalogue.metric import Metric
from stoker.telemetry.catalogue.serving import GPU_MEMORY, GPU_MEMORY_USED

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_no_gpu = threading.Event()
"""Set once a look has found none: the driver is not asked for ever in vain."""


def resident_bytes(pid: int) -> int:
    """Memory of a process that lies in RAM; 0 of one that has ended, or where there is no `/proc`."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def limit_memory(most_bytes: int) -> None:
    """Let this process have no more memory for data than that: the kernel refuses the rest.

    Thread stacks count; a file that is mapped, and address space that is only reserved, do not.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = most_bytes if hard == resource.RLIM_INFINITY else min(most_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


def gpu_memory() -> list[tuple[Metric, dict[Sequence[str], float]]]:
    """Each metric with its values by GPU; empty without a GPU that tells."""
    states = () if _no_gpu.is_set() else read_gpus().states
    if not states:
        _no_gpu.set()
        return []
    return [
        (GPU_MEMORY_USED, {(str(state.index),): float(state.used_bytes) for state in states}),
        (GPU_MEMORY, {(str(state.index),): float(state.memory_bytes) for state in states}),
    ]
