"""Assigns a GPU and a share of its memory to each worker of a server; does not need TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker.cluster.doctor.gpus import read_gpus
from stoker.cluster.doctor.visible import GPUS, visible_names

TOGETHER = 0.9
"""Share of a GPU's memory for all workers on it, if there are several and no fraction is given.

The rest is for memory that each process needs outside TensorFlow's allocator (CUDA context, cuDNN,
cuBLAS). Not yet confirmed on a GPU: whether a tenth is enough.
"""


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
        One name for each; empty without a driver that answers. Where a GPU is divided into MIG slices
        and the environment chooses none, they are the UUIDs of all slices and of all other GPUs: CUDA
        shows a process a single slice, so an index names none of them.
    """
    states = read_gpus().states
    if environ.get(GPUS) is not None or not any(state.mig for state in states):
        return visible_names(states, environ)
    divided = (
        [each.uuid for each in state.slices] if state.mig else [state.uuid] for state in states
    )
    return tuple(uuid for uuids in divided for uuid in uuids)


def gpu_shares(gpus: Sequence[str], *, workers: int, fraction: float) -> list[GpuShare]:
    """The share of each worker: GPUs are assigned round-robin, and their memory is split equally.

    A session places a model without a device on the first GPU that it sees, so a worker sees one.

    Args:
        gpus: The GPUs that may be used. Without one there may still be a GPU that all workers share,
            such as in a container without NVML: its memory is divided. Without any GPU, the share has no effect.
        workers: How many workers there are.
        fraction: Share of each GPU's memory for all workers on it; 0 lets a single one grow freely.
    """
    names: Sequence[str | None] = gpus or [None]
    shares = []
    for number in range(workers):
        place = number % len(names)
        sharers = len(range(place, workers, len(names)))
        together = TOGETHER if not fraction and sharers > 1 else fraction
        shares.append(GpuShare(gpu=names[place], fraction=together / sharers))
    return shares
