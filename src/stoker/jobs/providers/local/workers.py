"""The command lines and environments of a job's processes on this machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from stoker.cluster.doctor.gpus import read_gpus
from stoker.cluster.doctor.visible import GPUS, NO_GPU, visible_names
from stoker.cluster.launch.member import FD_VARIABLE, Command
from stoker.cluster.limits import share_threads
from stoker.cluster.processes import Child, ProcessOptions, how_it_ended
from stoker.cluster.resolver import VARIABLE
from stoker.core.errors import Plain, UserError
from stoker.jobs.job import Job
from stoker.jobs.providers.local.room import workers_here

STOKER = (sys.executable, "-P", "-m", "stoker")
"""The command `stoker`. With -P, Python does not import from the current folder, whose modules may have the same names
as Stoker's modules."""

_OF_OTHERS = re.compile(rf"SLURM_.*|{VARIABLE}|{FD_VARIABLE}|STOKER_(RANK|TASKS|LOCAL_WORKERS)")
"""Patterns of variables that would make a worker part of another group: the user's shell may itself run inside a
job."""


def next_incarnation(place: Path, *, environ: Mapping[str, str] = os.environ) -> int:
    """Allocate the number of the next start of a job.

    Args:
        place: The job's folder.
        environ: Environment of this process.

    Raises:
        UserError: the number cannot be allocated.
    """
    child = Child(
        "stoker job-start",
        [*STOKER, "job-start", str(place)],
        ProcessOptions(environ=own_environment(environ), output=subprocess.PIPE),
    )
    with child.output as stream:
        printed = stream.read().decode(errors="replace").strip()
    code = child.wait()
    last = (printed.splitlines() or ["it printed nothing"])[-1]
    if code != 0 or not last.isdecimal():
        raise UserError(
            "the job must get the number of its next start",
            got=Plain(f"{last} (stoker job-start {how_it_ended(code or 0)})"),
        )
    return int(last)


def worker_commands(job: Job, place: Path, *, incarnation: int) -> list[Command]:
    """Return the command of each worker that this machine has room for, in the order of their ranks.

    Args:
        job: The job.
        place: The job's folder.
        incarnation: Number of this start.

    Raises:
        ConfigError: the machine has no room even for the minimum number of workers.
    """
    needs = job.resources
    workers = workers_here(needs)
    environ = own_environment(os.environ) | job.environment
    cores = needs.cpus or max(1, len(os.sched_getaffinity(0)) // workers)
    threads = share_threads(environ, cores=cores, processes=1)
    names = visible_names(read_gpus().states, os.environ) if needs.gpus else ()
    argv = (*STOKER, "job-task", str(place), "--incarnation", str(incarnation))
    commands = []
    for rank in range(workers):
        mine = names[rank * needs.gpus : (rank + 1) * needs.gpus]
        own = {
            "STOKER_RANK": str(rank),
            "STOKER_TASKS": str(workers),
            GPUS: ",".join(mine) or NO_GPU,
        }
        commands.append(
            Command(
                name=f"worker {rank}",
                argv=argv,
                environ={**_DEFAULTS, **environ, **threads, **own},
                has_heartbeats=False,
            )
        )
    return commands


def own_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables that would make a worker part of another group."""
    return {name: value for name, value in environ.items() if not _OF_OTHERS.fullmatch(name)}


_DEFAULTS = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
"""Variables of all workers: Python writes each line immediately, and a crash in native code prints the Python
stack."""
