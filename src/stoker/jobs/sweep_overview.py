"""The states of sweeps: how many jobs wait, run and are over. Also stops all jobs of a sweep."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from stoker.jobs.overview import Here, KnownJob, Listed, find_job, list_jobs, stop_job, target_of
from stoker.jobs.places import open_job
from stoker.jobs.provider import Phase, StopsMany
from stoker.jobs.sweep import Element, Sweep, element_of, find_sweep, sweeps
from stoker.jobs.targets import Target

STOPS_AT_ONCE = 16
"""Maximum number of jobs that are stopped at the same time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepState:
    """A sweep and the states of its jobs."""

    sweep: Sweep

    jobs: tuple[tuple[Element, Listed | None], ...]
    """The elements with the states of their jobs; None: the job does not exist."""

    @property
    def submitted_s(self) -> float:
        """Time of the newest submission among the jobs, seconds since the epoch."""
        known = [each.state.submitted_s or 0.0 for _, each in self.jobs if each is not None]
        return max(known, default=0.0)

    @property
    def target(self) -> str:
        """Name of the jobs' target; if there are several, their names separated by commas."""
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
    """Return all sweeps and the jobs outside sweeps, newest first, and a line for each target that does not answer."""
    listed, problems = list_jobs(here)
    found = _sweep_states(sweeps(here.runs).values(), listed)
    inside = {element.job for each in found for element in each.sweep.elements}
    alone = [each for each in listed if each.state.id not in inside]
    together: list[Listed | SweepState] = [*alone, *found]
    return sorted(together, key=_submitted_s, reverse=True), problems


def find_element(named: str, here: Here) -> tuple[Sweep | None, str]:
    """Return the sweep and "" if the name is that of a sweep, otherwise None and the name of a job.

    Args:
        named: `JOB`, `JOB/...`, `SWEEP`, `SWEEP/NUMBER` or `SWEEP/NUMBER/...`. `SWEEP/3` becomes the ID of job 3.
        here: The jobs and targets known in the current folder.

    Raises:
        ConfigError: the element does not exist, or several sweeps match.
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


def stop_sweep(sweep: Sweep, here: Here) -> SweepState:
    """Stop the jobs of a sweep and return their states; waiting jobs are stopped first, so that none starts.

    Raises:
        UserError: a job could not be stopped.
    """
    of_target: dict[str, list[str]] = {}
    targets: dict[str, Target] = {}
    alone: list[str] = []
    for element in sweep.elements:
        place = sweep.place.parent / element.job
        if not (place / "job.json").exists():
            continue  # the submission of this job was interrupted
        target = target_of(place, here.targets, folder=open_job(place).folder)
        if target is None:
            alone.append(element.job)
        else:
            targets[target.name] = target
            of_target.setdefault(target.name, []).append(element.job)
    for name, target in targets.items():
        provider = target.open()
        if isinstance(provider, StopsMany):
            provider.stop_all(of_target[name])
        else:
            alone += of_target[name]
    _stop([find_job(job_id, here) for job_id in alone])
    return state_of_sweep(sweep, here)[0]


def _stop(jobs: Sequence[KnownJob]) -> None:
    waiting = [each for each in jobs if each.state.phase in (Phase.WAITING, Phase.RESTARTING)]
    with ThreadPoolExecutor(STOPS_AT_ONCE) as pool:
        for some in (waiting, [each for each in jobs if each not in waiting]):
            stops = [pool.submit(stop_job, each) for each in some]
            for stop in stops:
                stop.result()


def _sweep_states(found: Iterable[Sweep], listed: Sequence[Listed]) -> list[SweepState]:
    states = {each.state.id: each for each in listed}
    return [
        SweepState(sweep=sweep, jobs=tuple((each, states.get(each.job)) for each in sweep.elements))
        for sweep in found
    ]


def _submitted_s(each: Listed | SweepState) -> float:
    return each.submitted_s if isinstance(each, SweepState) else each.state.submitted_s or 0.0
