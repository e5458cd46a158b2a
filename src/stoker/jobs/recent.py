"""States of jobs that were read a moment ago: what follows logs looks several times a second.

A scheduler serves thousands of users, so a state counts as the current one for a short time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stoker.jobs.provider import JobState

FRESH_S = 2.0
"""How long a state is taken for the current one, seconds."""


class RecentStates:
    """The states of a kind of target's jobs, for this process."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[float, JobState]] = {}

    def state(self, job_id: str, read: Callable[[str], JobState]) -> JobState:
        """Return a job's state, read by `read` unless a fresh one is known."""
        read_s, state = self._read.get(job_id, (-FRESH_S, None))
        if state is None or time.monotonic() - read_s >= FRESH_S:
            state = read(job_id)
            self._read[job_id] = time.monotonic(), state
        return state

    def forget(self, job_id: str) -> None:
        """Read the state of a job again at the next look: it was just changed."""
        self._read.pop(job_id, None)
