"""The machine that runs Slurm's programs: this one, or a login node through ssh (`remote.ssh`)."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.jobs.job import Job
from stoker.jobs.provider import Array
from stoker.jobs.providers.slurm.problems import AnswerLost

LOGIN = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "SLURM_CONF", "USER")
"""Variables of a login; of this process's variables, a job gets only these and its secrets."""

_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS")
_OTHERS = ("SLURM_", "SBATCH_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_", "SALLOC_", "SRUN_")

_NAME_UNSET = 'for name; do [ -n "${!name}" ] || printf "%s\\n" "$name"; done'

LOGIN_S = 60.0
"""Maximum wait for a login, seconds."""

TIMES = ("SLURM_TIME_FORMAT", "%s")
"""Environment variable, with its value, that makes Slurm's programs print times in seconds since the epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A program to run."""

    argv: tuple[str, ...]
    text: str | None = None
    """Standard input of the program; None: no input."""

    for_job: bool = False
    """Whether a job inherits the program's environment. Then the environment is that of a login, with the secrets."""

    secrets: Sequence[str] = ()
    """Names of environment variables of this process that the program also gets."""

    shows_errors: bool = False
    """Whether the program's stderr is shown immediately, if it runs on this machine."""

    answer_s: float
    """Maximum wait for the end of the program, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The output of a program."""

    code: int
    """Exit code, negative for a signal."""

    out: str
    errors: str


class Machine(Protocol):
    """A machine of the cluster that has Slurm's programs."""

    def run(self, call: Call) -> Answer:
        """Run a program.

        Raises:
            AnswerLost: it is unknown whether the program has done its work.
            UserError: the program is missing.
        """

    def user(self) -> str:
        """Return the user ID (UID) on the machine; it is used because a name may contain any character."""

    def on_cluster(self, job: Job) -> Job:
        """Return the job with its paths on the cluster, which may differ from those on this machine."""

    def send(self, job: Job, names: Sequence[str], *, without: Sequence[str]) -> None:
        """Write files into the job's folder on the cluster, and remove the files in `without` there."""

    def send_array(
        self, array: Array, names: Sequence[str], *, of_all: Sequence[str], without: Sequence[str]
    ) -> None:
        """Call `send` for each job of an array, and write the files `of_all` into the array's folder."""

    def mark(self, job: Job, place: Path, name: str) -> None:
        """Create an empty file in the job's folder, which is `place` on this machine."""

    def fetch(self, job: Job, place: Path) -> None:
        """Copy the files that the job has written on the cluster into its folder on this machine."""


class Here:
    """This machine, if it shares the file system of the cluster."""

    def run(self, call: Call) -> Answer:
        """Run a program; raises the errors of `Machine.run`."""
        program = call.argv[0]
        if shutil.which(program) is None:
            raise UserError(
                f"{program} must be on the PATH",
                got=Plain("no such program"),
                fix="Run it on a login node of the cluster.",
            )
        try:
            done = subprocess.run(
                call.argv,
                check=False,
                input=call.text,
                stdin=subprocess.DEVNULL if call.text is None else None,
                stdout=subprocess.PIPE,
                stderr=None if call.shows_errors else subprocess.PIPE,
                text=True,
                errors="replace",
                timeout=call.answer_s,
                env=_of_job(call.secrets) if call.for_job else _of_program(),
            )
        except subprocess.TimeoutExpired:
            raise no_answer(call) from None
        return Answer(code=done.returncode, out=done.stdout, errors=done.stderr or "")

    def user(self) -> str:
        """Return the user ID (UID) of this process."""
        return str(os.getuid())

    def on_cluster(self, job: Job) -> Job:
        """Return the job itself: the paths are the same."""
        return job

    def send(self, job: Job, names: Sequence[str], *, without: Sequence[str]) -> None:
        """Do nothing: the folder of the job is the same."""

    def send_array(
        self, array: Array, names: Sequence[str], *, of_all: Sequence[str], without: Sequence[str]
    ) -> None:
        """Do nothing: the folders are the same."""

    def mark(self, job: Job, place: Path, name: str) -> None:
        """Create an empty file in the job's folder, which only the job's owner can do."""
        try:
            (place / name).touch()
        except PermissionError:
            raise UserError(
                f"only the owner of job {job.id} can stop it", fix="Ask the owner to stop it."
            ) from None

    def fetch(self, job: Job, place: Path) -> None:
        """Do nothing: the folder of the job is the same."""


def on_cluster(array: Array, machine: Machine) -> Array:
    """Return the array with its paths on the cluster."""
    jobs = {number: machine.on_cluster(job) for number, job in array.jobs.items()}
    first = next(iter(jobs.values()))
    return replace(array, jobs=jobs, place=first.place.with_name(array.id))


def require_secrets(names: Sequence[str], machine: Machine) -> None:
    """Refuse secrets that a job would lack: they are set neither here nor by a login to the cluster.

    Raises:
        ConfigError: secrets are not set; the message names them.
        UserError: the machine does not answer.
    """
    unset = [name for name in names if not os.environ.get(name)]
    if not unset:
        return
    call = Call(argv=("bash", "-l", "-c", _NAME_UNSET, "bash", *unset), answer_s=LOGIN_S)
    said = machine.run(call).out.splitlines()  # may include text that a login's profile prints
    if missing := [name for name in unset if name in said]:
        raise ConfigError(
            "secrets must be variables of the environment in which the job is submitted",
            got=Plain(f"no {', '.join(missing)}"),
            fix=f"Set it: export {missing[0]}=..., or in `setup` of the target.",
        )


def no_answer(call: Call) -> AnswerLost:
    """Return the error of a program that took too long."""
    return AnswerLost(
        f"{call.argv[0]} must answer within {call.answer_s:g} s",
        got=Plain("no answer"),
        fix="Run the same command again: a job that was submitted is found, and not submitted twice.",
    )


def _of_job(secrets: Sequence[str]) -> dict[str, str]:
    """Return the environment for a program whose environment a job inherits: other variables would change the job."""
    return {name: os.environ[name] for name in (*LOGIN, *secrets) if name in os.environ}


def _of_program() -> dict[str, str]:
    """Return the environment for other programs, without variables that would change their answers."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT or not name.startswith(_OTHERS)
    }
    return kept | dict([TIMES])
