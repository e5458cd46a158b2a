"""Adds up the wall time of a run over all of its processes, and stores it in a file.

A thread writes the file once a second, so even a killed process has recorded its time, except for the last second.
Each write overwrites the file in place and is not flushed to the disk: a power cut can lose this account, but no work.
If the file is incomplete or damaged, it is ignored, and the run's account begins with this process.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from stoker.core.incarnation import is_newest, own_incarnation
from stoker.telemetry.account import FORMAT, read_earlier
from stoker.telemetry.processes import Moment, end_of, now
from stoker.telemetry.wall_time import NAMES, REPEATED, STEPS, WallTime, goodput

WRITE_EVERY_S = 1.0
"""Pause between two writes of the file, seconds."""

KILLED = "killed"
"""Cause of a restart if the earlier process did not record its end."""

FILE_BYTES = 4096
"""Size of the file, bytes: its content is padded with spaces, so that each write covers the previous one."""


class RunTime:
    """Adds this process's wall time to that of earlier processes.

    Use it as a context manager: the file is kept up to date while it is open.
    """

    def __init__(self, wall: WallTime | None = None, path: Path | None = None) -> None:
        """Read the account of earlier processes.

        Args:
            wall: The wall time of this process; by default, it begins now.
            path: File of the run; None: nothing is stored.
        """
        self.wall = wall or WallTime()
        self._path = path
        before = read_earlier(path)
        self._before: dict[str, float] = before["parts"]
        self._processes: int = before["processes"] + 1
        self._repeated: int = before["repeated_steps"]
        self._last_step: int = before["step"]
        self._waited_before_s: float = before["input_wait_s"]
        self._waited_s = 0.0
        self._restarts: dict[str, int] = before["restarts"]
        self._between_s: float = before["waiting_s"]
        self._end = ""
        if before["processes"]:
            self._follow(before["alive"], before["end"])
        self._first: tuple[int, float, float] | None = None
        # Until training starts, keep the step of the last process: if this process is killed, it must not be lost.
        self._step, self._done = self._last_step, 0
        self._over = threading.Event()
        self._file = -1
        self._thread: threading.Thread | None = None

    def begin(self, step: int) -> None:
        """Record that training starts, or resumes, after this many steps.

        The work that the previous process did after this step is lost and is done again.
        """
        lost = max(0, self._last_step - step)
        if lost and self._last_step:
            self._repeated += lost
            part = min(1.0, lost / self._last_step)
            self._before[REPEATED] += part * self._before[STEPS]
            self._before[STEPS] *= 1.0 - part
            self._waited_before_s *= 1.0 - part
        self._step = step

    def stepped(self, steps: int, wall_s: float, *, step: int, wait_s: float, first: bool) -> None:
        """Record a call that ran some steps.

        Args:
            steps: Number of steps in the call.
            wall_s: Duration of the call, seconds.
            step: Total number of steps done so far.
            wait_s: Time that the call waited for input, seconds.
            first: Whether a program was compiled during the call. All of its time counts as `compile`, until a
                later call shows how long its steps took.
        """
        self._step = step
        self._done += steps
        if first:
            self.settle(0.0, waiting=0.0)
            self._first = (steps, wall_s, wait_s)
            return
        self._waited_s += wait_s
        if steps:
            self.settle(wall_s / steps, waiting=wait_s / wall_s if wall_s else 0.0)

    def went_back(self, step: int) -> None:
        """Record that the run went back to an earlier step: the steps after it are done again."""
        lost = max(0, self._step - step)
        if lost and self._done:
            part = min(1.0, lost / self._done)
            self.wall.move(STEPS, REPEATED, part * self.wall.parts()[STEPS])
            self._waited_s *= 1.0 - part
            self._repeated += lost
            self._done -= min(lost, self._done)
        self._step = step

    def settle(self, step_s: float, *, waiting: float) -> None:
        """Split the time of a call with `first` into `steps`, `data` (its additional wait for input), and `compile`.

        Args:
            step_s: Time of a step, seconds.
            waiting: The share of a step's time that waits for input.
        """
        first, self._first = self._first, None
        if first is not None:
            steps, wall_s, wait_s = first
            of_steps_s = min(wall_s, steps * step_s)
            waited_s = min(wait_s, of_steps_s * waiting)
            self._waited_s += waited_s
            self.wall.move("compile", STEPS, of_steps_s)
            self.wall.move("compile", "data", min(wait_s - waited_s, wall_s - of_steps_s))

    @property
    def goodput(self) -> float | None:
        """Share of the training's wall time, over all processes of the run, in steps that were not repeated."""
        return goodput(self._of_run())

    def report(self) -> dict[str, Any]:
        """The account of this process and of the run so far, as JSON values."""
        process, run = self.wall.parts(), self._of_run()
        return {
            "process": {
                "wall_s": sum(process.values()),
                "parts": process,
                "input_wait_s": self._waited_s,
            },
            "run": {
                "wall_s": sum(run.values()),
                "parts": run,
                "processes": self._processes,
                "repeated_steps": self._repeated,
                "input_wait_s": self._waited_before_s + self._waited_s,
                "waiting_s": self._between_s,
                "restarts": dict(self._restarts),
            },
        }

    def __enter__(self) -> Self:
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._open(self._path)
        if self._file >= 0:
            self._thread = threading.Thread(target=self._keep, name="run-time", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end = end_of(error)
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._write()
            os.close(self._file)
            self._file = -1

    def _follow(self, alive: Moment | None, end: str) -> None:
        """Count a restart, and the time since the earlier process was last alive."""
        # If the earlier process recorded no end, it was killed, or its machine failed.
        cause = end or KILLED
        self._restarts[cause] = self._restarts.get(cause, 0) + 1
        if alive is not None:
            running_s = sum(self.wall.parts().values())
            self._between_s += max(0.0, now().since(alive) - running_s)

    def _of_run(self) -> dict[str, float]:
        now = self.wall.parts()
        return {name: self._before[name] + now[name] for name in NAMES}

    def _keep(self) -> None:
        while not self._over.wait(WRITE_EVERY_S):
            self._write()

    def _open(self, path: Path) -> None:
        if own_incarnation() is None:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)
            if os.fstat(self._file).st_size > FILE_BYTES:
                # the file is damaged, and a write would not cover all of it
                os.ftruncate(self._file, 0)
            return
        # In a job, always create a new file: an earlier start of the job may still have the old file open.
        made = path.with_name(f".{path.name}.tmp")
        self._file = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._write()
        if is_newest():
            os.replace(made, path)

    def _write(self) -> None:
        if not is_newest():
            return
        text = json.dumps(
            {
                "format": FORMAT,
                "parts": self._of_run(),
                "processes": self._processes,
                "repeated_steps": self._repeated,
                "input_wait_s": self._waited_before_s + self._waited_s,
                "step": self._step,
                "waiting_s": self._between_s,
                "restarts": self._restarts,
                "alive": asdict(now()),
                "end": self._end,
            },
            indent=1,
        )
        with contextlib.suppress(OSError):
            os.pwrite(self._file, text.encode().ljust(FILE_BYTES - 1) + b"\n", 0)


def seconds_of_run(report: Mapping[str, Any]) -> dict[str, float]:
    """Return part -> seconds over all processes of the run; a part that the report does not have is 0."""
    return {name: float(report["run"]["parts"].get(name, 0.0)) for name in NAMES}


def until_now(report: Mapping[str, Any], wall: WallTime) -> dict[str, Any]:
    """Return a copy of a report, to which the time since the report was made is added.

    Args:
        report: A report that `RunTime.report` made in this process.
        wall: The wall time of this process.
    """
    process, before = wall.parts(), report["process"]["parts"]
    own = report["process"]
    run = {name: report["run"]["parts"][name] + process[name] - before[name] for name in NAMES}
    return {
        "process": {**own, "wall_s": sum(process.values()), "parts": process},
        "run": {**report["run"], "wall_s": sum(run.values()), "parts": run},
    }
