"""The few metrics of a machine that alerts need if no node_exporter runs: `stoker monitor exporter`."""

from __future__ import annotations

from functools import partial

from stoker.telemetry.catalogue.metric import Kind, Metric, Writer

_gauge = partial(Metric, kind=Kind.GAUGE, writer=Writer.EXPORTER)

MEMORY = _gauge(name="stoker_host_memory_bytes", unit="bytes", help="Memory of the machine.")
MEMORY_AVAILABLE = _gauge(
    name="stoker_host_memory_available_bytes",
    unit="bytes",
    help="Memory that programs can still get without swapping.",
)
LOAD = _gauge(
    name="stoker_host_load",
    unit="",
    help="Threads that ran or waited for a core or a disk, mean over a minute.",
)
CORES = _gauge(name="stoker_host_cores", unit="", help="Cores of the machine.")
DISK = _gauge(
    name="stoker_host_disk_bytes",
    unit="bytes",
    help="Size of the file system that holds a folder.",
    labels=("folder",),
)
DISK_FREE = _gauge(
    name="stoker_host_disk_free_bytes",
    unit="bytes",
    help="Space that users can still write on the file system that holds a folder.",
    labels=("folder",),
)

METRICS = (MEMORY, MEMORY_AVAILABLE, LOAD, CORES, DISK, DISK_FREE)
