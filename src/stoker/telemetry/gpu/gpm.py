"""Reads the activity of a GPU from its GPM counters, which exist on Hopper and newer GPUs.

Source: NVML API reference, GPM functions and `nvmlGpmMetricId_t`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pynvml

from stoker.core import nvml
from stoker.telemetry.gpu.readings import GpuActivity

_GRAPHICS = pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL
_SM = pynvml.NVML_GPM_METRIC_SM_UTIL
_TENSOR = pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL
_DRAM = pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL
_PCIE = {
    "tx": pynvml.NVML_GPM_METRIC_PCIE_TX_PER_SEC,
    "rx": pynvml.NVML_GPM_METRIC_PCIE_RX_PER_SEC,
}
_NVLINK = {
    "tx": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_TX_PER_SEC,
    "rx": pynvml.NVML_GPM_METRIC_NVLINK_TOTAL_RX_PER_SEC,
}
_REQUESTED = (_GRAPHICS, _SM, _TENSOR, _DRAM, *_PCIE.values(), *_NVLINK.values())

_MIB = 1 << 20


class GpmCounters:
    """The counters of one GPU or MIG slice; it keeps the last two samples."""

    def __init__(self, handle: nvml.Handle, *, gpu_instance: int | None = None) -> None:
        """Prepare the samples; nothing is read.

        Args:
            handle: NVML's handle of the whole GPU.
            gpu_instance: Number of the GPU instance of the MIG slice to read; None: the whole GPU.
        """
        self._handle = handle
        self._gpu_instance = gpu_instance
        found = (nvml.ask(pynvml.nvmlGpmSampleAlloc) for _ in range(2))
        self._samples = [sample for sample in found if sample is not None]
        self._has_previous = False
        self._request = pynvml.c_nvmlGpmMetricsGet_t()
        self._request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._request.numMetrics = len(_REQUESTED)
        for place, metric in enumerate(_REQUESTED):
            self._request.metrics[place].metricId = metric

    def read(self) -> GpuActivity | None:
        """Return the activity since the previous call; None in the first call, or if the driver gives no sample.

        Raises:
            GpuLostError: The GPU fell off the bus.
        """
        had_previous, self._has_previous = self._has_previous, False
        if len(self._samples) < 2 or not self._sampled(self._samples[0]):
            return None
        self._has_previous = True
        self._samples.reverse()  # the next call overwrites the first of the two: the older sample
        if not had_previous:
            return None
        self._request.sample1, self._request.sample2 = self._samples
        if nvml.ask(pynvml.nvmlGpmMetricsGet, self._request) is None:
            return None
        found = {
            each.metricId: float(each.value)
            for each in self._request.metrics[: len(_REQUESTED)]
            if each.nvmlReturn == pynvml.NVML_SUCCESS and math.isfinite(each.value)
        }
        return _activity(found)

    def close(self) -> None:
        """Free the samples."""
        for sample in self._samples:
            nvml.ask(pynvml.nvmlGpmSampleFree, sample)
        self._samples = []

    def _sampled(self, sample: Any) -> bool:
        if self._gpu_instance is None:
            found = nvml.ask(pynvml.nvmlGpmSampleGet, self._handle, sample)
        else:
            found = nvml.ask(pynvml.nvmlGpmMigSampleGet, self._handle, self._gpu_instance, sample)
        return found is not None


def has_gpm(handle: nvml.Handle) -> bool:
    """Return whether a GPU has these counters."""
    support = nvml.ask(pynvml.nvmlGpmQueryDeviceSupport, handle)
    return support is not None and bool(support.isSupportedDevice)


def _activity(found: Mapping[int, float]) -> GpuActivity:
    def share(metric: int) -> float | None:
        return found[metric] / 100 if metric in found else None

    def rates(metrics: Mapping[str, int]) -> dict[str, float]:
        return {way: found[metric] * _MIB for way, metric in metrics.items() if metric in found}

    return GpuActivity(
        graphics=share(_GRAPHICS),
        sm=share(_SM),
        tensor=share(_TENSOR),
        dram=share(_DRAM),
        pcie_bytes_per_s=rates(_PCIE),
        nvlink_bytes_per_s=rates(_NVLINK),
    )
