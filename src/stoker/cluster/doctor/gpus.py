"""GPUs as their driver reports them through NVML: state, errors, links and processes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pynvml

LinkKind = Literal[
    "NVLink", "PCIe switch", "PCIe switches", "PCIe host bridge", "NUMA node", "system"
]
"""Connection of two GPUs, the fastest first."""

KINDS: tuple[LinkKind, ...] = (
    "NVLink",
    "PCIe switch",
    "PCIe switches",
    "PCIe host bridge",
    "NUMA node",
    "system",
)

_ANCESTORS: dict[int, LinkKind] = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PCIe switch",
    pynvml.NVML_TOPOLOGY_SINGLE: "PCIe switch",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PCIe switches",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PCIe host bridge",
    pynvml.NVML_TOPOLOGY_NODE: "NUMA node",
    pynvml.NVML_TOPOLOGY_SYSTEM: "system",
}

_SLOWED = {
    "power limit": pynvml.nvmlClocksThrottleReasonSwPowerCap,
    "heat (hardware)": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
    "heat (driver)": pynvml.nvmlClocksThrottleReasonSwThermalSlowdown,
    "power brake": pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown,
}
"""Reasons for lower clocks that can be fixed; idleness is not one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    """As this process sees it; a process of another container may be unknown here."""

    name: str
    """Its program; empty if it cannot be read."""

    memory_bytes: int | None
    """GPU memory that it holds; None if the driver does not report it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MigSlice:
    """A slice of a GPU in MIG mode, which CUDA uses like a GPU."""

    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """One GPU; None means that it does not report the value."""

    index: int
    """Its number in the driver's order."""

    name: str
    uuid: str
    compute_capability: tuple[int, int]
    """Major and minor, e.g. (9, 0)."""

    memory_bytes: int
    used_bytes: int
    pci: str
    """Its address on the bus."""

    persistence: bool | None = None
    """Whether the driver stays loaded when no process uses the GPU."""

    ecc: bool | None = None
    """Whether memory errors are corrected."""

    ecc_default: bool | None = None
    """Whether memory errors are corrected by default."""

    ecc_uncorrected: int | None = None
    """Memory errors since the driver was loaded that could not be corrected."""

    slowed_by: tuple[str, ...] = ()
    """Why clocks are lower than possible, now."""

    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: int | None = None
    """Of its multiprocessors, now."""

    clock_most_mhz: int | None = None
    utilization: float | None = None
    """Share of the last moments in which a kernel ran, however few multiprocessors it kept busy."""

    pcie_width: int | None = None
    """Lanes in use."""

    pcie_most_width: int | None = None
    """Lanes that card and slot could use."""

    mig: bool | None = None
    """Whether it is divided into MIG slices."""

    slices: tuple[MigSlice, ...] = ()
    """Its MIG slices, in the driver's order."""

    numa_node: int | None = None
    """The NUMA node with the nearest memory and cores."""

    processes: tuple[GpuProcess, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """The connection of two GPUs."""

    gpus: tuple[int, int]
    kind: LinkKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpus:
    """All GPUs of a machine, and their driver."""

    driver: str | None = None
    """Version, e.g. 580.65.06; None if no driver answers."""

    cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver can run."""

    states: tuple[GpuState, ...] = ()
    links: tuple[Link, ...] = ()
    unread: str = ""
    """Why nothing could be read."""


def read_gpus() -> Gpus:
    """Return what NVML reports; also for a machine without GPUs or with a broken driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Gpus(unread=str(error))
    try:
        handles = [
            pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())
        ]
        version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return Gpus(
            driver=pynvml.nvmlSystemGetDriverVersion(),
            cuda=(version // 1000, version % 1000 // 10),
            states=tuple(_state(index, handle) for index, handle in enumerate(handles)),
            links=tuple(_links(handles)),
        )
    except pynvml.NVMLError as error:
        return Gpus(unread=str(error))
    finally:
        pynvml.nvmlShutdown()


def best_groups(gpus: Gpus) -> tuple[tuple[int, ...], ...]:
    """Return groups of GPUs that are connected by the fastest links of this machine.

    A job that uses fewer than all GPUs should use those of one group.
    """
    if not gpus.links:
        return tuple((state.index,) for state in gpus.states)
    quickest = min((link.kind for link in gpus.links), key=KINDS.index)
    groups: list[set[int]] = [{state.index} for state in gpus.states]
    for link in gpus.links:
        if link.kind == quickest:
            joined = [group for group in groups if group & set(link.gpus)]
            groups = [group for group in groups if group not in joined]
            groups.append(set().union(*joined))
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _state(index: int, handle: Any) -> GpuState:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    ecc = _told(lambda: pynvml.nvmlDeviceGetEccMode(handle)[0] == pynvml.NVML_FEATURE_ENABLED)
    power = _told(lambda: pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)
    reasons = _told(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
    pci = pynvml.nvmlDeviceGetPciInfo(handle).busId
    mig = _told(lambda: pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE)
    return GpuState(
        index=index,
        name=pynvml.nvmlDeviceGetName(handle),
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        memory_bytes=memory.total,
        used_bytes=memory.used,
        pci=pci,
        persistence=_told(lambda: bool(pynvml.nvmlDeviceGetPersistenceMode(handle))),
        ecc=ecc,
        ecc_default=_told(
            lambda: pynvml.nvmlDeviceGetDefaultEccMode(handle)[0] == pynvml.NVML_FEATURE_ENABLED
        ),
        ecc_uncorrected=_told(
            lambda: pynvml.nvmlDeviceGetTotalEccErrors(
                handle, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
            )
        )
        if ecc
        else None,
        slowed_by=tuple(name for name, bit in _SLOWED.items() if reasons & bit),
        temperature_c=_told(
            lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
        ),
        power_w=power,
        power_limit_w=_told(lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000),
        clock_mhz=_told(lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
        clock_most_mhz=_told(
            lambda: pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
        ),
        utilization=_told(lambda: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100),
        pcie_width=_told(lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
        pcie_most_width=_told(lambda: pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        mig=mig,
        slices=_slices(handle) if mig else (),
        numa_node=_numa_node(pci),
        processes=_processes(handle),
    )


def _told(ask: Callable[[], Any]) -> Any:
    """Return NVML's answer; None if this GPU does not support the query or this user may not ask."""
    try:
        return ask()
    except pynvml.NVMLError:
        return None


def _slices(handle: Any) -> tuple[MigSlice, ...]:
    most = _told(lambda: pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
    found = (_told(partial(_slice, handle, place)) for place in range(most))
    return tuple(each for each in found if each is not None)


def _slice(handle: Any, place: int) -> MigSlice:
    """A slice; NVML raises an error if the index is unused."""
    part = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
    return MigSlice(
        uuid=pynvml.nvmlDeviceGetUUID(part),
        name=pynvml.nvmlDeviceGetName(part),
        memory_bytes=pynvml.nvmlDeviceGetMemoryInfo(part).total,
    )


def _numa_node(pci: str) -> int | None:
    # The kernel writes the domain with four digits, NVML with eight.
    domain, _, rest = pci.lower().partition(":")
    try:
        node = int(Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _processes(handle: Any) -> tuple[GpuProcess, ...]:
    found = _told(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(handle)) or []
    return tuple(
        GpuProcess(pid=each.pid, name=_program(each.pid), memory_bytes=each.usedGpuMemory)
        for each in found
    )


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _links(handles: Sequence[Any]) -> list[Link]:
    found = []
    for (one, handle), (two, other) in itertools.combinations(enumerate(handles), 2):
        kind = _kind(handle, other)
        if kind is not None:
            found.append(Link(gpus=(one, two), kind=kind))
    return found


def _kind(handle: Any, other: Any) -> LinkKind | None:
    status = _told(
        lambda: pynvml.nvmlDeviceGetP2PStatus(handle, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    )
    if status == pynvml.NVML_P2P_STATUS_OK:
        return "NVLink"
    ancestor = _told(lambda: pynvml.nvmlDeviceGetTopologyCommonAncestor(handle, other))
    return None if ancestor is None else _ANCESTORS.get(ancestor)
