"""Submits a job once, however often the command is repeated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.files import alone, writable, write_atomic
from stoker.jobs.archive import CODE, Archive
from stoker.jobs.job import Job, write_job
from stoker.jobs.overview import state_of
from stoker.jobs.places import add_to_index, find_place, read_submitted
from stoker.jobs.predecessors import require_may_be_done
from stoker.jobs.provider import JobState, Phase
from stoker.jobs.sweep import element_of, find_sweep
from stoker.jobs.targets import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """The result of a submission."""

    state: JobState
    target: str
    """Name of the target that has the job."""

    already: bool
    """Whether an earlier submission of the job waits or runs, so that nothing was submitted."""

    again: bool
    """Whether an earlier submission of the job is over, and this submission starts the job again."""


def find_predecessors(named: Iterable[str], runs: Path) -> tuple[str, ...]:
    """Return the IDs of the named jobs, sorted.

    Args:
        named: IDs of jobs, or beginnings that match only one ID. The ID of a sweep means all its jobs, and `SWEEP/3`
            its job 3.
        runs: Folder of runs, in addition to the index.

    Raises:
        ConfigError: no job has this ID.
    """
    return tuple(sorted({job for each in named for job in _jobs_of(each, runs)}))


def _jobs_of(named: str, runs: Path) -> list[str]:
    first, slash, number = named.partition("/")
    sweep = find_sweep(first, [runs])
    if sweep is None:
        return [find_place(named, [runs]).name]
    if slash:
        return [element_of(sweep, number).job]
    return [each.job for each in sweep.elements]


def require_predecessors(job: Job, target: str, targets: Mapping[str, Target]) -> None:
    """Refuse a job that would wait forever, or would wait for jobs on another target.

    Args:
        job: The job to submit.
        target: Name of the job's target.
        targets: All targets.

    Raises:
        ConfigError: a predecessor is on another target, has failed, was stopped, or is in an unknown state.
        UserError: the target does not answer.
    """
    for each in job.after:
        place = find_place(each, [job.runs])
        submitted = read_submitted(place)
        if submitted is not None and submitted.target != target:
            raise ConfigError(
                f"--after must name jobs of target {target!r}",
                got=Plain(f"{each}, which is at {submitted.target!r}"),
                fix=f"Submit both to one target: --on {submitted.target}.",
            )
        require_may_be_done(each, state_of(place, targets))


def submit(job: Job, archive: Archive, *, target: Target, targets: Mapping[str, Target]) -> Receipt:
    """Submit a job, or find its earlier submission.

    Args:
        job: The job.
        archive: The job's code.
        target: The target to submit to.
        targets: All targets: the earlier submission may be on another target.

    Raises:
        UserError: the target refuses the job (then nothing is written) or does not answer, the folder of runs cannot
            be written, or an earlier submission to another target may still run.
    """
    provider = target.open()
    provider.validate(job)
    require_predecessors(job, target.name, targets)
    with writable(job.runs, what="the folder of runs", fix="Name another one: --set runs=DIR."):
        job.place.mkdir(parents=True, exist_ok=True)
        with alone(job.place / "submit.lock"):
            earlier = _earlier(job, target, targets)
            if earlier is not None and earlier.already:
                return earlier
            write_atomic(job.place / CODE, archive.content)
            write_job(job)
            add_to_index(job.place)
            provider.submit(job)
            again = earlier is not None
            state = provider.state(job.id)
            return Receipt(state=state, target=target.name, already=False, again=again)


def _earlier(job: Job, target: Target, targets: Mapping[str, Target]) -> Receipt | None:
    """Return the earlier submission of a job; None if there is none."""
    submitted = read_submitted(job.place)
    if submitted is None:
        return None
    add_to_index(job.place)
    state = state_of(job.place, targets)
    if state.phase is Phase.UNKNOWN and submitted.target != target.name:
        raise UserError(
            f"job {job.id} must be over at target {submitted.target!r} before it is submitted to another",
            got=Plain(state.reason or "its state there is not known"),
            fix=f"Stop it there: stoker stop {job.id}.",
        )
    already = not state.phase.is_over and state.phase is not Phase.UNKNOWN
    return Receipt(state=state, target=submitted.target, already=already, again=not already)
