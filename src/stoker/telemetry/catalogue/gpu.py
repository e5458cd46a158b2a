"""Metrics of GPUs; written by `stoker monitor exporter`, and by each training and server for the GPUs that it uses."""

from __future__ import annotations

from functools import partial

from stoker.telemetry.catalogue import dcgm
from stoker.telemetry.catalogue.metric import Kind, Metric, Writer

_GPU = ("gpu", "uuid", "mig")

_gauge = partial(Metric, kind=Kind.GAUGE, writer=Writer.EXPORTER)
_counter = partial(Metric, kind=Kind.COUNTER, writer=Writer.EXPORTER)

INFO = _gauge(
    name="stoker_gpu_info",
    unit="",
    help="Always 1; the labels are product, MIG profile, bus address and driver of a GPU or MIG slice.",
    labels=(*_GPU, "name", "profile", "pci", "driver"),
)
LOST = _gauge(
    name="stoker_gpu_lost",
    unit="",
    help="1: the GPU fell off the bus or needs a reset, and has no other metrics; 0: it answers.",
    labels=("gpu", "uuid"),
)
SM_ACTIVE = _gauge(
    name="stoker_gpu_sm_active_ratio",
    unit="ratio",
    help="Share of multiprocessors that had work, mean over the last interval; from GPM (Hopper or newer).",
    labels=_GPU,
)
TENSOR_ACTIVE = _gauge(
    name="stoker_gpu_tensor_active_ratio",
    unit="ratio",
    help="Share of time in which the tensor cores worked, mean over the multiprocessors; from GPM.",
    labels=_GPU,
)
DRAM_ACTIVE = _gauge(
    name="stoker_gpu_dram_active_ratio",
    unit="ratio",
    help="Share of the memory bandwidth in use; from GPM.",
    labels=_GPU,
)
KERNEL_RAN = _gauge(
    name="stoker_gpu_kernel_ran_ratio",
    unit="ratio",
    help="Share of time in which any kernel ran, even on a single multiprocessor: NVML's utilization.",
    labels=_GPU,
)
MEMORY_USED = _gauge(
    name="stoker_gpu_memory_used_bytes",
    unit="bytes",
    help="GPU memory in use by all processes.",
    labels=_GPU,
)
MEMORY = _gauge(
    name="stoker_gpu_memory_bytes", unit="bytes", help="Total memory of a GPU.", labels=_GPU
)
TEMPERATURE = _gauge(
    name="stoker_gpu_temperature_celsius",
    unit="celsius",
    help="Temperature of the GPU's die.",
    labels=_GPU,
)
POWER = _gauge(
    name="stoker_gpu_power_watts", unit="watts", help="Power that the card draws.", labels=_GPU
)
POWER_LIMIT = _gauge(
    name="stoker_gpu_power_limit_watts",
    unit="watts",
    help="Maximum power that the card may draw.",
    labels=_GPU,
)
CLOCK = _gauge(
    name="stoker_gpu_clock_hertz",
    unit="hertz",
    help="Clock of the multiprocessors (sm) and of the memory (memory).",
    labels=(*_GPU, "clock"),
)
THROTTLED = _gauge(
    name="stoker_gpu_throttled",
    unit="",
    help="1: the clocks are lowered for this reason now; 0: they are not.",
    labels=(*_GPU, "reason"),
)
ECC_ERRORS = _counter(
    name="stoker_gpu_ecc_errors_total",
    unit="",
    help="Memory errors since the driver was loaded, by kind: corrected or uncorrected.",
    labels=(*_GPU, "kind"),
)
XID = _gauge(
    name="stoker_gpu_xid",
    unit="",
    help="Number of the newest XID error since the writer of this metric started; 0: none.",
    labels=_GPU,
)
PCIE = _gauge(
    name="stoker_gpu_pcie_bytes_per_second",
    unit="bytes per second",
    help="Bytes per second that the GPU sends (tx) and receives (rx) over PCIe.",
    labels=(*_GPU, "direction"),
)
NVLINK = _gauge(
    name="stoker_gpu_nvlink_bytes_per_second",
    unit="bytes per second",
    help="Bytes per second that the GPU sends (tx) and receives (rx) over all NVLinks.",
    labels=(*_GPU, "direction"),
)
PROCESS_MEMORY = _gauge(
    name="stoker_gpu_process_memory_bytes",
    unit="bytes",
    help="GPU memory that a process holds; run and model are empty for other programs.",
    labels=("gpu", "uuid", "pid", "run", "model"),
)
SAMPLE_AGE = _gauge(
    name="stoker_exporter_last_sample_age_seconds",
    unit="seconds",
    help="Age of the newest GPU sample, or time since the start if no sample exists; absent without a driver.",
)

STOKER = (
    INFO,
    LOST,
    SM_ACTIVE,
    TENSOR_ACTIVE,
    DRAM_ACTIVE,
    KERNEL_RAN,
    MEMORY_USED,
    MEMORY,
    TEMPERATURE,
    POWER,
    POWER_LIMIT,
    CLOCK,
    THROTTLED,
    ECC_ERRORS,
    XID,
    PCIE,
    NVLINK,
    PROCESS_MEMORY,
    SAMPLE_AGE,
)
"""The metrics with Stoker's names."""

METRICS = (*STOKER, *dcgm.METRICS)
