"""Metrics of GPUs, by `stoker monitor exporter` and by each training and server for the GPUs that it uses."""

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
    help="Always 1: product, MIG profile, address on the bus and driver of a GPU or MIG slice.",
    labels=(*_GPU, "name", "profile", "pci", "driver"),
)
LOST = _gauge(
    name="stoker_gpu_lost",
    unit="",
    help="1: the GPU fell off the bus or works again only after a reset, and has no other metrics.",
    labels=("gpu", "uuid"),
)
SM_ACTIVE = _gauge(
    name="stoker_gpu_sm_active_ratio",
    unit="ratio",
    help="Multiprocessors that had work, mean over the last interval; by GPM, so Hopper or newer.",
    labels=_GPU,
)
TENSOR_ACTIVE = _gauge(
    name="stoker_gpu_tensor_active_ratio",
    unit="ratio",
    help="Time in which the tensor cores worked, mean over the multiprocessors; by GPM.",
    labels=_GPU,
)
DRAM_ACTIVE = _gauge(
    name="stoker_gpu_dram_active_ratio",
    unit="ratio",
    help="Memory bandwidth in use, by GPM.",
    labels=_GPU,
)
KERNEL_RAN = _gauge(
    name="stoker_gpu_kernel_ran_ratio",
    unit="ratio",
    help="Time in which some kernel ran, even one on a single multiprocessor: NVML's utilization.",
    labels=_GPU,
)
MEMORY_USED = _gauge(
    name="stoker_gpu_memory_used_bytes",
    unit="bytes",
    help="Memory of a GPU in use, by all processes.",
    labels=_GPU,
)
MEMORY = _gauge(name="stoker_gpu_memory_bytes", unit="bytes", help="Memory of a GPU.", labels=_GPU)
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
    help="Power that the card may draw.",
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
    help="1: clocks are lower than possible for this reason, now.",
    labels=(*_GPU, "reason"),
)
ECC_ERRORS = _counter(
    name="stoker_gpu_ecc_errors_total",
    unit="",
    help="Memory errors since the driver was loaded: corrected and uncorrected.",
    labels=(*_GPU, "kind"),
)
XID = _gauge(
    name="stoker_gpu_xid",
    unit="",
    help="Number of the newest XID error since the exporter started; 0: none.",
    labels=_GPU,
)
PCIE = _gauge(
    name="stoker_gpu_pcie_bytes_per_second",
    unit="bytes per second",
    help="Sent (tx) and received (rx) by the GPU over PCIe.",
    labels=(*_GPU, "direction"),
)
NVLINK = _gauge(
    name="stoker_gpu_nvlink_bytes_per_second",
    unit="bytes per second",
    help="Sent (tx) and received (rx) by the GPU over all NVLinks.",
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
    help="Age of the newest GPU sample, or time without one; absent on a machine without a driver.",
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
"""By Stoker's names."""

METRICS = (*STOKER, *dcgm.METRICS)
