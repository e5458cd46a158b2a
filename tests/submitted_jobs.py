"""What tests do with jobs of a target: submit them, and wait until they are in a phase."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from tests.slurm_cluster import wait_until

from stoker.jobs.job import Job
from stoker.jobs.provider import JobState, Phase, Provider


class SubmittedJobs(ABC):
    """A cluster, and how jobs are submitted to it."""

    @abstractmethod
    def provider(self, **settings: Any) -> Provider:
        """A target on the cluster."""

    @abstractmethod
    def job(self, name: str, *command: str, **more: Any) -> Job:
        """A job, whose folder is written."""

    @abstractmethod
    def state(self, job: Job) -> JobState:
        """The state of a job."""

    @abstractmethod
    def log(self, job: Job) -> str:
        """What explains a job that does not do what it should."""

    def submit(
        self, name: str, *command: str, settings: dict[str, Any] | None = None, **more: Any
    ) -> Job:
        """Submit a job."""
        job = self.job(name, *command, **more)
        provider = self.provider(**settings or {})
        provider.validate(job)
        provider.submit(job)
        return job

    def wait(self, job: Job, *phases: Phase, timeout_s: float = 120.0) -> JobState:
        """Wait until a job is in one of these phases."""
        last: list[JobState] = []

        def there() -> bool:
            last[:] = [self.state(job)]
            return last[0].phase in phases

        try:
            wait_until(there, f"phase {phases}", timeout_s)
        except AssertionError:
            raise AssertionError(f"{last}\n{self.log(job)}") from None
        return last[0]
