"""A job: one `stoker` command of an experiment, on machines that a scheduler chooses.

Its folder is on a file system that the submitting machine and all tasks see at the same path:

    RUNS/.jobs/ID/
      job.json          this description, written once, before the submission
      code.tar.gz       the experiment's code as it was submitted (`archive`)
      incarnations/N    one empty file for each start of the job, created exclusively by that start
      logs/             task-RANK.log, its older parts task-RANK.log.1 ..., and the scheduler's own output
      submitted.json    the scheduler's ID of the job, as soon as it is known

A job's ID follows from what was submitted, so the same submission twice is one job.
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
"""Folder of all jobs, in the folder of runs."""

ID_DIGITS = 8
"""Hexadecimal digits of a job's ID, after its name."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""Name of an environment variable."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
"""A name that is valid as a folder on every file system, and as a job in every scheduler."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """The resources of a job; None leaves the choice to the scheduler."""

    workers: int = 1
    """Tasks that train together, one process each."""

    min_workers: int | None = None
    """Fewest tasks of a start of an elastic job, whose starts have as many tasks as the target has room for:
    divisors of `workers` from this number on. None: every start has `workers`."""

    gpus: int = 0
    """GPUs of each worker."""

    cpus: int | None = None
    """Cores of each worker."""

    memory_gib: float | None = None
    """Memory of each worker, GiB."""

    time_limit_s: float | None = None
    """Longest run of one start; the job saves before that and continues in the next start."""

    @property
    def gpu_hours(self) -> float | None:
        """Most GPU hours of one start; None without GPUs or a time limit."""
        if not self.gpus or self.time_limit_s is None:
            return None
        return self.workers * self.gpus * self.time_limit_s / 3600


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job as submitted."""

    name: str
    """Name of the experiment."""

    command: tuple[str, ...]
    """Arguments of `stoker` that each task runs, e.g. `("train", "--set", "train.epochs=3")`; the folder follows."""

    folder: Path
    """The experiment's folder on the submitting machine; paths of data are relative to it."""

    runs: Path
    """Folder of runs, absolute, the same for all tasks."""

    code: str
    """SHA-256 of the code's archive, hexadecimal."""

    resources: Resources = field(default_factory=Resources)

    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables of every task. No secrets: `secrets` has their names."""

    secrets: tuple[str, ...] = ()
    """Names of environment variables that the target provides; their values are not written anywhere."""

    labels: dict[str, str] = field(default_factory=dict)
    """Key -> value, for the scheduler and those who look at its jobs; keys without a prefix."""

    after: tuple[str, ...] = ()
    """IDs of jobs of the same target that must be done before it starts."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(
                "the name of a job must be letters, digits, `.`, `_` and `-`, at most 100",
                got=self.name,
                fix="Change `name` in stoker.yaml.",
            )

    @property
    def id(self) -> str:
        """`NAME-` and eight hexadecimal digits of everything that was submitted."""
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
        ConfigError: the folder is not a job's.
    """
    return build(Job, read_json(place / "job.json"), where=str(place / "job.json"))
