"""Model FLOP utilization (MFU) of a script's step: its operations per second, divided by the device's peak.

To leave the script undisturbed, a separate process (`counting`) counts the operations of a step and measures the peak
after the script's end. This module writes the request for this process and reads its answer.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stoker.cluster.processes import Child, ProcessOptions, last_line
from stoker.core.files import write_json
from stoker.core.signals import heard
from stoker.measure.device_time import DeviceTime
from stoker.scriptprofile.facts import WatchedProcess
from stoker.scriptprofile.loops import Loop
from stoker.scriptprofile.observations import Reached

PEAK_S = 4.0
"""Time for measuring the peak of a dtype, seconds: enough for a few rounds of each matrix size."""

LONGEST_S = 120.0
"""Time limit of the counting process, seconds: TensorFlow's start, the counting, and the peak."""

NO_GRAPH = "U was not measured, so the graph of the step was not kept"
"""Default reason why no operations were counted."""


def with_reached(
    processes: Sequence[WatchedProcess], facts: Path, *, peak_s: float = PEAK_S
) -> list[WatchedProcess]:
    """Return the processes with `reached` and the device times of their loops filled in.

    Args:
        processes: The watched processes, sorted by training steps, descending: only the first is measured.
        facts: The folder to which the watcher wrote.
        peak_s: Time for measuring the peak of a dtype, seconds.
    """
    found: list[WatchedProcess] = []
    for number, process in enumerate(processes):
        loops = [loop for loop in process.loops if "graph" in loop.step or "folder" in loop.trace]
        counted: Mapping[int, Loop] = {}
        if loops and number == 0:
            answers = _count(process, loops, facts, peak_s=peak_s)
            counted = dict(zip(map(id, loops), answers, strict=True))
        known = [counted.get(id(loop)) or _unknown(loop) for loop in process.loops]
        found.append(replace(process, loops=tuple(known)))
    return found


def _unknown(loop: Loop) -> Loop:
    """Return a loop whose step was not counted, with the reasons."""
    why = str(loop.trace.get("why", ""))
    return replace(loop, reached=Reached(no_operations=_why(loop)), no_device=why)


def _why(loop: Loop) -> str:
    if "graph" in loop.step:
        return "it is counted only for the process with most training steps"
    return str(loop.step.get("why", NO_GRAPH))


def _count(
    process: WatchedProcess, loops: Sequence[Loop], facts: Path, *, peak_s: float
) -> list[Loop]:
    """Return the loops with the results of the counting process, or with the reason why they are missing."""
    if find_spec("tensorflow") is None:
        why = "TensorFlow is not installed in Stoker's environment"
        return [_failed(loop, why) for loop in loops]
    request = facts / "counting.json"
    answer = facts / "counted.json"
    steps = [
        {
            **loop.step,
            "kind": loop.kind,
            "calls": loop.steps_per_execution,
            "trace": dict(loop.trace),
        }
        for loop in loops
    ]
    device = {**process.device, "gpus": process.gpus}
    write_json(request, {"device": device, "steps": steps, "peak_s": peak_s})
    failed = _run(request, answer)
    if failed:
        return [_failed(loop, failed) for loop in loops]
    answers = json.loads(answer.read_text())["steps"]
    return [_answered(loop, figures) for loop, figures in zip(loops, answers, strict=True)]


def _failed(loop: Loop, why: str) -> Loop:
    traced = "folder" in loop.trace
    return replace(loop, reached=Reached(no_operations=why), no_device=why if traced else "")


def _answered(loop: Loop, figures: dict[str, Any]) -> Loop:
    traced = figures.pop("device")
    if "graph" not in loop.step:
        figures["no_operations"] = _why(loop)
    return replace(
        loop,
        reached=Reached(**(figures | {"notes": tuple(figures["notes"])})),
        device=DeviceTime.from_json(traced["time"]) if "time" in traced else None,
        no_device=traced["why"],
    )


def _run(request: Path, answer: Path) -> str:
    """Run the counting process to its end; return why it gave no answer, or ""."""
    command = [sys.executable, "-m", "stoker.scriptprofile.counting", str(request), str(answer)]
    log = answer.with_suffix(".log")
    # The process has a session of its own, so Ctrl-C ends only the counting, and the profile is kept.
    child = Child("the counting of operations", command, ProcessOptions(output=log))
    with heard((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), lambda _: child.kill()):
        if not child.end(LONGEST_S):
            return f"counting its operations took more than {LONGEST_S:.0f} seconds"
    if (child.code or 0) < 0:
        return "a signal ended the counting of its operations"
    if child.code or not answer.is_file():
        printed = last_line(log) or "it printed nothing"
        return f"the counting of its operations failed: {printed[:200]}"
    return ""


def reached_json(loop: Loop) -> dict[str, Any]:
    """Return the part of profile.json about a loop's MFU."""
    split, reached = loop.split, loop.reached
    if split is None or reached is None:
        return {"mfu": None, "mfu_not_measured": "too few steps were measured" if reached else ""}
    return {
        "flops_a_step": reached.operations,
        "flops_notes": list(reached.notes),
        "achieved_flops_per_s": reached.achieved_per_s(split.step_s),
        "peak_flops_per_s": reached.peak_per_s,
        "peak_of": reached.peak_of,
        "mfu": reached.mfu(split.step_s),
        "mfu_not_measured": reached.why_none(),
    }


def reached_rows(loops: Sequence[Loop]) -> Iterator[tuple[str, str]]:
    """Yield a row about each loop's MFU for the user: a name, and the figure or why it is missing."""
    for loop in loops:
        split, reached = loop.split, loop.reached
        if split is None or reached is None:
            continue
        name, mfu = f"MFU in {loop.place}", reached.mfu(split.step_s)
        achieved = reached.achieved_per_s(split.step_s)
        if mfu is not None and achieved is not None and reached.peak_per_s is not None:
            rates = f"{_giga(achieved)} of {_giga(reached.peak_per_s)} GFLOP/s"
            notes = "".join(f"; {note}" for note in reached.notes)
            yield name, f"{100 * mfu:.2g}%: {rates}, the peak of {reached.peak_of} here{notes}"
        else:
            yield name, f"not measured: {reached.why_none()}"


def _giga(per_s: float) -> str:
    rate = per_s / 1e9
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.2g}"
