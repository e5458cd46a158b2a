"""The starts of one job, numbered: only the newest one may write.

A scheduler starts a job again when it believes that the machine of the earlier start is gone. That
machine may still work: it was cut off from the network, or was suspended. Each start takes the next
number by creating the file `incarnations/N` in the job's folder, and a process whose `STOKER_INCARNATION` has a lower
number may no longer write (decision 0080).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import ConfigError, Plain, Superseded, UserError

VARIABLE = "STOKER_INCARNATION"
"""Environment variable of all processes of a job's task: `FOLDER:N`, the job's folder and the number of the start."""

INCARNATIONS = "incarnations"
"""Name of the folder, inside the job's folder, that holds a file for each number."""

RUN_OF_JOB = "run"
"""File in the job's folder: the path of the run that its newest start works on."""

FIRST = 1
"""Number of a job's first start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Incarnation:
    """One start of a job."""

    job: Path
    """Folder of the job."""

    number: int
    """Number of the start, from 1."""

    @property
    def folder(self) -> Path:
        """Folder in which the tasks of this start exchange their addresses."""
        return self.job / INCARNATIONS / f"{self.number}.tasks"

    def to_environment(self) -> dict[str, str]:
        """Return the environment variable that the processes of this start inherit."""
        return {VARIABLE: f"{self.job}:{self.number}"}

    def newest(self) -> int:
        """Return the highest number that a start of the job has taken.

        Raises:
            UserError: the job's folder is missing, or cannot be read.
        """
        try:
            # List the folder instead of checking for N + 1: NFS may still report from its cache that this name does
            # not exist.
            return max(_numbers(self.job), default=0)
        except OSError as error:
            raise UserError(
                f"the folder of job {self.job.name} must stay while the job runs",
                got=Plain(f"{self.job / INCARNATIONS}: {error.strerror or error}"),
                fix="Nothing more was written. Submit the job again; it goes on from the run's last checkpoint.",
            ) from None

    def require_newest(self) -> None:
        """Check that no later start of the job exists.

        Raises:
            Superseded: a later start exists.
            UserError: the job's folder is gone, or cannot be read.
        """
        if (newest := self.newest()) > self.number:
            raise Superseded(
                f"start {self.number} of job {self.job.name} must not write any more",
                got=Plain(f"start {newest} has begun"),
                fix="Nothing is left to do: start "
                f"{newest} goes on from the last checkpoint, and this one ends.",
            )

    def replaces(self, other: Incarnation | None) -> bool:
        """Whether this is a later start of the same job than `other`."""
        return other is not None and other.job == self.job and other.number < self.number


def parse_incarnation(text: str) -> Incarnation | None:
    """Return the start that a text of the form `FOLDER:N` names; None if the text has another form."""
    folder, _, number = text.strip().rpartition(":")
    return Incarnation(job=Path(folder), number=int(number)) if folder and _counts(number) else None


def own_incarnation(environ: Mapping[str, str] = os.environ) -> Incarnation | None:
    """Return the start that this process belongs to; None outside a job.

    Raises:
        ConfigError: `STOKER_INCARNATION` is set and invalid.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    found = parse_incarnation(text)
    if found is None:
        raise ConfigError(
            f"{VARIABLE} must be FOLDER:N",
            got=text,
            fix="Unset it; `stoker job-task` sets it for a job.",
        )
    return found


def require_newest() -> None:
    """Check that no later start of this process's job exists; does nothing outside a job.

    Raises:
        Superseded: a later start exists.
        UserError: the job's folder is gone, or cannot be read.
    """
    if os.environ.get(VARIABLE) and (own := own_incarnation()) is not None:
        own.require_newest()


def is_newest() -> bool:
    """Whether this process may still write; for callers that skip the write instead of raising an error."""
    try:
        require_newest()
    except UserError:
        return False
    return True


def take_next(job: Path) -> int:
    """Reserve the next number of a job, which no other start can get, and return it.

    Args:
        job: Folder of the job; it must exist.

    Raises:
        OSError: the folder cannot be written.
    """
    folder = job / INCARNATIONS
    folder.mkdir(exist_ok=True)
    number = max(_numbers(job), default=FIRST - 1) + 1
    while True:
        try:
            # Exclusive creation is atomic on NFS, too (version 3 and later).
            os.close(os.open(folder / str(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            number += 1
            continue
        return number


def _numbers(job: Path) -> list[int]:
    names = [path.name for path in (job / INCARNATIONS).iterdir()]
    return [int(name) for name in names if _counts(name)]


def _counts(text: str) -> bool:
    return text.isascii() and text.isdecimal()
