"""Metrics of a machine, for alerts where no node_exporter runs; written by `stoker monitor exporter`."""

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
    help="Number of threads that run, or wait for a core or a disk; mean over the last minute.",
)
CORES = _gauge(name="stoker_host_cores", unit="", help="Cores of the machine.")
DISK = _gauge(
    name="stoker_host_disk_bytes",
    unit="bytes",
    help="Size of the file system that contains the folder.",
    labels=("folder",),
)
DISK_FREE = _gauge(
    name="stoker_host_disk_free_bytes",
    unit="bytes",
    help="Space left for users on the file system that contains the folder.",
    labels=("folder",),
)

METRICS = (MEMORY, MEMORY_AVAILABLE, LOAD, CORES, DISK, DISK_FREE)
