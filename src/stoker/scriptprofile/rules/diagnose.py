"""Applies all rules; each line is reported once."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

from stoker.cluster.limits import usable_memory
from stoker.scriptprofile.facts import WatchedProcess
from stoker.scriptprofile.loops import Loop
from stoker.scriptprofile.observations import BUSY
from stoker.scriptprofile.rules.finding import DEVICE_TIME, ScriptFinding
from stoker.scriptprofile.rules.input_rules import Machine, input_findings
from stoker.scriptprofile.rules.low_impact import minor_findings
from stoker.scriptprofile.rules.step_rules import function_findings, step_findings
from stoker.scriptprofile.rules.wait_rules import bound_findings, feed_findings
from stoker.scriptprofile.rules.wall_rules import MIN_LOOP, share_of_script, wall_findings

NOT_ABOUT_SPEED = ("shuffle_memory", "float64_data")
"""Findings about an input that do not explain a wait for it."""


BY_COUNT = {
    "eager_loop", "retracing", "float64_data", "float64_model", "outside_scope", "host_sync",
    "one_gpu_of_several", "xla_not_used", "tensor_core_shapes", "cpu_op",
}  # fmt: skip
"""Findings that do not depend on durations."""


def this_machine() -> Machine:
    """The cores and memory that this process may use."""
    return Machine(cores=len(os.sched_getaffinity(0)), memory_bytes=usable_memory())


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosed:
    """All findings about the watched processes."""

    findings: tuple[ScriptFinding, ...]
    """The finding about device time first, then the others by the share of the script's time that they may save."""

    minor: tuple[ScriptFinding, ...]
    """Findings with little effect here."""


def diagnose(processes: Iterable[WatchedProcess], machine: Machine) -> Diagnosed:
    """Return all findings; a finding about the same line in several processes is returned once."""
    processes = list(processes)
    found = _once(finding for process in processes for finding in _of_process(process, machine))
    minor = _once(
        finding
        for process in processes
        for loop in process.loops
        for finding in minor_findings(loop, found)
    )
    return Diagnosed(
        findings=tuple(sorted(found, key=_weight)),
        minor=tuple(minor),
    )


def _weight(finding: ScriptFinding) -> tuple[bool, float]:
    """Sort key: the finding about device time first, then by the largest possible saving of the script's time."""
    saved = 1.0 - 1.0 / finding.gain[1] if finding.gain else 0.0
    return finding.kind != DEVICE_TIME, -finding.of_script * saved


def _once(findings: Iterable[ScriptFinding]) -> list[ScriptFinding]:
    found: dict[tuple[str, str, int], ScriptFinding] = {}
    for finding in findings:
        found.setdefault((finding.kind, finding.place.file, finding.place.line), finding)
    return list(found.values())


def _of_process(process: WatchedProcess, machine: Machine) -> Iterable[ScriptFinding]:
    for finding in _found(process, machine):
        by_time = finding.gain is not None and finding.kind not in BY_COUNT
        yield replace(finding, sure="possible") if by_time and process.waited >= BUSY else finding


def _found(process: WatchedProcess, machine: Machine) -> Iterable[ScriptFinding]:
    yield from wall_findings(process)
    for loop in process.loops:
        share = share_of_script(loop, process)
        for each in _of_loop(loop, process, machine):
            # For a loop that takes almost no time, only findings that are not about speed are reported.
            if each.gain is None or share >= MIN_LOOP:
                yield replace(each, of_script=share)
    yield from function_findings(process)


def _of_loop(loop: Loop, process: WatchedProcess, machine: Machine) -> Iterable[ScriptFinding]:
    yield from step_findings(loop, process)
    about_input = [
        *input_findings(loop, machine),
        *feed_findings(loop, cores=machine.cores),
    ]
    yield from about_input
    if all(each.kind in NOT_ABOUT_SPEED for each in about_input):
        yield from bound_findings(loop)
