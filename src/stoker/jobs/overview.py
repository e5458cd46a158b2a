"""The jobs that a user can see, and their states."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.core.config import read_yaml
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.jobs.job import Job
from stoker.jobs.logs import SILENT_S, job_lines, workers_of
from stoker.jobs.places import find_place, open_job, places, read_submitted
from stoker.jobs.provider import HasRemoteLogs, JobEvent, JobState, Phase, Remote
from stoker.jobs.targets import Target, read_targets

EXPERIMENT = "stoker.yaml"


@dataclass(frozen=True, kw_only=True, slots=True)
class Here:
    """The targets and the folders of runs that commands in a folder use.

    The targets are those of the folder's experiment and of the user's file of targets. The folders of runs are that of
    the experiment, and those of `--runs`.
    """

    targets: Mapping[str, Target]
    runs: tuple[Path, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownJob:
    """A job and its state."""

    place: Path
    job: Job
    target: Target | None
    """The job's target; None if no target has accepted the job, or if its target is unknown here."""

    state: JobState


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """A job in the list of jobs."""

    state: JobState
    target: str
    """Name of the target; empty if no target has accepted the job."""


def read_here(folder: Path, runs: Sequence[Path] = ()) -> Here:
    """Return the targets and the folders of runs that commands in a folder use.

    Args:
        folder: The current folder, which need not be an experiment.
        runs: More folders of runs, in addition to the experiment's.

    Raises:
        ConfigError: stoker.yaml or the user's file of targets is not YAML.
    """
    file = folder / EXPERIMENT
    raw: dict[str, Any] = read_yaml(file) if file.is_file() else {}
    own = raw.get("runs", "runs")
    found = [folder / own] if isinstance(own, str) else []
    return Here(targets=read_targets(_section(raw, file), file=file), runs=(*found, *runs))


def find_job(named: str, here: Here) -> KnownJob:
    """Return the job with this ID, or the only job whose ID begins with this text.

    Raises:
        ConfigError: no job matches, or several do.
        UserError: the job belongs to another user, or its target does not answer.
    """
    place = find_place(named, here.runs)
    job = open_job(place)
    target = target_of(place, here.targets, folder=job.folder)
    return KnownJob(place=place, job=job, target=target, state=state_of(place, here.targets))


def state_of(place: Path, targets: Mapping[str, Target]) -> JobState:
    """Return the state of a job as its target reports it.

    Args:
        place: The job's folder.
        targets: Known targets by name; the targets of the job's experiment are added.

    Raises:
        UserError: the target does not answer, or the job belongs to another user.
    """
    target = target_of(place, targets, folder=open_job(place).folder)
    if target is None:
        return _without_target(place)
    state = target.open().state(place.name)
    submitted = read_submitted(place)
    if submitted is not None and state.submitted_s is None:
        return replace(state, submitted_s=submitted.submitted_s)
    return state


def fetch_logs(place: Path, targets: Mapping[str, Target]) -> str:
    """Copy the logs of a job to this machine if its target has them; return why that failed, or ""."""
    try:
        target = target_of(place, targets, folder=open_job(place).folder)
        provider = target.open() if target is not None else None
        if isinstance(provider, HasRemoteLogs):
            provider.fetch(place.name)
    except UserError as error:
        return error.line()
    return ""


def list_jobs(here: Here) -> tuple[list[Listed], list[str]]:
    """Return all jobs, newest first, and one line for each target that does not answer."""
    found: dict[str, Listed] = {}
    problems: dict[str, str] = {}
    seen: set[str] = set()
    known = places(here.runs)
    for target in [*here.targets.values(), *_further(known, here.targets)]:
        if target.name in seen:
            continue
        seen.add(target.name)
        try:
            for state in target.open().jobs():
                found[state.id] = Listed(state=state, target=target.name)
        except UserError as error:
            problems[target.name] = error.line()
    for job_id, place in known.items():
        if job_id not in found:
            submitted = read_submitted(place)
            name = submitted.target if submitted else ""
            state = _without_target(place)
            if name in seen:
                why = "its target does not know it any more"
                state = replace(state, reason=problems.get(name, why))
            found[job_id] = Listed(state=state, target=name)
    ordered = sorted(found.values(), key=lambda each: each.state.submitted_s or 0.0, reverse=True)
    return ordered, [f"target {name}: {line}" for name, line in problems.items()]


def stop_job(known: KnownJob) -> JobState:
    """Stop a job, after its tasks have saved; return its state.

    Raises:
        ConfigError: no target has the job, or its target is unknown here.
        UserError: the target does not answer, or the job belongs to another user.
    """
    if known.state.phase.is_over:
        return known.state
    if known.target is None:
        raise ConfigError(
            f"job {known.job.id} must be at a target that is known here",
            got=Plain(known.state.reason),
        )
    provider = known.target.open()
    provider.stop(known.job.id)
    return provider.state(known.job.id)


def events_of(known: KnownJob) -> Sequence[JobEvent]:
    """Return the events of a job, oldest first; none if the target does not report events."""
    provider = known.target.open() if known.target is not None else None
    return provider.events(known.job.id) if isinstance(provider, Remote) else ()


