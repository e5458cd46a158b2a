"""Devices of this machine, as the operating system and the drivers report them; TensorFlow is not used."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.cluster.doctor.gpus import read_gpus
from stoker.cluster.doctor.visible import visible_gpus
from stoker.cluster.limits import usable_memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU as its driver sees it."""

    name: str
    """Product name, e.g. `NVIDIA H100 80GB HBM3`."""

    memory_bytes: int
    """Total memory, bytes."""

    compute_capability: tuple[int, int]
    """Major and minor, e.g. (9, 0)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Devices:
    """The devices of one machine that this process may use."""

    cpu_cores: int
    """Number of cores that this process may use: its CPU affinity, not all cores of the machine."""

    memory_bytes: int
    """Memory that this process may use, bytes: the machine's memory, or the container's limit."""

    gpus: tuple[Gpu, ...]
    """GPUs that `CUDA_VISIBLE_DEVICES` shows to this process, in the order of that variable."""

    def describe(self) -> str:
        """Return a phrase for messages: `2 CPU cores, 24 GiB, no GPU`."""
        memory = f"{self.memory_bytes / 2**30:.0f} GiB"
        gpus = f"{len(self.gpus)} x {self.gpus[0].name}" if self.gpus else "no GPU"
        return f"{self.cpu_cores} CPU cores, {memory}, {gpus}"


def find_devices() -> Devices:
    """Detect this machine's devices. GPUs without a working driver, and hidden GPUs, are left out."""
    return Devices(
        cpu_cores=len(os.sched_getaffinity(0)), memory_bytes=usable_memory(), gpus=_find_gpus()
    )


def cpu_name() -> str:
    """Return the product name of the CPU as Linux reports it; if Linux reports none, the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def hardware(devices: Devices) -> dict[str, Any]:
    """Return the facts that decide speed and memory on this machine, as JSON values."""
    return {
        "cpu": cpu_name(),
        "cores": devices.cpu_cores,
        "memory_gib": round(devices.memory_bytes / 2**30),
        "gpus": [gpu.name for gpu in devices.gpus],
    }


def _find_gpus() -> tuple[Gpu, ...]:
    return tuple(
        Gpu(
            name=state.name if mig is None else mig.name,
            memory_bytes=state.memory_bytes if mig is None else mig.memory_bytes,
            compute_capability=state.compute_capability,
        )
        for state, mig in visible_gpus(read_gpus().states, os.environ)
    )
