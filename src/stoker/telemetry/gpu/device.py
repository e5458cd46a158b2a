"""Reads one GPU or MIG slice repeatedly."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pynvml

from stoker.core import nvml
from stoker.telemetry.gpu.gpm import GpmCounters, has_gpm
from stoker.telemetry.gpu.readings import GpuIdentity, GpuProcess, GpuReading, SlowFields

OwnerOf = Callable[[int, int | None], GpuProcess]
"""(process ID, its GPU memory in bytes) -> the run or model that the process belongs to."""

_ALL_LINKS = 0xFFFFFFFF
"""Scope ID of a field that means the sum over all NVLinks. Source: NVML, `NVML_FI_DEV_NVLINK_THROUGHPUT_*`."""

_NVLINK = {
    "tx": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
    "rx": pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
}
_FIELDS = (
    pynvml.NVML_FI_DEV_MEMORY_TEMP,
    pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
    pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER,
    *((field, _ALL_LINKS) for field in _NVLINK.values()),
)
"""The fields of NVML that are read together in one call."""

_VALUE_OF = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}

_KIB = 1 << 10
_PCIE = {"tx": pynvml.NVML_PCIE_UTIL_TX_BYTES, "rx": pynvml.NVML_PCIE_UTIL_RX_BYTES}


class WholeGpu:
    """A whole GPU, which may be divided into MIG slices."""

    def __init__(self, index: int, handle: nvml.Handle, owner_of: OwnerOf) -> None:
        """Read the constant properties.

        Args:
            index: Number of the GPU in the driver's order.
            handle: NVML's handle of the GPU.
            owner_of: Finds the run or model that a process belongs to.

        Raises:
            GpuLostError: The GPU fell off the bus.
        """
        self.handle = handle
        self.identity = GpuIdentity(
            index=index,
            uuid=nvml.uuid(handle),
            name=nvml.name(handle),
            pci=nvml.pci_address(handle),
            minor=nvml.ask(pynvml.nvmlDeviceGetMinorNumber, handle),
        )
        self._owner_of = owner_of
        self._gpm = GpmCounters(handle) if has_gpm(handle) else None
        self._slow = SlowFields()
        self._links: tuple[float, Mapping[str, int]] = (0.0, {})
        self.xid: int | None = None

    def read(self, *, slow: bool) -> GpuReading:
        """Sample the GPU.

        Args:
            slow: Whether to read the slow fields as well.

        Raises:
            GpuLostError: The GPU fell off the bus.
        """
        handle = self.handle
        if slow:
            self._slow = self._slow_fields()
        ran = nvml.utilization(handle)
        fields = _field_values(handle)
        activity = None if self._gpm is None else self._gpm.read()
        links = {way: fields[field] for way, field in _NVLINK.items() if field in fields}
        by_counters = self._link_rates(links)
        return GpuReading(
            identity=self.identity,
            activity=activity,
            kernel_ran=ran and ran[0],
            memory_ran=ran and ran[1],
            memory=nvml.memory(handle),
            temperature_c=nvml.temperature_c(handle),
            # A card without such a sensor may answer 0 instead of an error.
            memory_temperature_c=fields.get(pynvml.NVML_FI_DEV_MEMORY_TEMP) or None,
            power_w=nvml.power_w(handle),
            energy_mj=fields.get(pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION),
            sm_clock_mhz=nvml.sm_clock_mhz(handle),
            memory_clock_mhz=nvml.memory_clock_mhz(handle),
            throttled_by=nvml.throttled_by(handle),
            pcie_replays=fields.get(pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER),
            nvlink_kib=links,
            nvlink_bytes_per_s=(activity and activity.nvlink_bytes_per_s) or by_counters,
            xid=self.xid,
            slow=self._slow,
        )

    def slices(self) -> list[MigInstance]:
        """Return the current MIG slices of the GPU."""
        if not nvml.mig_enabled(self.handle):
            return []
        found = (
            (part, nvml.ask(pynvml.nvmlDeviceGetGpuInstanceId, part))
            for part in nvml.mig_handles(self.handle)
        )
        return [
            MigInstance(self, part, number, self._owner_of)
            for part, number in found
            if number is not None
        ]

    def close(self) -> None:
        """Free the resources of the driver."""
        if self._gpm is not None:
            self._gpm.close()

    def _slow_fields(self) -> SlowFields:
        # Processes on a divided GPU belong to its slices.
        divided = nvml.mig_enabled(self.handle)
        return SlowFields(
            power_limit_w=nvml.power_limit_w(self.handle),
            ecc_errors=nvml.ecc_errors(self.handle),
            processes=() if divided else _processes(self.handle, self._owner_of),
            pcie_bytes_per_s={} if self._gpm else _pcie_rates(self.handle),
        )

    def _link_rates(self, links: Mapping[str, int]) -> dict[str, float]:
        """Bytes per second over NVLink since the previous call."""
        now_s = time.monotonic()
        then_s, before = self._links
        self._links = now_s, links
        return {
            way: (count - before[way]) * _KIB / (now_s - then_s)
            for way, count in links.items()
            if way in before and count >= before[way] and now_s > then_s
        }


class MigInstance:
    """A slice of a GPU."""

    def __init__(self, gpu: WholeGpu, handle: nvml.Handle, number: int, owner_of: OwnerOf) -> None:
        """Read the constant properties.

        Args:
            gpu: The GPU that contains the slice.
            handle: NVML's handle of the slice.
            number: Number of the slice's GPU instance.
            owner_of: Finds the run or model that a process belongs to.
        """
        whole = gpu.identity
        self.handle = handle
        self.identity = GpuIdentity(
            index=whole.index,
            uuid=nvml.uuid(handle),
            name=nvml.name(handle),
            pci=whole.pci,
            minor=whole.minor,
            mig=str(number),
        )
        self._owner_of = owner_of
        supported = has_gpm(gpu.handle)
        self._gpm = GpmCounters(gpu.handle, gpu_instance=number) if supported else None
        self._slow = SlowFields()

    def read(self, *, slow: bool) -> GpuReading:
        """Sample memory, processes and activity of the slice; all other values exist only for the whole GPU.

        Args:
            slow: Whether to read the slow fields as well.

        Raises:
            GpuLostError: The GPU fell off the bus.
        """
        if slow:
            self._slow = SlowFields(processes=_processes(self.handle, self._owner_of))
        activity = None if self._gpm is None else self._gpm.read()
        return GpuReading(
            identity=self.identity,
            memory=nvml.memory(self.handle),
            activity=activity,
            slow=self._slow,
        )

    def close(self) -> None:
        """Free the resources of the driver."""
        if self._gpm is not None:
            self._gpm.close()


def _processes(handle: nvml.Handle, owner_of: OwnerOf) -> tuple[GpuProcess, ...]:
    return tuple(owner_of(pid, held) for pid, held in nvml.processes(handle).items())


def _field_values(handle: nvml.Handle) -> dict[int, Any]:
    found: Iterable[Any] = nvml.ask(pynvml.nvmlDeviceGetFieldValues, handle, _FIELDS) or ()
    return {
        each.fieldId: getattr(each.value, _VALUE_OF[each.valueType])
        for each in found
        if each.nvmlReturn == pynvml.NVML_SUCCESS and each.valueType in _VALUE_OF
    }


def _pcie_rates(handle: nvml.Handle) -> dict[str, float]:
    found = {
        way: nvml.ask(pynvml.nvmlDeviceGetPcieThroughput, handle, n) for way, n in _PCIE.items()
    }
    return {way: kib * _KIB for way, kib in found.items() if kib is not None}
