"""Which GPUs a process may use: reads `CUDA_VISIBLE_DEVICES`, and sets it for the option `--gpus`.

Source: CUDA C++ programming guide, CUDA environment variables; NVIDIA MIG user guide, device names.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from stoker.cluster.doctor.gpus import Gpus, GpuState, read_gpus
from stoker.core.errors import ConfigError, Plain
from stoker.core.nvml import MigSlice

GPUS = "CUDA_VISIBLE_DEVICES"
"""Environment variable that selects the GPUs that CUDA shows."""

ORDER = "CUDA_DEVICE_ORDER"
"""Environment variable that sets how CUDA numbers GPUs; by default, number 0 is the fastest GPU."""

NO_GPU = "-1"
"""Value of `CUDA_VISIBLE_DEVICES` that hides all GPUs."""

_INDEX = re.compile(r"[0-9]{1,4}")
_UUID = re.compile(r"(GPU|MIG)-[0-9A-Za-z/-]+")

Visible = tuple[GpuState, MigSlice | None]
"""A visible GPU, and its MIG slice if only that slice is visible."""


def visible_gpus(states: Sequence[GpuState], environ: Mapping[str, str]) -> list[Visible]:
    """Return the GPUs that CUDA shows to a process with this environment.

    Indices in the variable are taken as the driver's indices. CUDA uses the same indices if all GPUs are of the same
    model, or if `CUDA_DEVICE_ORDER` is `PCI_BUS_ID`.

    Args:
        states: All GPUs of the machine, in the driver's order.
        environ: The process's environment.
    """
    listed = environ.get(GPUS)
    if listed is None:
        return [(state, None) for state in states]
    found: list[Visible] = []
    for name in listed.split(","):
        matches = _named(states, name.strip())
        if len(matches) != 1:
            break  # CUDA stops at the first name that it does not know
        found.extend(matches)
    return found


def visible_names(states: Sequence[GpuState], environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return a name for each GPU that `visible_gpus` returns, in the form that `CUDA_VISIBLE_DEVICES` uses.

    Args:
        states: All GPUs of the machine, in the driver's order.
        environ: The process's environment.
    """
    visible = visible_gpus(states, environ)
    listed = environ.get(GPUS)
    if listed is None:
        return tuple(str(state.index) for state, _ in visible)
    return tuple(name.strip() for name in listed.split(",")[: len(visible)])


def visible_uuids(states: Sequence[GpuState], environ: Mapping[str, str]) -> frozenset[str]:
    """Return the UUIDs of the GPUs that `visible_gpus` returns, and of their MIG slices.

    Args:
        states: All GPUs of the machine, in the driver's order.
        environ: The process's environment.
    """
    visible = visible_gpus(states, environ)
    found = {state.uuid if part is None else part.uuid for state, part in visible}
    return frozenset(found).union(
        each.uuid for state, part in visible if part is None for each in state.slices
    )


def choose_gpus(text: str, gpus: Gpus) -> dict[str, str]:
    """Return environment variables that make CUDA show only the listed GPUs.

    Args:
        text: Indices as `nvidia-smi` shows them, or UUIDs, separated by commas; empty or `none` hides all GPUs.
        gpus: What the driver reports about this machine.

    Raises:
        ConfigError: a name is malformed, unknown, ambiguous or listed twice, or no driver answers.
    """
    names = [name.strip() for name in text.split(",")]
    if names in ([""], ["none"]):
        return {GPUS: NO_GPU}
    for name in names:
        if not (_INDEX.fullmatch(name) or _UUID.fullmatch(name)):
            raise ConfigError(
                "--gpus must list GPU indices or UUIDs, separated by commas",
                got=text,
                fix="E.g. --gpus 0,2, or a UUID of `nvidia-smi -L`; --gpus none trains on the CPU.",
            )
    if gpus.driver is None:
        _require_cuda_driver(text, gpus)
        _require_distinct(names, text)
    else:
        names = _resolved(names, text, gpus.states)
    return {ORDER: "PCI_BUS_ID", GPUS: ",".join(names)}


def unused_slices(variables: Mapping[str, str]) -> int:
    """Return the MIG slices after the first one: CUDA lets a process use only one slice."""
    return max(0, variables[GPUS].count("MIG-") - 1)


def _resolved(names: list[str], text: str, states: Sequence[GpuState]) -> list[str]:
    """Return the names in CUDA's form: all indices, or all full UUIDs if any name is a UUID."""
    found = [_one(name, states) for name in names]
    _require_distinct([_uuid(visible) for visible in found], text)
    if all(_INDEX.fullmatch(name) for name in names):
        return [str(state.index) for state, _ in found]
    return [_uuid(visible) for visible in found]


