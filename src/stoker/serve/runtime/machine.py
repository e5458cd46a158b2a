"""Memory of processes, and metrics of the GPUs that this server may use."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Mapping
from pathlib import Path

from stoker.cluster.doctor.gpus import read_gpus
from stoker.cluster.doctor.visible import GPUS, visible_uuids
from stoker.telemetry.gpu.sampler import GpuSampler

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_no_gpu = threading.Event()
"""Set after a search has found no GPU, so that it is not repeated."""

_FIRST_SAMPLE_S = 2.0
"""Maximum wait of the first scrape for a sample, seconds."""

_SERVER_GPUS = "STOKER_SERVER_GPUS"
"""Environment variable of a worker: `CUDA_VISIBLE_DEVICES` of the whole server. The worker's own `CUDA_VISIBLE_DEVICES`
names only one GPU."""

_ALL = "all"

_lock = threading.Lock()
_sampler: GpuSampler | None = None


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process, bytes; 0 if it has ended, or on systems without `/proc`."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except (OSError, IndexError):
        return 0


def limit_memory(max_bytes: int) -> None:
    """Limit this process's memory for data. The kernel refuses allocations beyond the limit.

    Thread stacks count. Mapped files, and address space that is only reserved, do not.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = max_bytes if hard == resource.RLIM_INFINITY else min(max_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def server_gpus(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variable that names the server's GPUs to a worker. So each worker reports the same GPUs.

    Args:
        environ: The server's environment.
    """
    return {_SERVER_GPUS: environ.get(GPUS, _ALL)}


def gpu_families() -> list[list[str]]:
    """Return the lines of the metrics of the GPUs that this server may use; empty without a GPU.

    The first call starts a thread that samples the GPUs once a second, so a server that is never scraped samples
    nothing.
    """
    global _sampler
    with _lock:
        if _no_gpu.is_set():
            return []
        if _sampler is None:
            uuids = _server_uuids()
            if not uuids:
                _no_gpu.set()
                return []
            _sampler = GpuSampler(uuids=uuids)
            _sampler.wait(_FIRST_SAMPLE_S)
        sampler = _sampler
    return sampler.families()


def _server_uuids() -> frozenset[str]:
    """Return the UUIDs of the GPUs and MIG slices that this server may use."""
    listed = os.environ.get(_SERVER_GPUS, os.environ.get(GPUS, _ALL))
    return visible_uuids(read_gpus().states, {} if listed == _ALL else {GPUS: listed})
