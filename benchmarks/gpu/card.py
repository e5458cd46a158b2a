"""The card that figures come from, read through NVML: its facts, and whether a measurement counts.

A figure measured while the card was throttled or shared says nothing about Stoker, so it is
rejected. One H200 was read, and nothing was rejected; the rejections are tested with the fake
driver of tests/integration/cluster.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pynvml
from steps import MARK

from stoker.cluster.doctor.gpus import Gpus, GpuState, read_gpus
from stoker.cluster.doctor.visible import visible_gpus

EVERY_S = 0.2
"""Pause between two samples during a part, seconds."""

SLOWED_SHARE = 0.05
"""Above this share of samples with a throttle reason, the part's figures are rejected."""

IDLE_UTILIZATION = 0.05
"""Highest utilization before a part starts: above it, another process uses the card."""

IDLE_LOOKS = 3
"""Samples before a part starts; the least busy one counts, because the last part's kernels may
still be within NVML's averaging window."""

POWER = "power limit"
"""NVML's reason `SwPowerCap`, as `stoker.cluster.doctor.gpus` names it."""


@dataclass(kw_only=True)
class Watch:
    """Observations of the card around and during one part."""

    before: GpuState | None
    card: dict[str, Any]
    refusals: list[str] = field(default_factory=list)
    looks: list[GpuState] = field(default_factory=list)
    foreign: set[str] = field(default_factory=set)

    def during(self) -> dict[str, Any]:
        """The samples in numbers; empty without a card."""
        if not self.looks:
            return {}
        reasons = Counter(name for look in self.looks for name in look.slowed_by)
        return {
            "looks": len(self.looks),
            "utilization": _mean([look.utilization for look in self.looks]),
            "power_w": _mean([look.power_w for look in self.looks]),
            "clock_mhz": _mean([look.clock_mhz for look in self.looks]),
            "used_gib": max(look.used_bytes for look in self.looks) / 2**30,
            "temperature_c": max(look.temperature_c or 0 for look in self.looks),
            "slowed": {name: count / len(self.looks) for name, count in reasons.items()},
            "others": sorted(self.foreign),
        }


@contextmanager
def watched(mark: str) -> Iterator[Watch]:
    """Observe the card before, during and after a part.

    Args:
        mark: Marks the environment of the part's own processes; all others share the card.

    Yields:
        The watch; its `refusals` are complete once the context is closed.
    """
    gpus = read_gpus()
    state = _ours(gpus)
    watch = Watch(before=state, card=_card(gpus, state))
    if state is None:
        yield watch
        return
    _look_before(watch, state)
    over = threading.Event()
    thread = threading.Thread(target=_sample, args=(watch, mark, over), daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        over.set()
        thread.join()
        watch.refusals += refusals_of(watch)


def refusals_of(watch: Watch) -> list[str]:
    """Why figures of this watch do not count."""
    found = []
    if watch.foreign:
        found.append(f"shared with other processes: {', '.join(sorted(watch.foreign))}")
    limit_w, default_w = (watch.card.get(f"power_limit{name}_w") for name in ("", "_default"))
    for name, share in watch.during().get("slowed", {}).items():
        # At its full default limit, a busy card is as fast as any customer's.
        if name == POWER and limit_w and default_w and limit_w >= default_w:
            continue
        if share > SLOWED_SHARE:
            found.append(f"slowed by {name} in {share:.0%} of {len(watch.looks)} looks")
    return found


def _look_before(watch: Watch, state: GpuState) -> None:
    for process in state.processes:
        watch.foreign.add(f"{process.name or 'pid'} {process.pid} (before)")
    least = state.utilization or 0.0
    for _ in range(IDLE_LOOKS):
        if least <= IDLE_UTILIZATION:
            return
        time.sleep(0.3)  # the driver averages over up to a second
        again = _ours(read_gpus())
        least = min(least, (again and again.utilization) or 0.0)
    if least > IDLE_UTILIZATION:
        watch.refusals.append(f"{least:.0%} busy before the part began")


def _sample(watch: Watch, mark: str, over: threading.Event) -> None:
    while not over.wait(EVERY_S):
        state = _ours(read_gpus())
        if state is None:
            continue
        watch.looks.append(state)
        for process in state.processes:
            # A process number of another container or of the host identifies nothing here.
            if Path(f"/proc/{process.pid}").exists() and not _is_ours(process.pid, mark):
                watch.foreign.add(f"{process.name or 'pid'} {process.pid}")


def _is_ours(pid: int, mark: str) -> bool:
    try:
        return f"{MARK}={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except PermissionError:  # it is another user's
        return False
    except OSError:  # it has ended between NVML's answer and this look
        return True


def _ours(gpus: Gpus) -> GpuState | None:
    """The GPU that TensorFlow uses: the first visible one; for a MIG slice, the slice's GPU."""
    visible = visible_gpus(gpus.states, os.environ)
    return visible[0][0] if visible else None


def _card(gpus: Gpus, state: GpuState | None) -> dict[str, Any]:
    if state is None:
        return {}
    return {
        "name": state.name,
        "uuid": state.uuid,
        "driver": gpus.driver,
        "cuda": ".".join(map(str, gpus.cuda or ())),
        "memory_gib": round(state.memory_bytes / 2**30, 1),
        "power_limit_w": state.power_limit_w,
        "power_limit_default_w": _default_power_limit(state.index),
        "clock_most_mhz": state.clock_most_mhz,
        "mig": state.mig,
        "ecc": state.ecc,
    }


def _default_power_limit(index: int) -> float | None:
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        return pynvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1000
    except pynvml.NVMLError:
        return None


def _mean(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 3) if known else None
