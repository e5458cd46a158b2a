"""The environment of a job, made from its lock: its folder, and the script that makes it."""

from __future__ import annotations

import sys
from pathlib import Path

import stoker
from stoker.core.errors import Plain, UserError
from stoker.jobs.job import Job
from stoker.jobs.providers.slurm.environment.lock import read_lock
from stoker.jobs.providers.slurm.machine import Call, Machine
from stoker.jobs.providers.slurm.settings import SlurmTarget

COPY = "environment.lock"
"""The lock in the job's folder, as lines of requirements."""

ENVIRONMENTS = ".environments"
"""Folder of all environments, in the folder of runs."""

MAKER = Path(__file__).with_name("make_environment.sh")
COPIER = Path(__file__).with_name("local_environment.sh")

MAKING_S = 3600.0
"""Longest time to make an environment, seconds: several GB from a slow mirror."""

IN_CONTAINER = "python"
"""Python of an image, on its PATH."""


def interpreter(job: Job, target: SlurmTarget, source: Path | None = None) -> str:
    """Return the Python of the job's workers on the machines.

    Args:
        job: The job with its paths on the cluster.
        target: The settings of the target.
        source: The experiment's folder on this machine, which has the lock; None: that of the job.

    Raises:
        ConfigError: the experiment has no lock, or one that cannot be the job's.
    """
    if target.container is not None:
        return target.python or IN_CONTAINER
    if target.environment_from == "lock":
        named = target.environments_folder
        environments = Path(named) if named else job.runs / ENVIRONMENTS
        lock = read_lock(source or job.folder)
        return str(lock.folder(environments, base_python(target)) / "bin" / "python")
    return target.python or sys.executable


def require_maker(python: str, target: SlurmTarget, machine: Machine) -> None:
    """Check that the environment of a job exists or can be made; writes nothing.

    Args:
        python: The job's `interpreter`.
        target: The settings of the target.
        machine: The machine that makes it.

    Raises:
        UserError: uv is missing.
    """
    if target.environment_from == "lock":
        _run_maker(python, target, machine)


def environment_files(source: Path, target: SlurmTarget) -> dict[str, bytes]:
    """Return the files that make the environment, for the job's folder.

    Args:
        source: The experiment's folder on this machine.
        target: The settings of the target.
    """
    if target.environment_from != "lock":
        return {}
    scripts = {script.name: script.read_bytes() for script in (MAKER, COPIER)}
    return scripts | {COPY: read_lock(source).text.encode()}


def make_environment(place: Path, python: str, target: SlurmTarget, machine: Machine) -> None:
    """Make the environment of a job from its lock, unless it exists.

    Args:
        place: The job's folder on the cluster, which has the `environment_files`.
        python: The job's `interpreter`.
        target: The settings of the target.
        machine: The machine that makes it.

    Raises:
        UserError: the lock cannot be installed, or uv is missing.
    """
    if target.environment_from == "lock":
        _run_maker(python, target, machine, str(place / COPY))


def base_python(target: SlurmTarget) -> str:
    """Return the version or path of the Python from which uv makes the environment."""
    return target.python or f"{sys.version_info.major}.{sys.version_info.minor}"


def _run_maker(python: str, target: SlurmTarget, machine: Machine, *lock: str) -> None:
    folder = python.removesuffix("/bin/python")
    words = (folder, base_python(target), stoker.__version__, *lock)
    call = Call(
        argv=("bash", "-s", "--", *words),
        text=MAKER.read_text(),
        answer_s=MAKING_S,
        shows_errors=True,
    )
    answer = machine.run(call)
    if answer.code:
        why = " ".join(answer.out.split()) or f"{MAKER.name} ended with {answer.code}"
        raise UserError(
            "the environment of the lock must be made before the job is submitted",
            got=Plain(why),
            fix="Correct it, and submit the experiment again.",
        )
