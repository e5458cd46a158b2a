"""The interface that every kind of target implements: a scheduler, a cluster, a cloud, or this machine."""

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
    """The job waits for machines."""

    RUNNING = "running"
    RESTARTING = "restarting"
    """The job has started at least once, and waits for machines again."""

    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    """A user has stopped the job."""

    UNKNOWN = "unknown"
    """The scheduler does not know the job, or did not answer; such a job is never treated as failed."""

    @property
    def is_over(self) -> bool:
        """Whether the phase is final."""
        return self in (Phase.DONE, Phase.FAILED, Phase.STOPPED)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """The state of a job as the scheduler reports it; times are in seconds since the epoch."""

    id: str
    """ID of the job, `Job.id`."""

    scheduler_id: str
    """The scheduler's ID of the job."""

    phase: Phase
    reason: str = ""
    """Why the job waits or has failed, in the user's terms, with a remedy if there is one."""

    expected_start_s: float | None = None
    """When the scheduler expects to start the job."""

    submitted_s: float | None = None
    started_s: float | None = None
    """Start time of the newest start."""

    ended_s: float | None = None
    restarts: int = 0
    nodes: tuple[str, ...] = ()
    gpu_seconds: float | None = None
    """GPU seconds of all starts together; None if the target does not count GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """An event of a job or of one of its processes on a cluster."""

    at_s: float
    """Time of the event, seconds since the epoch."""

    about: str
    """The object that the event is about, e.g. `Pod trip-1f3a9c27-0`."""

    reason: str
    message: str
    times: int = 1
    """How often the event has occurred."""


class Provider(Protocol):
    """Submits jobs to a target. Each method raises a `UserError` if the target refuses or does not answer."""

    def validate(self, job: Job) -> None:
        """Refuse a job that the target cannot run, before anything is written or submitted.

        Raises:
            ConfigError: the target does not support a setting, e.g. the partition does not exist, or no node has
                enough GPUs.
        """

    def describe(self, job: Job, code: bytes) -> str:
        """Return what would be submitted, as text: manifests, a script or command lines.

        Args:
            job: The job.
            code: Content of the job's archive.
        """

    def submit(self, job: Job) -> str:
        """Submit a job, record that in its folder, and return the scheduler's ID of the job.

        The caller has written the job's folder. If an earlier submission is found, its ID is returned. So, if the
        target's answer is lost, a second call succeeds. If the submission cannot be recorded, because the disk is
        full, it is canceled.
        """

    def state(self, job_id: str) -> JobState:
        """Return the state of one job."""

    def jobs(self) -> Sequence[JobState]:
        """Return the user's jobs that Stoker has submitted to this target, newest first."""

    def stop(self, job_id: str) -> None:
        """End the job, after its tasks have saved; do nothing if the job is over."""


@runtime_checkable
class HasRemoteLogs(Protocol):
    """A target whose jobs may write their logs to another file system than this machine's."""

    def fetch(self, job_id: str) -> None:
        """Copy the logs of a job into its folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """Jobs of a sweep: they are submitted together, and differ only in their settings."""

    id: str
    """ID of the sweep."""

    place: Path
    """Folder of the sweep; in it, link N leads to the folder of job N."""

    jobs: Mapping[int, Job]
    """The jobs to submit, by their number in the sweep. Their folders have already been written."""

    at_once: int | None
    """Maximum number of jobs that run at the same time; None: as many as the target allows."""


@runtime_checkable
class ArrayProvider(Provider, Protocol):
    """A target that accepts many jobs at once."""

    def validate_array(self, array: Array) -> None:
        """Refuse jobs that the target cannot run, before anything is written or submitted.

        Raises:
            ConfigError: as in `validate`, or there are more jobs than the target accepts at once.
        """

    def submit_array(self, array: Array) -> Mapping[int, str]:
        """Submit jobs, record that in their folders, and return the scheduler's IDs by number in the sweep.

        If the target's answer is lost, a second call succeeds.
        """


@runtime_checkable
class StopsMany(Protocol):
    """A target that can end all jobs of a sweep with a few calls."""

    def stop_all(self, job_ids: Sequence[str]) -> None:
        """End all jobs of a sweep as `stop` does, waiting jobs first."""


@runtime_checkable
class Remote(Protocol):
    """A provider whose machines users cannot access: it also returns events, and logs that the target keeps."""

    def events(self, job_id: str) -> Sequence[JobEvent]:
        """Return the events of the job, oldest first."""

    def log_lines(self, job_id: str, *, worker: int | None, follow: bool) -> Iterator[str]:
        """Yield the lines that the job's existing processes have printed.

        Args:
            job_id: `Job.id`.
            worker: Rank of a worker; None: all workers, with `[worker N] ` before each line.
            follow: Whether to continue until the job is over.
        """


class Wire(Protocol):
    """A connection to a port, such as a socket. Its methods raise an `OSError` if the connection is broken."""

    def recv(self, size: int, /) -> bytes:
        """Return received bytes, at most `size`; no bytes after the end of the data."""

    def sendall(self, data: bytes, /) -> None:
        """Send bytes."""

    def shutdown(self, how: int, /) -> None:
        """Tell the other side that no more data follows (`socket.SHUT_WR`)."""

    def close(self) -> None:
        """Close the connection."""


@runtime_checkable
class ReachesPorts(Protocol):
    """A target whose workers run on other machines, so that their ports must be forwarded."""

    def where_is(self, job_id: str, worker: int) -> str:
        """Return where a worker runs now, as an argument for `connect`.

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
    """A kind of target. The constant `KIND` in `jobs/providers/NAME/kind.py` defines the kind for `provider: NAME`."""

    settings: type[Any]
    """Dataclass with a target's settings, except `provider`."""

    make: Callable[[str, Any], Provider]
    """Creates the provider of a target from its name and settings. It finds a job's folder with `places.find_place`."""
