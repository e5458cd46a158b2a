"""One task of a job, which runs one `stoker` command.

The task finds its rank, unpacks the code, exchanges addresses with the other tasks, runs the command with `TF_CONFIG`,
forwards signals to the command, and writes the command's output to a log. The protocol is described in
docs/reference/job-task.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from stoker.app.experiment import FILE, path_overrides
from stoker.app.task.job_code import unpack_code
from stoker.app.task.job_log import TaskLog
from stoker.app.task.job_start import require_job
from stoker.cluster.addresses import (
    INTERFACE,
    LONGEST_S,
    Announcement,
    agreed_cluster,
    announce,
    gather,
    machine_name,
    own_address,
)
from stoker.cluster.launch.member import FD_VARIABLE
from stoker.cluster.place import RANK, TASKS, find_place
from stoker.cluster.processes import Child, Lines, ProcessOptions, how_it_ended
from stoker.cluster.resolver import VARIABLE, held_ports
from stoker.core.errors import (
    EXIT_BUG,
    EXIT_DONE,
    EXIT_PREEMPTED,
    ConfigError,
    DataError,
    Plain,
    Superseded,
    UserError,
)
from stoker.core.incarnation import INCARNATIONS, Incarnation
from stoker.core.signals import ASKING, end_at_once, heard
from stoker.jobs.archive import Code
from stoker.jobs.job import Job, read_job

LOGS = "logs"
"""Folder of the tasks' logs, in the job's folder."""

WAIT_VARIABLE = "STOKER_TASKS_WAIT_S"
"""Environment variable: maximum time that a task waits for the other tasks, seconds."""

WATCH_S = 5.0
"""Interval at which a task checks for a later start of the job, seconds."""

ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - TensorFlow's server listens on all; a reserved port does not
"""Address on which a port is reserved until TensorFlow uses it: all interfaces."""


def run_task(place: Path, number: int, *, out: IO[str]) -> int:
    """Run one task of one start of a job, and return the exit code of its command.

    Args:
        place: The job's folder.
        number: Number of the start, from `start_job`.
        out: Receives the output of the command.

    Returns:
        0: done; 75: saved after a request to end; 1: all tasks must start again; 2 or 3: the user must fix the error.

    Raises:
        UserError: the rank, the code or the addresses are wrong.
        Superseded: a later start of the job has begun.
    """
    require_job(place)
    place = place.resolve()
    start = Incarnation(job=place, number=number)
    _require_taken(start)
    os.environ.update(start.to_environment())
    task = _Task(start, read_job(place), out)
    with heard([*ASKING, signal.SIGINT], task.pass_on):
        return task.run()


_OF_THE_TASK = (RANK, TASKS, FD_VARIABLE)
"""Environment variables that tell the task its rank; they are removed from the environment of its command."""


class _Task:
    """One task. A signal before its command runs ends the task; a later signal is forwarded to the command."""

    def __init__(self, start: Incarnation, job: Job, out: IO[str]) -> None:
        self._start, self._job, self._out = start, job, out
        # The job's variables take precedence over the machine's.
        self._environ = {**os.environ, **job.environment}
        needs = job.resources
        self._place = find_place(
            self._environ, workers=needs.workers, min_workers=needs.min_workers
        )
        secrets = _secrets(job, self._environ)
        self._log = TaskLog(start.job / LOGS / f"task-{self._place.rank}.log", secrets=secrets)
        self._child: Child | None = None
        self._passed_on: set[int] = set()

    def pass_on(self, number: signal.Signals) -> None:
        """Forward a signal to the command; Ctrl-C is forwarded as a request to save and end."""
        if number == signal.SIGINT:
            number = signal.SIGTERM
        child = self._child
        if child is None:
            self._log.write(f"ended by {number.name} before training: nothing is lost")
            end_at_once(number)
            return
        self._passed_on.add(-number)
        child.send(number)

    def run(self) -> int:
        """Run the command until it ends; raises the errors of `run_task`."""
        self._log.write(f"start {self._start.number} on {machine_name().partition('/')[0]}")
        if self._place.is_spare:
            self._take(
                f"task {self._place.rank} is not needed: {self._place.tasks} workers share the work evenly, not more"
            )
            return EXIT_DONE
        try:
            code = self._run()
        except UserError as error:
            self._log.write(f"stoker: {error.line()}")
            raise
        self._log.write(f"start {self._start.number}: the command {how_it_ended(code)}")
        if code != EXIT_DONE:
            # If the command failed because a later start has begun, raise Superseded, so that this start is not
            # repeated.
            self._require_newest()
        # the forwarded signal killed the command before it had a handler: nothing is lost
        if code in self._passed_on:
            return EXIT_PREEMPTED
        return code if code >= 0 else EXIT_BUG

    def _run(self) -> int:
        code = unpack_code(self._start.job, self._job.code, self._environ)
        argv = _command(self._job, code)
        with contextlib.ExitStack() as held:
            environ = {name: v for name, v in self._environ.items() if name not in _OF_THE_TASK}
            environ |= _packages(code, self._environ) | self._meet(held)
            options = ProcessOptions(environ=environ, output=subprocess.PIPE)
            self._child = child = Child(f"task {self._place.rank}", argv, options)
            lines = Lines(child.output, self._take)
            lines.follow()
            try:
                while (ended := child.wait(WATCH_S)) is None:
                    self._require_newest()
            except Superseded:
                self._log.end()
                child.kill()
                child.wait()
                raise
            lines.drain()
        return ended

    def _require_newest(self) -> None:
        try:
            self._start.require_newest()
        except Superseded:
            raise
        except UserError:
            # The file system may not respond for a moment. If it does not recover, training fails when it writes.
            return

    def _meet(self, held: contextlib.ExitStack) -> dict[str, str]:
        """Exchange addresses with the other tasks; return the variables to set for the command."""
        place, folder = self._place, self._start.folder
        own = {**self._start.to_environment(), "PYTHONUNBUFFERED": "1"}
        if place.cluster is not None:
            return own
        if place.tasks == 1:
            return own | {VARIABLE: ""}
        (port,) = held.enter_context(held_ports(1, address=ALL_ADDRESSES))
        address = own_address(place, self._environ)
        announce(folder, place, Announcement(address=address, port=port, machine=machine_name()))
        found = gather(
            folder,
            place,
            check=self._start.require_newest,
            longest_s=_seconds(self._environ.get(WAIT_VARIABLE, "")),
        )
        keeps = bool(self._environ.get(INTERFACE))
        return own | {VARIABLE: agreed_cluster(place, found, keeps=keeps).to_tf_config()}

    def _take(self, line: str) -> None:
        self._log.write(line)
        with contextlib.suppress(OSError, ValueError):  # the log has the line
            self._out.write(f"{line}\n")
            self._out.flush()


def _command(job: Job, code: Code) -> list[str]:
    verb, *options = job.command
    if not (code.experiment / FILE).is_file():
        raise DataError(
            f"the job's code must hold {FILE}",
            got=Plain(f"no {code.experiment / FILE}"),
            fix="Submit the experiment again.",
        )
    sets = [f"--set={each}" for each in path_overrides(code.experiment, job.folder)]
    runs = f"--set=runs={json.dumps(str(job.runs))}"
    # The user's settings take precedence over these paths, except for the folder of runs, which is the job's.
    # -P: a module in the current folder cannot hide one of Stoker's
    python = [
        sys.executable,
        "-P",
        "-m",
        "stoker",
    ]
    return [*python, verb, *sets, *options, runs, str(code.experiment)]


def _packages(code: Code, environ: Mapping[str, str]) -> dict[str, str]:
    if not code.packages.is_dir():
        return {}
    paths = [str(code.packages), environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def _secrets(job: Job, environ: Mapping[str, str]) -> list[str]:
    missing = [name for name in job.secrets if not environ.get(name)]
    if missing:
        raise ConfigError(
            "every secret of the job must be in the environment of its tasks",
            got=Plain(f"no {', '.join(missing)}"),
            fix="Set the variable on the target.",
        )
    return [environ[name] for name in job.secrets]


def _require_taken(start: Incarnation) -> None:
    if not (start.job / INCARNATIONS / str(start.number)).exists():
        raise ConfigError(
            "--incarnation must be a number that `stoker job-start` has printed",
            got=start.number,
            fix=f"Run `stoker job-start {start.job}` once, and start all tasks with its number.",
        )
    start.require_newest()


def _seconds(text: str) -> float:
    if not text:
        return LONGEST_S
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{WAIT_VARIABLE} must be a number of seconds", got=text) from None
