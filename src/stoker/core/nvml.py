"""Reads GPUs, MIG slices and their processes through NVML; the only module that calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pynvml

Handle = Any
"""NVML's handle of a GPU or of a MIG slice."""

MISSING_LIBRARY = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND

_LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)

THROTTLE_REASONS = {
    "power limit": pynvml.nvmlClocksEventReasonSwPowerCap,
    "heat (hardware)": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "heat (driver)": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "power brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
}
"""Reasons for reduced clocks that a user can fix -> NVML's bit. An idle GPU also reduces its clocks, but that is
normal."""


class NvmlError(Exception):
    """No driver answers: its library is missing, it is not loaded, or the versions of library and driver differ."""

    def __init__(self, error: Any) -> None:
        super().__init__(str(error))
        self.is_missing = error.value == MISSING_LIBRARY
        """Whether the machine has no driver at all."""


class GpuLostError(Exception):
    """The GPU fell off the bus, or needs a reset."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Memory of a GPU or of a MIG slice, bytes."""

    total_bytes: int
    used_bytes: int
    """In use by processes."""

    free_bytes: int
    """Memory that processes can still get. Memory that the driver reserves for itself is excluded, if the driver
    reports it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MigSlice:
    """A slice of a GPU in MIG mode; CUDA uses the slice like a GPU."""

    uuid: str
    name: str
    memory_bytes: int


@contextmanager
def driver() -> Iterator[None]:
    """Keep the driver's library open inside the block.

    Raises:
        NvmlError: no driver answers.
    """
    open_driver()
    try:
        yield
    finally:
        close_driver()


def open_driver() -> None:
    """Open the driver's library; a process may open it several times.

    Raises:
        NvmlError: no driver answers.
    """
    with _driver_answers():
        pynvml.nvmlInit()


def close_driver() -> None:
    """Close the library; each `open_driver` needs one `close_driver`."""
    try:
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return  # a driver that no longer answers holds no resources


def driver_version() -> str:
    """Return the driver's version, such as 580.65.06.

    Raises:
        NvmlError: the driver no longer answers.
    """
    with _driver_answers():
        return str(pynvml.nvmlSystemGetDriverVersion())


def gpu_count() -> int:
    """Return how many GPUs the driver has.

    Raises:
        NvmlError: the driver no longer answers.
    """
    with _driver_answers():
        return int(pynvml.nvmlDeviceGetCount())


@contextmanager
def _driver_answers() -> Iterator[None]:
    """Raise `NvmlError` if NVML fails inside the block."""
    try:
        yield
    except pynvml.NVMLError as error:
        raise NvmlError(error) from None


def gpu(index: int) -> Handle:
    """Return the handle of a GPU.

    Args:
        index: Number of the GPU in the driver's order.

    Raises:
        GpuLostError: the GPU fell off the bus.
        NvmlError: the GPU does not exist, or the driver no longer answers.
    """
    try:
        return pynvml.nvmlDeviceGetHandleByIndex(index)
    except pynvml.NVMLError as error:
        if error.value in _LOST:
            raise GpuLostError(str(error)) from None
        raise NvmlError(error) from None


def ask(question: Callable[..., Any], *arguments: Any) -> Any:
    """Return NVML's answer; None if this GPU or driver does not support the query, or the user lacks the permission.

    Raises:
        GpuLostError: the GPU fell off the bus.
    """
    try:
        return question(*arguments)
    except pynvml.NVMLError as error:
        if error.value in _LOST:
            raise GpuLostError(str(error)) from None
        return None


def name(handle: Handle) -> str:
    """Return the product name; empty if the driver does not report it."""
    return ask(pynvml.nvmlDeviceGetName, handle) or ""


def uuid(handle: Handle) -> str:
    """Return the UUID, `GPU-...` or `MIG-...`; empty if the driver does not report it."""
    return ask(pynvml.nvmlDeviceGetUUID, handle) or ""


def pci_address(handle: Handle) -> str:
    """Return the GPU's address on the PCI bus, such as 00000000:0A:00.0; empty if the driver does not report it."""
    info = ask(pynvml.nvmlDeviceGetPciInfo, handle)
    return "" if info is None else info.busId


def memory(handle: Handle) -> Memory | None:
    """Return the memory as `nvidia-smi` does: without what the driver reserves, if it reports that."""
    found = ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    found = found or ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if found is None:
        return None
    return Memory(total_bytes=found.total, used_bytes=found.used, free_bytes=found.free)


def temperature_c(handle: Handle) -> int | None:
    """Return the GPU's temperature, degrees Celsius."""
    return ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)


def power_w(handle: Handle) -> float | None:
    """Return the power that the GPU uses, watts."""
    found = ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    return None if found is None else found / 1000


def power_limit_w(handle: Handle) -> float | None:
    """Return the GPU's power limit, watts."""
    found = ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return None if found is None else found / 1000


def sm_clock_mhz(handle: Handle) -> int | None:
    """Return the clock of the GPU's multiprocessors, MHz."""
    return ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)


def memory_clock_mhz(handle: Handle) -> int | None:
    """Return the clock of the GPU's memory, MHz."""
    return ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM)


def throttled_by(handle: Handle) -> tuple[str, ...] | None:
    """Return why the GPU has reduced its clocks, as names of `THROTTLE_REASONS`."""
    bits = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if bits is None:  # drivers before 535 know only the function's old name
        bits = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    if bits is None:
        return None
    return tuple(reason for reason, bit in THROTTLE_REASONS.items() if bits & bit)


def utilization(handle: Handle) -> tuple[float, float] | None:
    """Return for which shares of the driver's last sample period a kernel ran, and memory was read or written."""
    found = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return None if found is None else (found.gpu / 100, found.memory / 100)


def ecc_errors(handle: Handle) -> dict[str, int]:
    """Return the memory errors since the driver was loaded: kind -> number; empty without ECC."""
    mode = ask(pynvml.nvmlDeviceGetEccMode, handle)
    if mode is None or mode[0] != pynvml.NVML_FEATURE_ENABLED:
        return {}
    kinds = {
        "corrected": pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
        "uncorrected": pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
    }
    found = {
        kind: ask(pynvml.nvmlDeviceGetTotalEccErrors, handle, number, pynvml.NVML_VOLATILE_ECC)
        for kind, number in kinds.items()
    }
    return {kind: count for kind, count in found.items() if count is not None}


def processes(handle: Handle) -> dict[int, int | None]:
    """Return the processes that compute on the GPU: process ID -> GPU memory, bytes; None if it is not reported."""
    found = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return {each.pid: each.usedGpuMemory for each in found}


def mig_enabled(handle: Handle) -> bool | None:
    """Return whether the GPU is in MIG mode; None if it does not support MIG."""
    found = ask(pynvml.nvmlDeviceGetMigMode, handle)
    return None if found is None else found[0] == pynvml.NVML_DEVICE_MIG_ENABLE


def mig_handles(handle: Handle) -> list[Handle]:
    """Return the handles of a GPU's MIG slices, in the driver's order."""
    most = ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    # For an index without a slice NVML returns an error, so `ask` returns None.
    found = (
        ask(partial(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, n)) for n in range(most)
    )
    return [each for each in found if each is not None]


def mig_slices(handle: Handle) -> tuple[MigSlice, ...]:
    """Return the MIG slices of a GPU, in the driver's order."""
    return tuple(
        MigSlice(uuid=uuid(part), name=name(part), memory_bytes=held.total_bytes)
        for part in mig_handles(handle)
        if (held := memory(part)) is not None
    )
