"""Writes readings of GPUs as metrics with dcgm-exporter's names, so that dashboards and alerts for it still work."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from stoker.telemetry.catalogue import dcgm as catalogue
from stoker.telemetry.catalogue.metric import Metric
from stoker.telemetry.exposition import header, sample
from stoker.telemetry.gpu.readings import GpuActivity, GpuReading

_MIB = 1 << 20


class _Entity(NamedTuple):
    """The subject of a line: a GPU, or each MIG slice of a divided GPU.

    As in dcgm-exporter, the lines of a slice repeat the values that exist only for the whole GPU.
    """

    part: GpuReading
    """The MIG slice; the GPU itself if it is not divided."""

    whole: GpuReading
    """The GPU."""


def dcgm_families(readings: Sequence[GpuReading]) -> list[list[str]]:
    """Return the lines of each metric that at least one GPU reports.

    Args:
        readings: Readings of GPUs and MIG slices.
    """
    host = socket.gethostname()
    entities = [entity for entity in _entities(readings) if not entity.whole.lost]
    found = []
    for metric, value_of in _VALUES.items():
        samples = [
            sample(metric.name, _labels(entity, host), number)
            for entity in entities
            if (number := value_of(entity)) is not None
        ]
        if samples:
            found.append([*header(metric.name, metric.kind, metric.help), *samples])
    return found


def _entities(readings: Sequence[GpuReading]) -> Iterable[_Entity]:
    for whole in (each for each in readings if not each.identity.mig):
        index = whole.identity.index
        parts = [each for each in readings if each.identity.index == index and each is not whole]
        yield from (_Entity(part, whole) for part in parts or [whole])


def _labels(entity: _Entity, host: str) -> tuple[tuple[str, str], ...]:
    which, whole = entity.part.identity, entity.whole.identity
    values = (
        str(whole.index),
        whole.uuid,
        whole.pci,
        f"nvidia{whole.index if whole.minor is None else whole.minor}",
        whole.name,
        which.profile,
        which.mig,
        host,
    )
    named = zip(catalogue.LABELS, values, strict=True)
    return tuple((name, value) for name, value in named if value or not name.startswith("GPU_I"))


def _by_gpm(ask: Callable[[GpuActivity], float | None]) -> Callable[[_Entity], float | None]:
    return lambda entity: None if entity.part.activity is None else ask(entity.part.activity)


def _percent(share: float | None) -> float | None:
    return None if share is None else round(share * 100)


def _used_mib(entity: _Entity) -> float | None:
    memory = entity.part.memory
    return None if memory is None else memory.used_bytes // _MIB


def _free_mib(entity: _Entity) -> float | None:
    memory = entity.part.memory
    return None if memory is None else memory.free_bytes // _MIB


def _nvlink_kib(entity: _Entity) -> float | None:
    counters = entity.whole.nvlink_kib
    return sum(counters.values()) if counters else None


_VALUES: Mapping[Metric, Callable[[_Entity], float | None]] = {
    catalogue.SM_CLOCK: lambda entity: entity.whole.sm_clock_mhz,
    catalogue.MEM_CLOCK: lambda entity: entity.whole.memory_clock_mhz,
    catalogue.MEMORY_TEMP: lambda entity: entity.whole.memory_temperature_c,
    catalogue.GPU_TEMP: lambda entity: entity.whole.temperature_c,
    catalogue.POWER_USAGE: lambda entity: entity.whole.power_w,
    catalogue.ENERGY: lambda entity: entity.whole.energy_mj,
    catalogue.PCIE_REPLAY: lambda entity: entity.whole.pcie_replays,
    catalogue.GPU_UTIL: lambda entity: _percent(entity.whole.kernel_ran),
    catalogue.MEM_COPY_UTIL: lambda entity: _percent(entity.whole.memory_ran),
    catalogue.XID_ERRORS: lambda entity: entity.whole.xid,
    catalogue.FB_FREE: _free_mib,
    catalogue.FB_USED: _used_mib,
    catalogue.NVLINK: _nvlink_kib,
    catalogue.GR_ENGINE_ACTIVE: _by_gpm(lambda activity: activity.graphics),
    catalogue.PIPE_TENSOR_ACTIVE: _by_gpm(lambda activity: activity.tensor),
    catalogue.DRAM_ACTIVE: _by_gpm(lambda activity: activity.dram),
    catalogue.PCIE_TX: _by_gpm(lambda activity: activity.pcie_bytes_per_s.get("tx")),
    catalogue.PCIE_RX: _by_gpm(lambda activity: activity.pcie_bytes_per_s.get("rx")),
}
