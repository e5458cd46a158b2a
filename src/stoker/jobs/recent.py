"""Cache of the recent states of jobs: following logs needs the state several times a second.

A scheduler serves thousands of users, so a state is not requested again for a short time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stoker.jobs.provider import JobState

FRESH_S = 2.0
"""Time for which a cached state is used, seconds."""


class RecentStates:
    """The cached states of one kind of target's jobs, for this process."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[float, JobState]] = {}

    def state(self, job_id: str, read: Callable[[str], JobState]) -> JobState:
        """Return the cached state of a job if it is recent, otherwise the result of `read`."""
        read_s, state = self._read.get(job_id, (-FRESH_S, None))
        if state is None or time.monotonic() - read_s >= FRESH_S:
            state = read(job_id)
            self._read[job_id] = time.monotonic(), state
        return state

    def forget(self, job_id: str) -> None:
        """Drop the cached state of a job, because the job was just changed."""
        self._read.pop(job_id, None)
