"""The values in a sample of one GPU or MIG slice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.core.nvml import Memory


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuActivity:
    """Activity between two samples, from the counters of GPM; None means that the GPU does not have the counter."""

    graphics: float | None = None
    """Share of the time in which any compute or graphics engine was active."""

    sm: float | None = None
    """Share of the multiprocessors that were active, averaged over the time."""

    tensor: float | None = None
    """Share of the time in which the tensor cores were active, averaged over the multiprocessors."""

    dram: float | None = None
    """Share of the memory bandwidth in use."""

    pcie_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second over PCIe: `tx` (sent) and `rx` (received)."""

    nvlink_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second over all NVLinks: `tx` (sent) and `rx` (received)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU, and its run or model."""

    pid: int
    memory_bytes: int | None
    run: str = ""
    """The run that the process trains, NAME/ID; empty if it trains none, or belongs to another user."""

    model: str = ""
    """The model that the process serves; empty if it serves none, or belongs to another user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuIdentity:
    """The constant properties that identify a GPU or MIG slice."""

    index: int
    """Number of the GPU in the driver's order; a slice has the number of its GPU."""

    uuid: str = ""
    name: str = ""
    pci: str = ""
    """Address of the GPU on the PCI bus."""

    minor: int | None = None
    """The N in /dev/nvidiaN."""

    mig: str = ""
    """Number of a MIG slice's GPU instance; empty for a whole GPU."""

    @property
    def profile(self) -> str:
        """Profile of a MIG slice, such as 3g.40gb; empty for a whole GPU."""
        return self.name.rpartition(" MIG ")[2] if self.mig else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlowFields:
    """Values that are read less often: they change seldom, or NVML takes long to read them."""

    power_limit_w: float | None = None
    ecc_errors: Mapping[str, int] = field(default_factory=dict)
    """`corrected` and `uncorrected` memory errors since the driver was loaded."""

    processes: tuple[GpuProcess, ...] = ()
    pcie_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """As in `GpuActivity`, but for a GPU without GPM; measured over 20 ms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """One GPU or MIG slice at one time; a value that it does not report is None or empty."""

    identity: GpuIdentity
    lost: bool = False
    """Whether the GPU fell off the bus, or needs a reset."""

    activity: GpuActivity | None = None
    """Activity from GPM; None without GPM (before Hopper), and in the first sample."""

    kernel_ran: float | None = None
    """Share of the driver's last sample period in which any kernel ran, even on a single multiprocessor."""

    memory_ran: float | None = None
    """Share of the driver's last sample period in which memory was read or written, however little."""

    memory: Memory | None = None
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    power_w: float | None = None
    energy_mj: int | None = None
    """Energy used since the driver was loaded, millijoules."""

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttled_by: tuple[str, ...] | None = None
    pcie_replays: int | None = None
    nvlink_kib: Mapping[str, int] = field(default_factory=dict)
    """KiB over all NVLinks since the driver was loaded: `tx` (sent) and `rx` (received)."""

    nvlink_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Bytes per second over all NVLinks between two samples, from `nvlink_kib` or from GPM."""

    xid: int | None = None
    """XID code of the newest error, 0 if none occurred; None if the driver does not report XID errors."""

    slow: SlowFields = SlowFields()

    @property
    def pcie_bytes_per_s(self) -> Mapping[str, float]:
        """Bytes per second over PCIe: `tx` (sent) and `rx` (received)."""
        found = self.activity.pcie_bytes_per_s if self.activity else {}
        return found or self.slow.pcie_bytes_per_s
