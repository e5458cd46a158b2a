"""Metrics of GPUs with dcgm-exporter's names, units and labels; written by `stoker monitor exporter --dcgm-names`.

Source: dcgm-exporter, default-counters.csv, and the template of its exposition.
"""

from __future__ import annotations

from stoker.telemetry.catalogue.metric import Kind, Metric, Writer

LABELS = (
    "gpu",
    "UUID",
    "pci_bus_id",
    "device",
    "modelName",
    "GPU_I_PROFILE",
    "GPU_I_ID",
    "Hostname",
)
"""Names of the labels; the two that begin with GPU_I exist only for MIG slices."""


def _metric(name: str, help_text: str, *, unit: str, kind: Kind = Kind.GAUGE) -> Metric:
    return Metric(
        name=f"DCGM_FI_{name}",
        kind=kind,
        unit=unit,
        help=help_text,
        writer=Writer.EXPORTER,
        labels=LABELS,
    )


SM_CLOCK = _metric("DEV_SM_CLOCK", "SM clock frequency (in MHz).", unit="MHz")
MEM_CLOCK = _metric("DEV_MEM_CLOCK", "Memory clock frequency (in MHz).", unit="MHz")
MEMORY_TEMP = _metric("DEV_MEMORY_TEMP", "Memory temperature (in C).", unit="celsius")
GPU_TEMP = _metric("DEV_GPU_TEMP", "GPU temperature (in C).", unit="celsius")
POWER_USAGE = _metric("DEV_POWER_USAGE", "Power draw (in W).", unit="watts")
ENERGY = _metric(
    "DEV_TOTAL_ENERGY_CONSUMPTION",
    "Total energy consumption since boot (in mJ).",
    unit="mJ",
    kind=Kind.COUNTER,
)
PCIE_REPLAY = _metric(
    "DEV_PCIE_REPLAY_COUNTER", "Total number of PCIe retries.", unit="", kind=Kind.COUNTER
)
GPU_UTIL = _metric("DEV_GPU_UTIL", "GPU utilization (in %).", unit="%")
MEM_COPY_UTIL = _metric("DEV_MEM_COPY_UTIL", "Memory utilization (in %).", unit="%")
XID_ERRORS = _metric("DEV_XID_ERRORS", "Value of the last XID error encountered.", unit="")
FB_FREE = _metric("DEV_FB_FREE", "Framebuffer memory free (in MiB).", unit="MiB")
FB_USED = _metric("DEV_FB_USED", "Framebuffer memory used (in MiB).", unit="MiB")
NVLINK = _metric(
    "DEV_NVLINK_BANDWIDTH_TOTAL",
    "Total number of NVLink bandwidth counters for all lanes.",
    unit="KiB",
    kind=Kind.COUNTER,
)
GR_ENGINE_ACTIVE = _metric(
    "PROF_GR_ENGINE_ACTIVE", "Ratio of time the graphics engine is active.", unit="ratio"
)
PIPE_TENSOR_ACTIVE = _metric(
    "PROF_PIPE_TENSOR_ACTIVE", "Ratio of cycles the tensor (HMMA) pipe is active.", unit="ratio"
)
DRAM_ACTIVE = _metric(
    "PROF_DRAM_ACTIVE",
    "Ratio of cycles the device memory interface is active sending or receiving data.",
    unit="ratio",
)
PCIE_TX = _metric(
    "PROF_PCIE_TX_BYTES",
    "The rate of data transmitted over the PCIe bus - including both protocol headers and data "
    "payloads - in bytes per second.",
    unit="bytes per second",
)
PCIE_RX = _metric(
    "PROF_PCIE_RX_BYTES",
    "The rate of data received over the PCIe bus - including both protocol headers and data "
    "payloads - in bytes per second.",
    unit="bytes per second",
)

METRICS = (
    SM_CLOCK,
    MEM_CLOCK,
    MEMORY_TEMP,
    GPU_TEMP,
    POWER_USAGE,
    ENERGY,
    PCIE_REPLAY,
    GPU_UTIL,
    MEM_COPY_UTIL,
    XID_ERRORS,
    FB_FREE,
    FB_USED,
    NVLINK,
    GR_ENGINE_ACTIVE,
    PIPE_TENSOR_ACTIVE,
    DRAM_ACTIVE,
    PCIE_TX,
    PCIE_RX,
)
