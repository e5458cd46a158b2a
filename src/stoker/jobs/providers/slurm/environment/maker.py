"""Decides in which folder, and with which script, a job's environment is made from its lock file."""

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
"""Name of the lock file's copy in the job's folder, as requirements."""

ENVIRONMENTS = ".environments"
"""Name of the folder of all environments, inside the folder of runs."""

MAKER = Path(__file__).with_name("make_environment.sh")
COPIER = Path(__file__).with_name("local_environment.sh")

MAKING_S = 3600.0
"""Maximum time to make an environment, seconds: several GB may come from a slow mirror."""

IN_CONTAINER = "python"
"""Python in a container, on the PATH of its image."""


def interpreter(job: Job, target: SlurmTarget, source: Path | None = None) -> str:
    """Return the path of the Python with which the job's workers run.

    Args:
        job: The job with its paths on the cluster.
        target: The settings of the target.
        source: The experiment's folder on this machine, which has the lock file; None: `job.folder`.

    Raises:
        ConfigError: the experiment has no lock file, or a job cannot use its lock file.
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
    """Check that the environment of a job exists or can be made; nothing is written.

    Args:
        python: The job's `interpreter`.
        target: The settings of the target.
        machine: The machine that makes the environment.

    Raises:
        UserError: uv is missing.
    """
    if target.environment_from == "lock":
        _run_maker(python, target, machine)


def environment_files(source: Path, target: SlurmTarget) -> dict[str, bytes]:
    """Return the files from which the environment is made; they are written into the job's folder.

    Args:
        source: The experiment's folder on this machine.
        target: The settings of the target.
    """
    if target.environment_from != "lock":
        return {}
    scripts = {script.name: script.read_bytes() for script in (MAKER, COPIER)}
    return scripts | {COPY: read_lock(source).text.encode()}


def make_environment(place: Path, python: str, target: SlurmTarget, machine: Machine) -> None:
    """Make the environment of a job from its lock file, unless the environment exists.

    Args:
        place: The job's folder on the cluster, which has the `environment_files`.
        python: The job's `interpreter`.
        target: The settings of the target.
        machine: The machine that makes the environment.

    Raises:
        UserError: the packages of the lock file cannot be installed, or uv is missing.
    """
    if target.environment_from == "lock":
        _run_maker(python, target, machine, str(place / COPY))


def base_python(target: SlurmTarget) -> str:
    """Return the version or the path of the Python on which uv bases the environment."""
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
            "the environment of the lock file must be made before the job is submitted",
            got=Plain(why),
            fix="Correct the problem, and submit the experiment again.",
        )