def lines_of_place(
    place: Path, targets: Mapping[str, Target], *, worker: int | None
) -> Iterator[str]:
    """Yield the lines that a job's tasks have printed so far, from the job's folder, or else from its target.

    Args:
        place: The job's folder.
        targets: Targets by name.
        worker: Rank of a task; None: all tasks.

    Raises:
        ConfigError: the worker does not exist.
        UserError: the target does not answer.
    """
    if not workers_of(place):
        target = target_of(place, targets, folder=open_job(place).folder)
        provider = target.open() if target is not None else None
        if isinstance(provider, Remote):
            return provider.log_lines(place.name, worker=worker, follow=False)
    return job_lines(place, worker=worker)


def lines_of(
    known: KnownJob, targets: Mapping[str, Target], *, worker: int | None
) -> Iterator[str]:
    """Yield the lines that a job's tasks print, until the job is over.

    Some targets may not share the folder of runs with this machine. For these, the logs are read from the folder if
    tasks write there soon after they start, and otherwise from the target.

    Args:
        known: The job.
        targets: Targets by name.
        worker: Rank of a task; None: all tasks.
    """
    provider = known.target.open() if known.target is not None else None
    if isinstance(provider, Remote) and not _has_logs_soon(known, targets):
        yield from provider.log_lines(known.job.id, worker=worker, follow=True)
        return
    silent_s: float | None = None

    def is_over() -> bool:
        nonlocal silent_s
        if provider is None:
            return True
        try:
            phase = state_of(known.place, targets).phase
        except UserError:
            # The logs come from the shared folder, so reading continues while the cluster's server restarts.
            now_s = time.monotonic()
            silent_s = silent_s if silent_s is not None else now_s
            if not isinstance(provider, Remote) or now_s - silent_s > SILENT_S:
                raise
            return False
        silent_s = None
        return phase.is_over

    yield from job_lines(known.place, worker=worker, until=is_over)


SHARED_S = 20.0
"""Maximum time between the start of tasks and the moment when this machine sees their logs on a shared file system,
seconds: Python must start, and NFS may show a new folder late."""

LOOK_S = 2.0
"""Pause between two checks, seconds."""


def _has_logs_soon(known: KnownJob, targets: Mapping[str, Target]) -> bool:
    """Wait until tasks run, and return whether their logs appear in the job's folder."""
    since_s: float | None = None
    answered_s = time.monotonic()
    while not workers_of(known.place):
        try:
            phase, answered_s = state_of(known.place, targets).phase, time.monotonic()
        except UserError:  # the cluster's server restarts
            if time.monotonic() - answered_s > SILENT_S:
                raise
            phase = Phase.UNKNOWN
        if phase.is_over or (since_s is not None and time.monotonic() - since_s > SHARED_S):
            return bool(workers_of(known.place))
        if phase is Phase.RUNNING and since_s is None:
            since_s = time.monotonic()
        time.sleep(LOOK_S)  # a shared file system sends no notification
    return True


def _without_target(place: Path) -> JobState:
    submitted = read_submitted(place)
    reason = "no target has accepted it: submit it again"
    if not os.access(place / "job.json", os.R_OK, effective_ids=True):
        reason = "it cannot be read: it may be another user's"
    elif submitted is not None:
        reason = f"its target {submitted.target!r} is not in targets.yaml or stoker.yaml"
    return JobState(
        id=place.name,
        scheduler_id=submitted.scheduler_id if submitted else "",
        phase=Phase.UNKNOWN,
        reason=reason,
        submitted_s=submitted.submitted_s if submitted else None,
    )


def target_of(place: Path, targets: Mapping[str, Target], *, folder: Path) -> Target | None:
    """Return the target that has accepted a job: a known target, or else a target of the job's experiment."""
    submitted = read_submitted(place)
    if submitted is None:
        return None
    if submitted.target in targets:
        return targets[submitted.target]
    return _targets_in(folder).get(submitted.target)


def _further(known: Mapping[str, Path], targets: Mapping[str, Target]) -> list[Target]:
    """Return the targets of known jobs that only the jobs' own experiments define."""
    found = {}
    for place in known.values():
        submitted = read_submitted(place)
        if submitted is None or submitted.target in targets or submitted.target in found:
            continue
        try:
            target = target_of(place, targets, folder=open_job(place).folder)
        except UserError:
            continue
        if target is not None:
            found[target.name] = target
    return list(found.values())


def _targets_in(folder: Path) -> dict[str, Target]:
    """Return the targets of an experiment; empty if the experiment is gone or cannot be read."""
    file = folder / EXPERIMENT
    try:
        return read_targets(_section(read_yaml(file), file), file=file) if file.is_file() else {}
    except ConfigError:
        return {}


def _section(raw: Mapping[str, Any], file: Path) -> dict[str, Any]:
    section = raw.get("targets") or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{file}: targets must be a section of `key: value` lines", got=section)
    return section
