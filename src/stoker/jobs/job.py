"""A job: one `stoker` command of an experiment, on machines that a scheduler chooses.

The job's folder is on a file system that the submitting machine and all tasks see at the same path:

    RUNS/.jobs/ID/
      job.json          this description, written once, before the submission
      code.tar.gz       the experiment's code as it was submitted (`archive`)
      incarnations/N    an empty file for each start of the job; only one start can create it
      logs/             task-RANK.log, older parts of it (task-RANK.log.1, ...), and the scheduler's own output
      submitted.json    the scheduler's ID of the job, as soon as it is known

A job's ID is computed from what is submitted, so a repeated submission is the same job.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stoker.core.config import build
from stoker.core.errors import ConfigError
from stoker.core.files import read_json, write_atomic
from stoker.core.fingerprint import fingerprint

JOBS = ".jobs"
"""Name of the folder of all jobs, inside the folder of runs."""

ID_DIGITS = 8
"""Number of hexadecimal digits in a job's ID, after the name."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Matches the name of an environment variable."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""Matches a name that is valid for a folder on every file system, and for a job in every scheduler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The resources of a job; None leaves the choice to the scheduler."""

    workers: int = 1
    """Number of tasks that train together, each in one process."""

    min_workers: int | None = None
    """Minimum number of tasks of an elastic job. Each start has as many tasks as the target has room for: a divisor of
    `workers`, and at least this number. None: every start has `workers` tasks."""

    gpus: int = 0
    """Number of GPUs of each worker."""

    cpus: int | None = None
    """Number of cores of each worker."""

    memory_gib: float | None = None
    """Memory of each worker, GiB."""

    time_limit_s: float | None = None
    """Maximum time that the job runs each time it is started or restarted, seconds. The job saves before the limit, and
    continues when it is started again."""

    @property
    def gpu_hours(self) -> float | None:
        """Maximum GPU hours until the time limit; None without GPUs or without a time limit."""
        if not self.gpus or self.time_limit_s is None:
            return None
        return self.workers * self.gpus * self.time_limit_s / 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The description of a submitted job."""

    name: str
    """Name of the experiment."""

    command: tuple[str, ...]
    """Arguments of the `stoker` command that each task runs, e.g. `("train", "--set", "train.epochs=3")`, without the
    experiment's folder, which follows them."""

    folder: Path
    """The experiment's folder on the submitting machine; paths of data are relative to it."""

    runs: Path
    """Folder of runs, absolute, the same for all tasks."""

    code: str
    """SHA-256 of the code's archive, hexadecimal."""

    resources: Resources = field(default_factory=Resources)

    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that every task gets, without secrets (see `secrets`)."""

    secrets: tuple[str, ...] = ()
    """Names of environment variables with secret values, which the target provides; the values are never written to a
    file."""

    labels: dict[str, str] = field(default_factory=dict)
    """Labels, key -> value, that the scheduler shows with the job; keys have no prefix."""

    after: tuple[str, ...] = ()
    """IDs of jobs on the same target that must be done before this job starts."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "the name of a job must be letters, digits, `.`, `_` and `-`, at most 100",
                got=self.name,
                fix="Change `name` in stoker.yaml.",
            )

    @property
    def id(self) -> str:
        """`NAME-` and eight hexadecimal digits of a hash of everything that was submitted."""
        return f"{self.name}-{fingerprint(self.to_json())[:ID_DIGITS]}"

    @property
    def place(self) -> Path:
        """Folder of the job."""
        return self.runs / JOBS / self.id

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        return asdict(self) | {"folder": str(self.folder), "runs": str(self.runs)}


def write_job(job: Job) -> Path:
    """Write `job.json` in the job's folder, and return the folder."""
    job.place.mkdir(parents=True, exist_ok=True)
    write_atomic(job.place / "job.json", json.dumps(job.to_json(), indent=1) + "\n")
    return job.place


def read_job(place: Path) -> Job:
    """Read the job of a folder.

    Raises:
        ConfigError: the folder is not the folder of a job.
    """
    return build(Job, read_json(place / "job.json"), where=str(place / "job.json"))
