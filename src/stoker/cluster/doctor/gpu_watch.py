"""GPUs while something runs on them: sampled through NVML by a thread of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from stoker.cluster.doctor.gpus import GpuState, read_gpus
from stoker.cluster.doctor.visible import visible_gpus

EVERY_S = 0.1
"""Pause between two looks; NVML's own window of utilisation is 1/6 s or longer."""


@contextmanager
def watched_gpus() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Watch the GPUs that this process may use while the context is open.

    Yields:
        What gives, once it is closed, a GPU's means of utilisation, power and clock and its most
        memory in use; an empty list without a GPU.
    """
    looks: list[tuple[GpuState, ...]] = []
    over = threading.Event()

    def look() -> None:
        while True:
            states = tuple(state for state, _ in visible_gpus(read_gpus().states, os.environ))
            if not states:
                return
            looks.append(states)
            if over.wait(EVERY_S):
                return

    thread = threading.Thread(target=look, name="gpu-watch", daemon=True)
    thread.start()
    try:
        yield lambda: summary_of(looks)
    finally:
        over.set()
        thread.join()


def summary_of(looks: list[tuple[GpuState, ...]]) -> list[dict[str, Any]]:
    """Means over looks; what the driver does not tell is 0.

    Args:
        looks: [looks] states of all GPUs, in their order.
    """
    return [
        {
            "index": states[0].index,
            "name": states[0].name,
            "utilization": fmean(state.utilization or 0.0 for state in states),
            "used_bytes": max(state.used_bytes for state in states),
            "power_w": fmean(state.power_w or 0.0 for state in states),
            "clock_mhz": fmean(state.clock_mhz or 0 for state in states),
        }
        for states in zip(*looks, strict=True)
    ]
