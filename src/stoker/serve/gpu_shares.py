"""Assigns a GPU and a share of its memory to each worker of a server; does not need TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker.cluster.machine.gpus import read_gpus
from stoker.cluster.shares import GPUS

TOGETHER = 0.9
"""Share of a GPU's memory for all workers on it, if there are several and no fraction is given.

The rest is for memory that each process needs outside TensorFlow's allocator (CUDA context, cuDNN,
cuBLAS). Not yet confirmed on a GPU: whether a tenth is enough.
"""

_HIDDEN = ("", "-1")
"""CUDA ignores CUDA_VISIBLE_DEVICES from the first such entry on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuShare:
    """The GPU share of one worker."""

    gpu: str | None
    """Its GPU, as CUDA_VISIBLE_DEVICES names it; None if no GPU can be assigned."""

    fraction: float
    """Largest share of that GPU's memory that it may use, 0..1; 0: no limit."""

    def environment(self) -> dict[str, str]:
        """The environment variables for a worker with this share."""
        return {} if self.gpu is None else {GPUS: self.gpu}


def usable_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs that this server may use, named as in CUDA_VISIBLE_DEVICES.

    Args:
        environ: Its `CUDA_VISIBLE_DEVICES` selects among the machine's GPUs.

    Returns:
        One name for each. Empty if no driver answers, or if a GPU is divided into MIG instances
        and the environment does not select one: CUDA then shows only one of them.
    """
    states = read_gpus().states
    named = environ.get(GPUS)
    if not states or (named is None and any(state.mig for state in states)):
        return ()
    if named is None:
        return tuple(str(index) for index in range(len(states)))
    names = [name.strip() for name in named.split(",")]
    return tuple(names[: next((i for i, name in enumerate(names) if name in _HIDDEN), len(names))])


def gpu_shares(gpus: Sequence[str], *, workers: int, fraction: float) -> list[GpuShare]:
    """The share of each worker: GPUs are assigned round-robin, and their memory is split equally.

    A session places a model without a device on the first GPU that it sees, so a worker sees one.

    Args:
        gpus: The GPUs that may be used.
        workers: Number of workers.
        fraction: Share of each GPU's memory for all its workers; 0: no limit for a single worker.
    """
    if not gpus:
        return [GpuShare(gpu=None, fraction=fraction / workers) for _ in range(workers)]
    shares = []
    for number in range(workers):
        place = number % len(gpus)
        sharers = len(range(place, workers, len(gpus)))
        together = TOGETHER if not fraction and sharers > 1 else fraction
        shares.append(GpuShare(gpu=gpus[place], fraction=together / sharers))
    return shares