def _one(name: str, states: Sequence[GpuState]) -> Visible:
    matches = _named(states, name)
    if len(matches) != 1:
        raise ConfigError(
            "--gpus must name GPUs of this machine",
            got=Plain(f"{name!r}, which {len(matches)} GPUs match" if matches else repr(name)),
            fix=f"Available: {_list(states)}.",
        )
    state, mig = matches[0]
    if state.mig and mig is None:
        raise ConfigError(
            f"GPU {state.index} is divided into MIG slices, which are chosen by UUID",
            got=name,
            fix=f"Available: {', '.join(each.uuid for each in state.slices) or 'no slices yet'}.",
        )
    return matches[0]


def _named(states: Sequence[GpuState], name: str) -> list[Visible]:
    """Return the GPUs that have this index, or whose UUID begins with this text."""
    if _INDEX.fullmatch(name):
        return [(state, None) for state in states if state.index == int(name)]
    if not _UUID.fullmatch(name):
        return []
    everything: list[Visible] = [(state, None) for state in states]
    everything += [(state, mig) for state in states for mig in state.slices]
    exact = [visible for visible in everything if _uuid(visible) == name]
    return exact or [visible for visible in everything if _uuid(visible).startswith(name)]


def _uuid(visible: Visible) -> str:
    state, mig = visible
    return state.uuid if mig is None else mig.uuid


def _require_distinct(names: list[str], text: str) -> None:
    if len(set(names)) < len(names):
        raise ConfigError(
            "--gpus must name each GPU once", got=text, fix="Remove the name that is repeated."
        )


def _require_cuda_driver(text: str, gpus: Gpus) -> None:
    """Raise an error if no driver answers; a container may have CUDA's driver library without NVML."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ConfigError(
            "--gpus needs an NVIDIA driver that answers",
            got=Plain(f"{text!r}, and {gpus.unread}"),
            fix="See what is missing: stoker doctor. --gpus none trains on the CPU.",
        ) from None


def _list(states: Sequence[GpuState]) -> str:
    names = [f"{state.index} ({state.uuid}, {state.name})" for state in states]
    names += [f"{mig.uuid} ({mig.name})" for state in states for mig in state.slices]
    return ", ".join(names) or "none"


def share_gpus(names: Sequence[str], *, processes: int) -> list[dict[str, str]]:
    """Divide the GPUs equally among processes; return the environment variables for each process.

    Args:
        names: The usable GPUs, as `CUDA_VISIBLE_DEVICES` names them.
        processes: Number of processes.

    Raises:
        ConfigError: there are GPUs, but fewer than processes: two processes on the same GPU would wait for each other.
    """
    if not names:
        return [{} for _ in range(processes)]
    each = len(names) // processes
    if not each:
        raise ConfigError(
            "--workers must be at most the number of GPUs",
            got=Plain(f"{processes} workers, {len(names)} GPUs"),
            fix=f"Start {len(names)} workers, or set {GPUS}=-1 to train on the CPU.",
        )
    parts = [names[rank * each : (rank + 1) * each] for rank in range(processes)]
    return [{GPUS: ",".join(part)} for part in parts]


LOOK_EVERY_S = 0.1
"""Pause between two samples, seconds; NVML's sample period for utilization is 1/6 s or longer."""


@contextmanager
def watched_gpus() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """Sample the GPUs that this process may use while the context is open.

    Yields:
        A function that returns, after the end, each GPU's mean utilization, power and clock, and its
        highest memory use; an empty list without a GPU.
    """
    looks: list[tuple[GpuState, ...]] = []
    over = threading.Event()

    def look() -> None:
        while True:
            states = tuple(state for state, _ in visible_gpus(read_gpus().states, os.environ))
            if not states:
                return
            looks.append(states)
            if over.wait(LOOK_EVERY_S):
                return

    thread = threading.Thread(target=look, name="gpu-watch", daemon=True)
    thread.start()
    try:
        yield lambda: summary_of(looks)
    finally:
        over.set()
        thread.join()


def summary_of(looks: list[tuple[GpuState, ...]]) -> list[dict[str, Any]]:
    """Return the means and the maximum memory use of each GPU; a value that the driver does not report counts as 0.

    Args:
        looks: [samples] States of all GPUs, in the same order in each sample.
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
