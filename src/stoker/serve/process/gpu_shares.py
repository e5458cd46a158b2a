"""Assigns a GPU and a share of its memory to each worker of a server; does not need TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stoker.cluster.doctor.gpus import read_gpus
from stoker.cluster.doctor.visible import GPUS, visible_names

TOGETHER = 0.9
"""Share of a GPU's memory that all workers on it get together, if there are several and no fraction is configured.

The rest is for memory that each process needs outside TensorFlow's allocator (CUDA context, cuDNN, cuBLAS). Whether a
tenth is enough has not been measured on a GPU yet.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuShare:
    """The GPU share of one worker."""

    gpu: str | None
    """The worker's GPU, as CUDA_VISIBLE_DEVICES names it; None: no GPU can be assigned."""

    fraction: float
    """Maximum share of the GPU's memory that the worker may use, 0..1; 0: no limit."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables for a worker with this share."""
        return {} if self.gpu is None else {GPUS: self.gpu}


def usable_gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that this server may use, named as in CUDA_VISIBLE_DEVICES.

    Args:
        environ: The server's environment; its `CUDA_VISIBLE_DEVICES` selects among the machine's GPUs.

    Returns:
        A name for each GPU; empty if no driver answers. If a GPU is divided into MIG slices and the environment selects
        none, the names are the UUIDs of all slices and all undivided GPUs, because a slice has no index.
    """
    states = read_gpus().states
    if environ.get(GPUS) is not None or not any(state.mig for state in states):
        return visible_names(states, environ)
    divided = (
        [each.uuid for each in state.slices] if state.mig else [state.uuid] for state in states
    )
    return tuple(uuid for uuids in divided for uuid in uuids)


def gpu_shares(gpus: Sequence[str], *, workers: int, fraction: float) -> list[GpuShare]:
    """Return the share of each worker: GPUs are assigned round-robin, and their memory is split equally.

    Each worker sees a single GPU, because a session places a model on the first GPU that it sees.

    Args:
        gpus: The GPUs that may be used. If empty, there may still be a GPU, for example in a container without NVML:
            all workers share it, and its memory is divided. Without any GPU, the shares have no effect.
        workers: Number of workers.
        fraction: Share of each GPU's memory for all workers on it; 0: the default, which does not limit a single
            worker.
    """
    names: Sequence[str | None] = gpus or [None]
    shares = []
    for number in range(workers):
        place = number % len(names)
        sharers = len(range(place, workers, len(names)))
        together = TOGETHER if not fraction and sharers > 1 else fraction
        shares.append(GpuShare(gpu=names[place], fraction=together / sharers))
    return shares
