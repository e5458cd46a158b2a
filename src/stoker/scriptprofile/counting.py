"""Counts a script's operations and measures its device's peak, in a separate process.

It runs after the script has ended, on the same cores and with the same settings as the script. Its command is
`python -m stoker.scriptprofile.counting REQUEST ANSWER`; both are JSON files, see `utilization`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.core.files import write_json

if TYPE_CHECKING:
    from stoker.measure.operation_tally import Tally
    from stoker.measure.peak_flops import PeakFlops

NOTHING: Mapping[str, Any] = {
    "operations": None,
    "no_operations": "",
    "notes": [],
    "peak_per_s": None,
    "peak_of": "",
    "no_peak": "",
    "on_cpu": "",
}
"""Result for a step about which nothing is known."""


def main(request: Path, answer: Path) -> None:
    """Answer a request.

    Args:
        request: JSON file with the script's device and its steps, as the watcher wrote them. The graphs of the
            steps are in the same folder.
        answer: JSON file that is written at the end.
    """
    job = json.loads(request.read_text())
    no_peak = _as_the_script(job["device"])
    steps = [_counted(step, request.parent) for step in job["steps"]]
    peaks: dict[str, PeakFlops | str] = {}
    figures = []
    for step, (tally, why) in zip(job["steps"], steps, strict=True):
        one = {**NOTHING, "no_operations": why}
        if tally is not None and job["device"]["gpus"]:
            one["on_cpu"] = on_the_cpu(tally.placed)
        if tally is not None and not why:
            kind = _main_type(tally)
            if kind not in peaks:
                peaks[kind] = no_peak or _peak(kind, seconds=job["peak_s"])
            one |= {"operations": tally.total, "notes": list(tally.notes)}
            one |= _reached(tally, peaks[kind])
        figures.append(one | {"device": _device(step.get("trace", {}), request.parent)})
    write_json(answer, {"steps": figures})


def _as_the_script(device: Mapping[str, Any]) -> str:
    """Configure this process like the script; return why the script's device cannot be measured here, or ""."""
    with suppress(OSError):
        # The kernel leaves out cores that this process may no longer use.
        os.sched_setaffinity(0, device.get("cores", ()))
    import tensorflow as tf

    if threads := device.get("intra_op_threads", 0):
        tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.experimental.enable_tensor_float_32_execution(device.get("tensor_float_32", True))
    gpus = len(tf.config.list_logical_devices("GPU"))
    if gpus != device["gpus"] and 0 in (gpus, device["gpus"]):
        return f"the script's TensorFlow saw {device['gpus']} GPUs, but Stoker's TensorFlow sees {gpus}"
    return ""


def _device(trace: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the time of the devices by kernel class, or why it is missing."""
    if "folder" not in trace:
        return {"why": trace.get("why", "")}
    from stoker.measure.device_events import TraceError
    from stoker.measure.device_trace import time_in

    files = sorted((folder / trace["folder"]).glob("plugins/profile/*/*.xplane.pb"))
    if not files:
        return {"why": "TensorFlow's profiler wrote no trace"}
    try:
        found = time_in(
            files[-1].read_bytes(), layers={name: kind for name, kind, *_ in trace["layers"]}
        )
    except (TraceError, OSError) as error:
        return {"why": str(error)}
    return {"time": found.to_json(), "why": ""}


def _counted(step: Mapping[str, Any], folder: Path) -> tuple[Tally | None, str]:
    """Return the count of a step's operations, and why it is unknown (or "")."""
    if "graph" not in step:
        return None, "its graph was not kept"
    import tensorflow as tf

    from stoker.measure.step_flops import count_step

    try:
        tally = count_step(step, folder)
    except (ValueError, TypeError, KeyError, RuntimeError, tf.errors.OpError) as error:
        # The graph is from another version of TensorFlow, or has operations of other libraries.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return None, f"its graph could not be read here: {lines[0][:200]}"
    if tally.unknown:
        more = f", and {len(tally.unknown) - 1} more" if len(tally.unknown) > 1 else ""
        return tally, f"{tally.unknown[0]}{more}"
    return tally, "" if tally.total else "the step has no products of matrices and no convolutions"


def _main_type(tally: Tally) -> str:
    """Return the dtype in which the largest number of operations is computed."""
    by_type: dict[str, int] = {}
    for (_, kind), operations in tally.work.items():
        by_type[kind] = by_type.get(kind, 0) + operations
    return max(by_type, key=lambda kind: by_type[kind])


def _peak(kind: str, *, seconds: float) -> PeakFlops | str:
    """Measure the device's peak for a dtype, or return why it is missing."""
    from stoker.measure.peak_flops import DTYPES, measure_peak_flops

    if kind not in DTYPES:
        return f"the peak for {kind} is not measured"
    return measure_peak_flops(kind, seconds=seconds)


def _reached(tally: Tally, peak: PeakFlops | str) -> dict[str, Any]:
    if isinstance(peak, str):
        return {"peak_per_s": None, "peak_of": "", "no_peak": peak}
    rates = {
        "convolutions": peak.convolutions_per_s,
        "products of matrices": peak.products_per_s,
    }
    counted = {
        name: sum(operations for (kind, _), operations in tally.work.items() if kind == name)
        for name in rates
    }
    counted = {name: operations for name, operations in counted.items() if operations}
    # The shortest possible time: each kind of operation runs at its own peak.
    min_s = sum(operations / rates[name] for name, operations in counted.items())
    return {
        "peak_per_s": sum(counted.values()) / min_s if min_s else None,
        "peak_of": f"{' and '.join(counted)} in {peak.dtype}",
        "no_peak": "",
    }


def on_the_cpu(nodes: Iterable[Any]) -> str:
    """Return a message about operations of a step that compute something and certainly run on the CPU; empty if none.

    Args:
        nodes: The nodes of the step's graph. Nodes run on the CPU if the script placed them there, or if their
            operation has no kernel for GPUs. All other nodes run on the GPU.
    """
    from stoker.train.health.step_operations import check_placement

    placed = []
    for node in nodes:
        copy = type(node)()
        copy.CopyFrom(node)
        if not node.device:
            copy.device = "CPU:0" if _only_on_the_cpu(node.op) else "GPU:0"
        placed.append(copy)
    finding = check_placement(placed)
    return "" if finding is None else finding.message


def _only_on_the_cpu(operation: str) -> bool:
    # In a TensorFlow built only for CPUs, no operation has a kernel for GPUs, not even MatMul.
    return "GPU" in _devices("MatMul") and _devices(operation) == {"CPU"}


@lru_cache(maxsize=4096)
def _devices(operation: str) -> frozenset[str]:
    """The types of devices for which an operation has kernels, without the device types of XLA."""
    from stoker.internals.tensorflow_internals import registered_devices

    return frozenset(device for device in registered_devices(operation) if "XLA" not in device)


if __name__ == "__main__":
    # Keep the messages that TensorFlow prints when it starts out of the log.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main(Path(sys.argv[1]), Path(sys.argv[2]))
