"""Predecessors: jobs that must be done before another job starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stoker.core.errors import ConfigError, Plain
from stoker.jobs.provider import JobState, Phase

REMEDY = "Submit that job again, then this one"


def require_may_be_done(job_id: str, state: JobState) -> None:
    """Check that the predecessors of a job can still become done.

    Raises:
        ConfigError: a predecessor has failed, was stopped, or is in an unknown state.
    """
    if state.phase is Phase.UNKNOWN or (state.phase.is_over and state.phase is not Phase.DONE):
        raise ConfigError(
            "--after must name jobs that are done, running or waiting",
            got=Plain(f"{job_id} is {_phase(state)}"),
            fix="Submit that job again first.",
        )


def why_never(after: Sequence[str], state: Callable[[str], JobState]) -> str | None:
    """Return why a job can never start; None if each predecessor is done, running, waiting or unknown.

    Args:
        after: IDs of the job's predecessors.
        state: Returns the state of a job.
    """
    for each in after:
        found = state(each)
        if found.phase in (Phase.FAILED, Phase.STOPPED):
            what = f"job {each}, which must be done before it, is {_phase(found)}"
            return what if what.endswith(REMEDY) else f"{what}. {REMEDY}"
    return None


def waits_for(after: Sequence[str], state: Callable[[str], JobState]) -> list[str]:
    """Return the IDs of the predecessors that are not done.

    Args:
        after: IDs of predecessors.
        state: Returns the state of a job.
    """
    return [each for each in after if state(each).phase is not Phase.DONE]


def _phase(state: JobState) -> str:
    return f"{state.phase}{': ' if state.reason else ''}{state.reason}"
