"""The interface of every target: a scheduler, a cluster, a cloud, this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stoker.jobs.job import Job


class Phase(StrEnum):
    """The phase of a job."""

    WAITING = "waiting"
    """It waits for machines."""

    RUNNING = "running"
    RESTARTING = "restarting"
    """It has started at least once, and waits for machines again."""

    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    """Stopped by a person."""

    UNKNOWN = "unknown"
    """The scheduler does not know the job, or did not answer; this never counts as failed."""

    @property
    def is_over(self) -> bool:
        """Whether the phase is final."""
        return self in (Phase.DONE, Phase.FAILED, Phase.STOPPED)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """The scheduler's state of a job; times are seconds since the epoch."""

    id: str
    """`Job.id`."""

    scheduler_id: str
    """The scheduler's ID of the job."""

    phase: Phase
    reason: str = ""
    """Why it waits or failed, in the user's terms, with the remedy if there is one."""

    expected_start_s: float | None = None
    """When the scheduler expects to start it."""

    submitted_s: float | None = None
    started_s: float | None = None
    """Start time of the newest start."""

    ended_s: float | None = None
    restarts: int = 0
    nodes: tuple[str, ...] = ()
    gpu_seconds: float | None = None
    """Of all starts together; None if the target does not count them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """An event of a job or of one of its processes on a cluster."""

    at_s: float
    """Seconds since the epoch."""

    about: str
    """The affected object, e.g. `Pod trip-1f3a9c27-0`."""

    reason: str
    message: str
    times: int = 1
    """How often it occurred."""


class Provider(Protocol):
    """A target. Every method raises a one-line `UserError` if the target does not answer or refuses."""

    def validate(self, job: Job) -> None:
        """Refuse a job that the target cannot run, before anything is written or submitted.

        Raises:
            ConfigError: a setting is not possible on the target: a partition that does not exist, more GPUs than any node has.
        """

    def describe(self, job: Job, code: bytes) -> str:
        """Return what would be submitted, as text: manifests, a script, command lines.

        Args:
            job: The job.
            code: Content of its archive.
        """

    def submit(self, job: Job) -> str:
        """Submit it, note that in its folder, and return the scheduler's ID; that of the earlier submission if it is there.

        The job's folder is written. An answer that is lost is not an error of the second call. What cannot be noted,
        because the disk is full, does not stay submitted.
        """

    def state(self, job_id: str) -> JobState:
        """Return the state of one job."""

    def jobs(self) -> Sequence[JobState]:
        """Return the user's jobs that Stoker has submitted here, the newest first."""

    def stop(self, job_id: str) -> None:
        """End the job after its tasks have saved; do nothing if it is over."""


@runtime_checkable
class HasRemoteLogs(Protocol):
    """A target whose jobs may write logs elsewhere than in their folders on this machine."""

    def fetch(self, job_id: str) -> None:
        """Copy the logs of a job into its folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """Jobs that are submitted together and differ only in their settings."""

    id: str
    """ID of the sweep."""

    place: Path
    """Folder of the sweep, with a link to each job's folder by its number."""

    jobs: Mapping[int, Job]
    """The jobs to submit, by their number in the sweep; their folders are written."""

    at_once: int | None
    """Most that run at a time; None: as many as the target allows."""


@runtime_checkable
class ArrayProvider(Provider, Protocol):
    """A target that accepts many jobs at once."""

    def validate_array(self, array: Array) -> None:
        """Refuse jobs that the target cannot run, before anything is written or submitted.

        Raises:
            ConfigError: as `validate`, or there are more jobs than the target accepts at once.
        """

    def submit_array(self, array: Array) -> Mapping[int, str]:
        """Submit jobs, note that in their folders, and return the scheduler's ID of each by its number in the sweep.

        After a lost answer, a second call succeeds.
        """


@runtime_checkable
class StopsMany(Protocol):
    """A target that can end all jobs of a sweep with a few calls."""

    def stop_all(self, job_ids: Sequence[str]) -> None:
        """End all jobs of a sweep like `stop`, waiting jobs first."""


@runtime_checkable
class Remote(Protocol):
    """A provider whose machines the user does not see: it provides events, and logs outside the folder of runs."""

    def events(self, job_id: str) -> Sequence[JobEvent]:
        """Return the events of the job, oldest first."""

    def log_lines(self, job_id: str, *, worker: int | None, follow: bool) -> Iterator[str]:
        """Yield what the job's remaining processes have printed.

        Args:
            job_id: `Job.id`.
            worker: Rank of one worker; None: all, with `[worker N] ` before each line.
            follow: Continue until the job is over.
        """


class Wire(Protocol):
    """A connection to a port, such as a socket; a broken one raises an `OSError`."""

    def recv(self, size: int, /) -> bytes:
        """Return the received bytes, up to a limit; nothing after the end."""

    def sendall(self, data: bytes, /) -> None:
        """Send bytes."""

    def shutdown(self, how: int, /) -> None:
        """End the sending direction (`socket.SHUT_WR`)."""

    def close(self) -> None:
        """Close the connection."""


@runtime_checkable
class ReachesPorts(Protocol):
    """A target whose workers' ports are not on this machine."""

    def where_is(self, job_id: str, worker: int) -> str:
        """Return where a worker runs now, in the form that `connect` takes.

        Raises:
            ConfigError: the worker does not run.
        """

    def connect(self, where: str, port: int) -> Wire:
        """Connect to a port of a worker.

        Raises:
            UserError: the target does not allow it, or nothing listens on the port.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderKind:
    """A kind of target. `jobs/providers/NAME/kind.py` defines that of `provider: NAME` as `KIND`; it is listed nowhere else."""

    settings: type[Any]
    """Dataclass of a target's settings, except `provider`."""

    make: Callable[[str, Any], Provider]
    """Creates the provider of a target from its name and settings. It finds a job's folder with `places.find_place`."""
