"""Reads GPUs, MIG slices and their processes through NVML; the only module that calls it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pynvml

Handle = Any
"""A GPU or a MIG slice, for NVML."""

MISSING_LIBRARY = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND

_LOST = (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED)

THROTTLE_REASONS = {
    "power limit": pynvml.nvmlClocksEventReasonSwPowerCap,
    "heat (hardware)": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "heat (driver)": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "power brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
}
"""Reasons for lower clocks that can be fixed -> their bit; idleness is not one."""


class NvmlError(Exception):
    """No driver answers: its library is missing, it is not loaded, or their versions differ."""

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
    """Memory that processes can still get, without what the driver reserves for itself if that is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MigSlice:
    """A slice of a GPU in MIG mode, which CUDA uses like a GPU."""

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
    """Close the library once for each `open_driver`."""
    try:
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return  # a driver that no longer answers holds nothing


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
    """Return a GPU.

    Args:
        index: in the driver's order.

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
    """Return NVML's answer; None if this GPU or driver does not support the query, or this user may not ask.

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
    """Return the product's name; empty if it is not reported."""
    return ask(pynvml.nvmlDeviceGetName, handle) or ""


def uuid(handle: Handle) -> str:
    """Return its UUID, `GPU-...` or `MIG-...`; empty if it is not reported."""
    return ask(pynvml.nvmlDeviceGetUUID, handle) or ""


def pci_address(handle: Handle) -> str:
    """Return its address on the bus, such as 00000000:0A:00.0; empty if it is not reported."""
    info = ask(pynvml.nvmlDeviceGetPciInfo, handle)
    return "" if info is None else info.busId


def memory(handle: Handle) -> Memory | None:
    """Return its memory, without what the driver reserves for itself if the driver supports that, like `nvidia-smi`."""
    found = ask(pynvml.nvmlDeviceGetMemoryInfo, handle, pynvml.nvmlMemory_v2)
    found = found or ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
    if found is None:
        return None
    return Memory(total_bytes=found.total, used_bytes=found.used, free_bytes=found.free)


def temperature_c(handle: Handle) -> int | None:
    """Return the GPU's temperature, degrees Celsius."""
    return ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU)


def power_w(handle: Handle) -> float | None:
    """Return the power that it draws, watts."""
    found = ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    return None if found is None else found / 1000


def power_limit_w(handle: Handle) -> float | None:
    """Return the power that it may draw, watts."""
    found = ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return None if found is None else found / 1000


def sm_clock_mhz(handle: Handle) -> int | None:
    """Return the clock of its multiprocessors, MHz."""
    return ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)


def memory_clock_mhz(handle: Handle) -> int | None:
    """Return the clock of its memory, MHz."""
    return ask(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM)


def throttled_by(handle: Handle) -> tuple[str, ...] | None:
    """Return why clocks are lower than possible, by the names of `THROTTLE_REASONS`."""
    bits = ask(pynvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if bits is None:  # drivers before 535 have only its old name
        bits = ask(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    if bits is None:
        return None
    return tuple(reason for reason, bit in THROTTLE_REASONS.items() if bits & bit)


def utilization(handle: Handle) -> tuple[float, float] | None:
    """Return the shares of the last moments in which a kernel ran, and in which memory was read or written."""
    found = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    return None if found is None else (found.gpu / 100, found.memory / 100)


def ecc_errors(handle: Handle) -> dict[str, int]:
    """Return memory errors since the driver was loaded, by kind; empty if ECC is off or not supported."""
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
    """Return processes that compute on it -> their GPU memory, bytes; None if it is not reported."""
    found = ask(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return {each.pid: each.usedGpuMemory for each in found}


def mig_enabled(handle: Handle) -> bool | None:
    """Return whether the GPU is divided into MIG slices; None if it cannot be."""
    found = ask(pynvml.nvmlDeviceGetMigMode, handle)
    return None if found is None else found[0] == pynvml.NVML_DEVICE_MIG_ENABLE


def mig_handles(handle: Handle) -> list[Handle]:
    """Return the MIG slices of a GPU, in the driver's order."""
    most = ask(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    # An index without a slice answers with an error.
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
