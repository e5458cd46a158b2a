"""The states of sweeps: how many of their jobs wait, run and are over, and the end of all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from stoker.core.errors import UserError
from stoker.jobs.overview import Here, KnownJob, Listed, find_job, list_jobs, stop_job
from stoker.jobs.provider import JobState, Phase
from stoker.jobs.sweep import Element, Sweep, element_of, find_sweep, sweeps

STOPS_AT_ONCE = 16
"""Jobs that get the request to save and end at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepState:
    """A sweep and the states of its jobs."""

    sweep: Sweep

    jobs: tuple[tuple[Element, Listed | None], ...]
    """Each element and what is known of its job; None: nothing."""

    @property
    def submitted_s(self) -> float:
        """Time of the newest submission of one of them, seconds since the epoch."""
        known = [each.state.submitted_s or 0.0 for _, each in self.jobs if each is not None]
        return max(known, default=0.0)

    @property
    def target(self) -> str:
        """Name of the target, of several with commas."""
        return ", ".join(sorted({each.target for _, each in self.jobs if each and each.target}))

    def counts(self) -> str:
        """Return the number of jobs in each phase, e.g. `2 running, 5 waiting, 1 done`."""
        phases = Counter(each.state.phase if each else Phase.UNKNOWN for _, each in self.jobs)
        return ", ".join(f"{phases[phase]} {phase}" for phase in _ORDER if phases[phase])


_ORDER = (
    *(Phase.RUNNING, Phase.RESTARTING, Phase.WAITING, Phase.DONE),
    *(Phase.FAILED, Phase.STOPPED, Phase.UNKNOWN),
)


def list_with_sweeps(here: Here) -> tuple[list[Listed | SweepState], list[str]]:
    """Return the jobs that belong to no sweep, and the sweeps, the newest first; and a line for each silent target."""
    listed, problems = list_jobs(here)
    found = _sweep_states(sweeps(here.runs).values(), listed)
    inside = {element.job for each in found for element in each.sweep.elements}
    alone = [each for each in listed if each.state.id not in inside]
    together: list[Listed | SweepState] = [*alone, *found]
    return sorted(together, key=_submitted_s, reverse=True), problems


def find_element(named: str, here: Here) -> tuple[Sweep | None, str]:
    """Return the sweep that `SWEEP` names and "", or None and what names a job: `SWEEP/3` is the job of element 3.

    Args:
        named: `JOB`, `JOB/...`, `SWEEP`, `SWEEP/NUMBER` or `SWEEP/NUMBER/...`.
        here: What is known in the current folder.

    Raises:
        ConfigError: no such element, or more than one sweep.
    """
    first, slash, rest = named.partition("/")
    sweep = find_sweep(first, here.runs)
    if sweep is None:
        return None, named
    if not slash:
        return sweep, ""
    number, slash, more = rest.partition("/")
    return None, f"{element_of(sweep, number).job}{slash}{more}"


def state_of_sweep(sweep: Sweep, here: Here) -> tuple[SweepState, list[str]]:
    """Return the states of a sweep's jobs, and a line for each target that does not answer."""
    listed, problems = list_jobs(here)
    return _sweep_states([sweep], listed)[0], problems


def stop_sweep(sweep: Sweep, here: Here) -> list[JobState]:
    """Stop the jobs of a sweep: those that wait first, so that none starts meanwhile.

    Raises:
        UserError: one of them could not be stopped; the others are.
    """
    jobs = [find_job(element.job, here) for element in sweep.elements if _is_there(element, sweep)]
    waiting = [each for each in jobs if each.state.phase in (Phase.WAITING, Phase.RESTARTING)]
    others = [each for each in jobs if each not in waiting]
    return [*_stop(waiting), *_stop(others)]


def _stop(jobs: Sequence[KnownJob]) -> list[JobState]:
    errors: list[UserError] = []

    def stop(job: KnownJob) -> JobState:
        try:
            return stop_job(job)
        except UserError as error:
            errors.append(error)
            return job.state

    with ThreadPoolExecutor(STOPS_AT_ONCE) as pool:
        states = list(pool.map(stop, jobs))
    if errors:
        raise errors[0]
    return states


def _is_there(element: Element, sweep: Sweep) -> bool:
    return (sweep.place.parent / element.job / "job.json").exists()


def _sweep_states(found: Iterable[Sweep], listed: Sequence[Listed]) -> list[SweepState]:
    states = {each.state.id: each for each in listed}
    return [
        SweepState(sweep=sweep, jobs=tuple((each, states.get(each.job)) for each in sweep.elements))
        for sweep in found
    ]


def _submitted_s(each: Listed | SweepState) -> float:
    return each.submitted_s if isinstance(each, SweepState) else each.state.submitted_s or 0.0
