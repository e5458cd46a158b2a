"""Runs commands as steps, each with a log file and a timeout that kills its process tree."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

MARK = "STOKER_STEP"
"""Environment variable that marks every process of a step, however it was started."""

GRACE_S = 2.0
"""Time between SIGTERM and SIGKILL, seconds."""

Status = Literal["passed", "failed", "timed out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One command."""

    name: str
    argv: tuple[str, ...]
    timeout_s: float
    """After this many seconds, the step and all of its processes are killed."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Added to this process's environment."""

    passing: tuple[int, ...] = (0,)
    """Exit codes that mean success."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Value of `MARK` in the environment of its processes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """How a step ended."""

    name: str
    status: Status
    exit_code: int
    wall_s: float
    timeout_s: float
    log: str
    """Path of the file with all its output."""

    def line(self) -> str:
        """One line for the user."""
        return f"{self.status:10} {self.name:24} {self.wall_s:6.1f} of {self.timeout_s:.0f} s"


def run_step(step: Step, log: Path) -> StepResult:
    """Run one step to its end or its timeout.

    Args:
        step: The command.
        log: File for its output; no pipe is used, so the output is kept.
    """
    began_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            step.argv,
            env=os.environ | dict(step.env) | {MARK: step.mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    status: Status
    try:
        code = process.wait(step.timeout_s)
        status = "passed" if code in step.passing else "failed"
    except subprocess.TimeoutExpired:
        status = "timed out"
    finally:
        # Also after a normal end: processes that it left running would share the GPU with the next
        # step.
        end_marked(step.mark)
        code = process.wait()
    return StepResult(
        name=step.name,
        status=status,
        exit_code=code,
        wall_s=time.monotonic() - began_s,
        timeout_s=step.timeout_s,
        log=str(log),
    )


def run_steps(
    steps: Sequence[Step],
    folder: Path,
    *,
    at_once: int,
    on_end: Callable[[StepResult], None],
) -> list[StepResult]:
    """Run steps, several at a time; `on_end` is called in this thread as each one ends."""
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    with ThreadPoolExecutor(at_once) as pool:
        jobs = [pool.submit(run_step, step, folder / f"{step.name}.log") for step in steps]
        for job in jobs:
            results.append(job.result())
            on_end(results[-1])
    return results


def end_marked(mark: str) -> None:
    """End every process that carries this mark: SIGTERM, then SIGKILL until none is left."""
    pids = marked(mark)
    _send(pids, signal.SIGTERM)
    until_s = time.monotonic() + GRACE_S
    while pids and time.monotonic() < until_s:
        time.sleep(0.05)
        pids = marked(mark)
    # A process that starts while the others are killed is found in the next pass.
    while pids := marked(mark):
        _send(pids, signal.SIGKILL)
        time.sleep(0.05)


def marked(mark: str) -> list[int]:
    """Live processes whose environment contains the mark; a zombie has no environment."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in Path(entry.path, "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def _send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
