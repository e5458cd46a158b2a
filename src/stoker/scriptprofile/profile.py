"""The profile of a script: `ScriptProfile`."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from stoker.scriptprofile.input_stages import StageCost
from stoker.scriptprofile.loops import InnerLoop, Loop, StepSplit
from stoker.scriptprofile.observations import BUSY
from stoker.scriptprofile.rules.finding import ScriptFinding
from stoker.scriptprofile.utilization import reached_json, reached_rows

GIB = 2**30
"""One GiB, bytes."""

BY_SIGNAL = 128
"""The exit code of a process that a signal ended is this plus the signal's number, as in shells."""

Ending = Literal["itself", "time", "signal"]
"""Why the script ended: by itself; because the time of `--seconds` was over; or because Stoker received a signal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptProfile:
    """One watched run of a command."""

    command: tuple[str, ...]
    """The command and its arguments."""

    exit_code: int
    """The command's exit code; 128 plus the signal's number if a signal ended it, as in a shell."""

    ended_by: Ending
    """What ended the command."""

    wall_s: float
    """Duration of the command, seconds."""

    tensorflow: str
    """TensorFlow's version; empty if it was not imported."""

    keras: str
    """Keras's version; empty if it was not imported."""

    backend: str
    """Keras's backend: `tensorflow`, `jax`, `torch`; empty if Keras was not imported."""

    gpus: int
    """Number of GPUs that TensorFlow saw."""

    peak_memory_bytes: int
    """Peak host memory of a single watched process; 0 if none was watched."""

    gpu_peak_bytes: tuple[int, ...]
    """Peak memory that TensorFlow used on each GPU, in the process with the highest peak."""

    gpu_states: tuple[Mapping[str, Any], ...]
    """Figures from NVML for each GPU of this machine over the whole run: `index`, `name`, the means of
    `utilization`, `power_w` and `clock_mhz`, and the maximum of `used_bytes`."""

    loops: tuple[Loop, ...]
    """The training loops of all processes."""

    findings: tuple[ScriptFinding, ...]
    """The finding about device time first, then the others by the share of the script's time that they may save."""

    minor: tuple[ScriptFinding, ...]
    """Findings with little effect here, each with the reason for that."""

    failures: tuple[str, ...]
    """Errors of the watcher itself, which did not affect the script."""

    time_parts: tuple[tuple[str, float], ...] = ()
    """Name and share of each part of the wall time, largest first, for the process with most training steps."""

    waited: float = 0.0
    """Share of the time, in [0, 1], in which threads of that process waited for a core that another program used;
    the time is that in which they ran or could have run."""

    time_lines: tuple[Mapping[str, Any], ...] = ()
    """Wall time of that process by line: `kind`, `file`, `line`, `wall_s`, `cpu_s`, `calls`."""

    @property
    def failed(self) -> bool:
        """Whether the script ended by itself with an error."""
        return self.ended_by == "itself" and self.exit_code != 0

    def ending(self) -> str:
        """How the command ended, as a clause."""
        code = f"exit code {self.exit_code}"
        if self.failed:
            number = self.exit_code - BY_SIGNAL
            name = signal.Signals(number).name if number in set(signal.Signals) else ""
            by = f", from {name}" if name else ""
            return f"the script failed: {code}{by}; all of the following was seen before that"
        how = {"time": ", ended by --seconds", "signal": ", ended by a signal"}
        return code + how.get(self.ended_by, "")

    def note(self) -> str:
        """Why nothing was observed, a clause; empty if something was observed."""
        if not self.loops and self.backend not in ("", "tensorflow"):
            return (
                f"Keras runs on {self.backend} here, but only training with TensorFlow is watched (unset "
                "KERAS_BACKEND, or set it to tensorflow)"
            )
        if not self.tensorflow and self.failed:
            return "it failed before it imported TensorFlow: nothing was measured"
        if not self.tensorflow:
            return (
                "TensorFlow was not imported (or Python was started with -E, -I or -S, which disables "
                "the watcher)"
            )
        if not self.loops and self.failed:
            return "it failed before a training step had ended: nothing was measured"
        if not self.loops:
            return "no training was seen: no model.fit, and no loop that computes gradients"
        return ""

    def name_of(self, loop: Loop) -> str:
        """`model.fit in train.py:12`, and the process if there are several."""
        several = len({each.pid for each in self.loops}) > 1
        process = f" (process {loop.pid})" if several else ""
        same = [each for each in self.loops if (each.place, each.pid) == (loop.place, loop.pid)]
        # Several loops in one line train different models, e.g. one for each fold or each trial of a search.
        model = f" of {loop.model['name']}" if len(same) > 1 and "name" in loop.model else ""
        return f"{loop.title} in {loop.place}{model}{process}"

    def nothing_found(self) -> str:
        """The text for a script without a finding."""
        if self.minor:
            return "None of the known causes costs enough time here to be a finding."
        return "None of the known causes of slow training was found."

    def machine(self) -> list[tuple[str, str]]:
        """Rows about MFU, device time, wall time, memory and GPUs: name and figure."""
        rows = []
        if self.time_parts:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in self.time_parts)
            rows.append(("wall time", shares))
        if self.waited >= BUSY:
            waited = (
                f"threads of this process waited for a core for {self.waited:.0%} of their time"
            )
            rows.append(("the machine was busy with other work", waited))
        if self.peak_memory_bytes:
            rows.append(("memory", f"{self.peak_memory_bytes / GIB:.2f} GiB, a process's peak"))
        for index, peak in enumerate(self.gpu_peak_bytes):
            rows.append((f"TensorFlow on GPU {index}", f"{peak / GIB:.2f} GiB, peak"))
        for gpu in self.gpu_states:
            figures = (
                f"{gpu['utilization']:.0%} busy, {gpu['used_bytes'] / GIB:.1f} GiB",
                f"{gpu['power_w']:.0f} W, {gpu['clock_mhz']:.0f} MHz, over the whole run",
            )
            rows.append((f"GPU {gpu['index']} ({gpu['name']})", ", ".join(figures)))
        return [*reached_rows(self.loops), *_device_rows(self.loops), *rows]

    def to_json(self) -> dict[str, Any]:
        """Return the content of `--json` and profile.json; times in seconds, shares in [0, 1]."""
        return {
            "command": list(self.command),
            "exit_code": self.exit_code,
            "failed": self.failed,
            "ended_by": self.ended_by,
            "wall_s": self.wall_s,
            "versions": {"tensorflow": self.tensorflow, "keras": self.keras},
            "keras_backend": self.backend,
            "gpus": self.gpus,
            "memory": {
                "process_peak_bytes": self.peak_memory_bytes or None,
                "gpu_peak_bytes": list(self.gpu_peak_bytes),
            },
            "gpu_states": [dict(state) for state in self.gpu_states],
            "note": self.note(),
            "waited_for_other_programs": self.waited,
            "wall_time": {
                "shares": dict(self.time_parts),
                "lines": [dict(each) for each in self.time_lines],
            },
            "loops": [_loop(loop) for loop in self.loops],
            "findings": [finding.to_json() for finding in self.findings],
            "minor_findings": [finding.to_json() for finding in self.minor],
            "watcher_failures": list(self.failures),
        }

    def shown_command(self) -> str:
        """The command in the syntax of a shell."""
        return shlex.join(self.command)


