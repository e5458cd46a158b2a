"""What every target can do: a scheduler, a cluster, a cloud, this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from stoker.jobs.job import Job


class Phase(StrEnum):
    """Where a job is."""

    WAITING = "waiting"
    """For machines."""

    RUNNING = "running"
    RESTARTING = "restarting"
    """Started at least once, and waits for machines again."""

    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    """By a person."""

    UNKNOWN = "unknown"
    """The scheduler does not know it any more, or did not answer: never taken as failed."""

    @property
    def is_over(self) -> bool:
        """Whether it will not change again."""
        return self in (Phase.DONE, Phase.FAILED, Phase.STOPPED)


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What the scheduler knows of a job; times are seconds since the epoch."""

    id: str
    """`Job.id`."""

    scheduler_id: str
    """What the scheduler calls it."""

    phase: Phase
    reason: str = ""
    """Why it waits or failed, in the user's words, with the remedy where there is one."""

    expected_start_s: float | None = None
    """When the scheduler expects to start it."""

    submitted_s: float | None = None
    started_s: float | None = None
    """Of the newest start."""

    ended_s: float | None = None
    restarts: int = 0
    nodes: tuple[str, ...] = ()
    gpu_seconds: float | None = None
    """Of all starts together; None where the target does not count them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobEvent:
    """Something that a cluster did with a job or one of its processes."""

    at_s: float
    """Seconds since the epoch."""

    about: str
    """What it was done with, e.g. `Pod trip-1f3a9c27-0`."""

    reason: str
    message: str
    times: int = 1
    """How often."""


class Provider(Protocol):
    """A target. Every method raises a `UserError` of one line where the target does not answer or refuses."""

    def validate(self, job: Job) -> None:
        """Refuse what the target cannot run, before anything is written or submitted.

        Raises:
            ConfigError: names the setting: a partition that does not exist, more GPUs than any node has.
        """

    def describe(self, job: Job, code: bytes) -> str:
        """Return what would be submitted, as text: manifests, a script, command lines.

        Args:
            job: What.
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
        """End it, after its tasks have saved; of a job that is over, do nothing."""


@runtime_checkable
class HasRemoteLogs(Protocol):
    """A target whose jobs may write their logs elsewhere than in their folders here."""

    def fetch(self, job_id: str) -> None:
        """Bring the logs of a job into its folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """Jobs that are submitted together and differ in their settings only."""

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
    """A target that takes many jobs at once."""

    def validate_array(self, array: Array) -> None:
        """Refuse what the target cannot run, before anything is written or submitted.

        Raises:
            ConfigError: as `validate`, or there are more jobs than the target takes at once.
        """

    def submit_array(self, array: Array) -> Mapping[int, str]:
        """Submit jobs, note that in their folders, and return the scheduler's ID of each by its number in the sweep.

        An answer that is lost is not an error of the second call.
        """


@runtime_checkable
class StopsMany(Protocol):
    """A target that ends the jobs of a whole sweep with a few calls."""

    def stop_all(self, job_ids: Sequence[str]) -> None:
        """End all jobs of a sweep as `stop` does, those that wait first."""


@runtime_checkable
class Remote(Protocol):
    """A provider whose machines the user does not see: it answers for events, and for logs outside the folder of runs."""

    def events(self, job_id: str) -> Sequence[JobEvent]:
        """Return what was done with the job, the oldest first."""

    def log_lines(self, job_id: str, *, worker: int | None, follow: bool) -> Iterator[str]:
        """Yield what the job's processes that are still known have printed.

        Args:
            job_id: `Job.id`.
            worker: Rank of one of them; None: all, with `[worker N] ` before each line.
            follow: Go on until the job is over.
        """


class Wire(Protocol):
    """A connection to a port, of which a socket is one; a broken one raises an `OSError`."""

    def recv(self, size: int, /) -> bytes:
        """Return what has come, at most so many bytes; nothing after the end."""

    def sendall(self, data: bytes, /) -> None:
        """Send bytes."""

    def shutdown(self, how: int, /) -> None:
        """Send no more (`socket.SHUT_WR`)."""

    def close(self) -> None:
        """End it."""


@runtime_checkable
class ReachesPorts(Protocol):
    """A target whose workers' ports are not on this machine."""

    def where_is(self, job_id: str, worker: int) -> str:
        """Return where a worker runs now, as `connect` takes it.

        Raises:
            ConfigError: it does not run.
        """

    def connect(self, where: str, port: int) -> Wire:
        """Connect to a port there.

        Raises:
            UserError: the target does not allow it, or nothing listens.
        """


@dataclass(frozen=True, kw_only=True, slots=True)
class ProviderKind:
    """A kind of target. `jobs/providers/NAME/kind.py` has that of `provider: NAME` as `KIND`; nothing else lists it."""

    settings: type[Any]
    """Dataclass of a target's settings, all but `provider`."""

    make: Callable[[str, Any], Provider]
    """Makes the provider of a target: its name, its settings. It finds a job's folder by `places.find_place`."""
