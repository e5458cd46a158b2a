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
    """Share of the multiprocessors that were active, mean over the time."""

    tensor: float | None = None
    """Share of the time in which the tensor cores were active, mean over the multiprocessors."""

    dram: float | None = None
    """Share of the memory's bandwidth in use."""

    pcie_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """`tx` (sent) and `rx` (received) over PCIe."""

    nvlink_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """`tx` (sent) and `rx` (received) over all NVLinks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that computes on a GPU, and what it belongs to."""

    pid: int
    memory_bytes: int | None
    run: str = ""
    """The run that it trains, NAME/ID; empty if it trains none, or another user's."""

    model: str = ""
    """The model that it serves; empty if it serves none, or another user's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuIdentity:
    """The GPU or MIG slice."""

    index: int
    """Number of the GPU in the driver's order; of a slice: that of its GPU."""

    uuid: str = ""
    name: str = ""
    pci: str = ""
    """Address of the GPU on the bus."""

    minor: int | None = None
    """N of /dev/nvidiaN."""

    mig: str = ""
    """Number of the GPU instance that a MIG slice is; empty for a whole GPU."""

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
    """Like `GpuActivity`, for a GPU without GPM: measured over 20 ms."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReading:
    """One GPU or MIG slice at one time; None or empty means that it does not report the value."""

    identity: GpuIdentity
    lost: bool = False
    """Whether it fell off the bus, or needs a reset."""

    activity: GpuActivity | None = None
    """None without GPM (before Hopper), and in the first sample."""

    kernel_ran: float | None = None
    """Share of the last moments in which some kernel ran, however few multiprocessors it used."""

    memory_ran: float | None = None
    """Share of the last moments in which memory was read or written, however little."""

    memory: Memory | None = None
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    power_w: float | None = None
    energy_mj: int | None = None
    """Since the driver was loaded, millijoules."""

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttled_by: tuple[str, ...] | None = None
    pcie_replays: int | None = None
    nvlink_kib: Mapping[str, int] = field(default_factory=dict)
    """`tx` and `rx` over all NVLinks since the driver was loaded, KiB."""

    nvlink_bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """Rates between two samples, from the counters above or from GPM."""

    xid: int | None = None
    """Number of the newest XID error, 0 before the first; None if the driver does not report them."""

    slow: SlowFields = SlowFields()

    @property
    def pcie_bytes_per_s(self) -> Mapping[str, float]:
        """`tx` (sent) and `rx` (received) over PCIe."""
        found = self.activity.pcie_bytes_per_s if self.activity else {}
        return found or self.slow.pcie_bytes_per_s