def _device_rows(loops: Sequence[Loop]) -> Iterator[tuple[str, str]]:
    """Rows about device time for the user; in each, the largest kernel class comes first."""
    for loop in loops:
        if loop.device is not None:
            shares = sorted(loop.device.rows(), key=lambda row: -row[1])
            of_cpu = " (operations of the CPU)" if loop.device.of_cpu else ""
            text = ", ".join(f"{label} {share:.0%}" for label, share in shares)
            yield f"device time in {loop.place}", text + of_cpu
        elif loop.no_device:
            yield f"device time in {loop.place}", f"not measured: {loop.no_device}"


def _loop(loop: Loop) -> dict[str, Any]:
    starts = loop.epoch_starts
    return {
        "kind": loop.kind,
        "pid": loop.pid,
        "file": loop.place.file,
        "line": loop.place.line,
        "passes": loop.passes,
        "steps": loop.steps,
        "epoch_start_s": None if starts is None else starts.each_s,
        "epoch_start_share": None if starts is None else starts.share,
        "batch_rows": loop.rows or None,
        "steps_a_call": (loop.batches or None) if isinstance(loop, InnerLoop) else None,
        "first_steps_s": loop.first_s,
        "watched_extra_s": loop.measuring_s,
        "step": _split(loop.split),
        **reached_json(loop),
        "device_time": None if loop.device is None else loop.device.to_json(),
        "device_time_not_measured": loop.no_device,
        "stages": [_stage(cost) for cost in loop.costs],
        "rounds": [dict(each) for each in loop.rounds],
        "timeline": [list(row) for row in loop.timeline],
    }


def _split(split: StepSplit | None) -> Mapping[str, Any] | None:
    if split is None:
        return None
    return {
        "step_s": split.step_s,
        "parts_s": dict(split.parts),
        "input_wait": split.input_wait,
        "python": split.python,
        "busy_fraction": split.busy,
        "busy_not_measured": split.no_busy,
        "input_wait_not_measured": split.no_wait,
    }


def _stage(cost: StageCost) -> dict[str, Any]:
    return {
        "name": cost.name,
        "file": cost.place.file if cost.place else None,
        "line": cost.place.line if cost.place else None,
        "cpu_s_per_sample": cost.cpu_s_per_sample,
        "share": cost.share,
    }
