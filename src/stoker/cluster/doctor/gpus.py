"""Reads GPUs through NVML: their state, errors, links and processes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pynvml

from stoker.core import nvml
from stoker.core.nvml import Handle, MigSlice, ask

LinkKind = Literal[
    "NVLink", "PCIe switch", "PCIe switches", "PCIe host bridge", "NUMA node", "system"
]
"""Kind of connection between two GPUs; the fastest kind is first."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that holds memory of a GPU."""

    pid: int
    """Process ID in this process's namespace; for a process in another container the ID may be unknown here."""

    name: str
    """Name of the process's program; empty if the name cannot be read."""

    memory_bytes: int | None
    """GPU memory that the process holds, bytes; None if the driver does not report it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuState:
    """The state of one GPU; a field is None if the GPU does not report the value."""

    index: int
    """Number of the GPU in the driver's order."""

    name: str
    uuid: str
    compute_capability: tuple[int, int]
    """Major and minor, e.g. (9, 0)."""

    memory_bytes: int
    used_bytes: int
    pci: str
    """Address of the GPU on the PCI bus."""

    persistence: bool | None = None
    """Whether the driver stays loaded when no process uses the GPU."""

    ecc: bool | None = None
    """Whether the GPU now corrects memory errors (ECC)."""

    ecc_default: bool | None = None
    """Whether ECC is on by default."""

    ecc_uncorrected: int | None = None
    """Number of memory errors since the driver was loaded that could not be corrected."""

    slowed_by: tuple[str, ...] = ()
    """Why the GPU has reduced its clocks now."""

    temperature_c: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: int | None = None
    """Present clock of the multiprocessors, MHz."""

    clock_most_mhz: int | None = None
    utilization: float | None = None
    """Share of the driver's last sample period in which a kernel ran, even if it used few multiprocessors."""

    pcie_width: int | None = None
    """Number of PCIe lanes in use."""

    pcie_most_width: int | None = None
    """Maximum number of PCIe lanes that the card and the slot support."""

    mig: bool | None = None
    """Whether the GPU is in MIG mode."""

    slices: tuple[MigSlice, ...] = ()
    """MIG slices of the GPU, in the driver's order."""

    numa_node: int | None = None
    """NUMA node whose memory and cores are nearest to the GPU."""

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
    """Version of the driver, e.g. 580.65.06; None if no driver answers."""

    cuda: tuple[int, int] | None = None
    """Newest version of CUDA that the driver supports."""

    states: tuple[GpuState, ...] = ()
    links: tuple[Link, ...] = ()
    unread: str = ""
    """Why the driver could not be read; empty if it could."""


def read_gpus() -> Gpus:
    """Return what NVML reports. Works also on a machine without GPUs or with a broken driver."""
    try:
        with nvml.driver():
            handles = [nvml.gpu(index) for index in range(nvml.gpu_count())]
            version = ask(pynvml.nvmlSystemGetCudaDriverVersion_v2)
            return Gpus(
                driver=nvml.driver_version(),
                cuda=None if version is None else (version // 1000, version % 1000 // 10),
                states=tuple(_state(index, handle) for index, handle in enumerate(handles)),
                links=tuple(_links(handles)),
            )
    except (nvml.NvmlError, nvml.GpuLostError) as error:
        return Gpus(unread=str(error))


def best_groups(gpus: Gpus) -> tuple[tuple[int, ...], ...]:
    """Return the groups of GPUs in which all are connected by the fastest kind of link on this machine.

    A job that does not use all GPUs should use GPUs of a single group.
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


def _state(index: int, handle: Handle) -> GpuState:
    memory = nvml.memory(handle)
    capability = ask(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    if memory is None or capability is None:
        raise nvml.GpuLostError(f"GPU {index} reports neither its memory nor its capability")
    ecc = ask(pynvml.nvmlDeviceGetEccMode, handle)
    ecc_default = ask(pynvml.nvmlDeviceGetDefaultEccMode, handle)
    persistence = ask(pynvml.nvmlDeviceGetPersistenceMode, handle)
    utilization = nvml.utilization(handle)
    pci = nvml.pci_address(handle)
    mig = nvml.mig_enabled(handle)
    return GpuState(
        index=index,
        name=nvml.name(handle),
        uuid=nvml.uuid(handle),
        compute_capability=tuple(capability),
        memory_bytes=memory.total_bytes,
        used_bytes=memory.used_bytes,
        pci=pci,
        persistence=None if persistence is None else bool(persistence),
        ecc=None if ecc is None else ecc[0] == pynvml.NVML_FEATURE_ENABLED,
        ecc_default=None if ecc_default is None else ecc_default[0] == pynvml.NVML_FEATURE_ENABLED,
        ecc_uncorrected=nvml.ecc_errors(handle).get("uncorrected"),
        slowed_by=nvml.throttled_by(handle) or (),
        temperature_c=nvml.temperature_c(handle),
        power_w=nvml.power_w(handle),
        power_limit_w=nvml.power_limit_w(handle),
        clock_mhz=nvml.sm_clock_mhz(handle),
        clock_most_mhz=ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, pynvml.NVML_CLOCK_SM),
        utilization=None if utilization is None else utilization[0],
        pcie_width=ask(pynvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
        pcie_most_width=ask(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
        mig=mig,
        slices=nvml.mig_slices(handle) if mig else (),
        numa_node=_numa_node(pci),
        processes=tuple(
            GpuProcess(pid=pid, name=_program(pid), memory_bytes=held)
            for pid, held in nvml.processes(handle).items()
        ),
    )


def _numa_node(pci: str) -> int | None:
    # The kernel writes the domain of a PCI address with four digits, NVML with eight.
    domain, _, rest = pci.lower().partition(":")
    try:
        node = int(Path(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _links(handles: Sequence[Handle]) -> list[Link]:
    found = []
    for (one, handle), (two, other) in itertools.combinations(enumerate(handles), 2):
        kind = _kind(handle, other)
        if kind is not None:
            found.append(Link(gpus=(one, two), kind=kind))
    return found


def _kind(handle: Handle, other: Handle) -> LinkKind | None:
    status = ask(pynvml.nvmlDeviceGetP2PStatus, handle, other, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    if status == pynvml.NVML_P2P_STATUS_OK:
        return "NVLink"
    ancestor = ask(pynvml.nvmlDeviceGetTopologyCommonAncestor, handle, other)
    return None if ancestor is None else _ANCESTORS.get(ancestor)
