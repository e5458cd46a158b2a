"""Writes readings of GPUs as metrics with Stoker's names; a value that a GPU does not report is left out, never 0."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stoker.core.nvml import THROTTLE_REASONS
from stoker.telemetry.catalogue import gpu as catalogue
from stoker.telemetry.catalogue.metric import Metric
from stoker.telemetry.exposition import family
from stoker.telemetry.gpu.readings import GpuActivity, GpuReading

Samples = dict[Sequence[str], float]
"""Values of all labels -> number."""

Values = Mapping[tuple[str, ...], float]
"""Values of the labels after gpu, uuid and mig -> number."""

_HERTZ = 1_000_000


def families(
    readings: Sequence[GpuReading], *, driver: str, age_s: float | None
) -> list[list[str]]:
    """Return the lines of each metric.

    Args:
        readings: Readings of GPUs and MIG slices.
        driver: Version of the driver.
        age_s: Age of these readings, seconds; None without a driver.
    """
    well = [reading for reading in readings if not reading.lost]
    found = [
        *health_families(readings, age_s=age_s),
        family(catalogue.INFO, {_info(each, driver): 1.0 for each in well}),
        *(family(metric, _samples(readings, values_of)) for metric, values_of in _VALUES.items()),
        family(catalogue.PROCESS_MEMORY, _process_memory(well)),
    ]
    return [lines for lines in found if lines]


def health_families(readings: Sequence[GpuReading], *, age_s: float | None) -> list[list[str]]:
    """Return the lines that show whether the other metrics are current.

    Args:
        readings: Readings of GPUs and MIG slices.
        age_s: Age of these readings, seconds; None without a driver.
    """
    whole = [reading for reading in readings if not reading.identity.mig]
    return [
        family(catalogue.SAMPLE_AGE, {} if age_s is None else {(): age_s}),
        family(catalogue.LOST, {_labels(each)[:2]: float(each.lost) for each in whole}),
    ]


def _samples(readings: Sequence[GpuReading], values_of: Callable[[GpuReading], Values]) -> Samples:
    return {
        (*_labels(reading), *more): number
        for reading in readings
        for more, number in values_of(reading).items()
    }


def _labels(reading: GpuReading) -> tuple[str, str, str]:
    which = reading.identity
    return str(which.index), which.uuid, which.mig


def _info(reading: GpuReading, driver: str) -> tuple[str, ...]:
    which = reading.identity
    return (*_labels(reading), which.name, which.profile, which.pci, driver)


def _one(value: float | None, unit: float = 1) -> Values:
    return {} if value is None else {(): value * unit}


def _each(values: Mapping[str, float]) -> Values:
    return {(label,): number for label, number in values.items()}


def _by_gpm(ask: Callable[[GpuActivity], float | None]) -> Callable[[GpuReading], Values]:
    return lambda reading: _one(None if reading.activity is None else ask(reading.activity))


def _clocks(reading: GpuReading) -> Values:
    clocks = {"sm": reading.sm_clock_mhz, "memory": reading.memory_clock_mhz}
    return _each({name: mhz * _HERTZ for name, mhz in clocks.items() if mhz is not None})


def _throttled(reading: GpuReading) -> Values:
    reasons = reading.throttled_by
    if reasons is None:
        return {}
    return _each({reason: float(reason in reasons) for reason in THROTTLE_REASONS})


def _process_memory(readings: Sequence[GpuReading]) -> Samples:
    return {
        (*_labels(reading)[:2], str(each.pid), each.run, each.model): each.memory_bytes
        for reading in readings
        for each in reading.slow.processes
        if each.memory_bytes is not None
    }


_VALUES: Mapping[Metric, Callable[[GpuReading], Values]] = {
    catalogue.SM_ACTIVE: _by_gpm(lambda activity: activity.sm),
    catalogue.TENSOR_ACTIVE: _by_gpm(lambda activity: activity.tensor),
    catalogue.DRAM_ACTIVE: _by_gpm(lambda activity: activity.dram),
    catalogue.KERNEL_RAN: lambda reading: _one(reading.kernel_ran),
    catalogue.MEMORY_USED: lambda reading: _one(
        reading.memory.used_bytes if reading.memory else None
    ),
    catalogue.MEMORY: lambda reading: _one(reading.memory.total_bytes if reading.memory else None),
    catalogue.TEMPERATURE: lambda reading: _one(reading.temperature_c),
    catalogue.POWER: lambda reading: _one(reading.power_w),
    catalogue.POWER_LIMIT: lambda reading: _one(reading.slow.power_limit_w),
    catalogue.CLOCK: _clocks,
    catalogue.THROTTLED: _throttled,
    catalogue.ECC_ERRORS: lambda reading: _each(reading.slow.ecc_errors),
    catalogue.XID: lambda reading: _one(reading.xid),
    catalogue.PCIE: lambda reading: _each(reading.pcie_bytes_per_s),
    catalogue.NVLINK: lambda reading: _each(reading.nvlink_bytes_per_s),
}
