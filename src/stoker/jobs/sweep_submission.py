"""Submits the missing jobs of a sweep together."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.core.errors import ConfigError, Plain
from stoker.core.files import alone, writable, write_atomic
from stoker.jobs.archive import CODE, Archive
from stoker.jobs.job import Job, write_job
from stoker.jobs.overview import state_of
from stoker.jobs.places import add_to_index, read_submitted
from stoker.jobs.provider import Array, ArrayProvider, Phase
from stoker.jobs.submission import require_predecessors
from stoker.jobs.sweep import Sweep, write_sweep
from stoker.jobs.targets import Target


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepReceipt:
    """The result of a sweep's submission."""

    submitted: tuple[str, ...]
    """IDs of the jobs that this call has submitted."""

    live: tuple[str, ...]
    """IDs of the jobs that were already waiting or running, perhaps on another target."""

    done: tuple[str, ...]
    """IDs of the jobs that are done."""


def array_of(sweep: Sweep, jobs: Sequence[Job], *, at_once: int | None) -> Array:
    """Return all jobs of a sweep as the `Array` that a provider submits."""
    numbered = dict(enumerate(jobs))
    return Array(id=sweep.id, place=sweep.place, jobs=numbered, at_once=at_once)


def require_submittable(
    array: Array, *, target: Target, targets: Mapping[str, Target]
) -> ArrayProvider:
    """Check, before anything is written, that a target can run these jobs; return its provider.

    Raises:
        ConfigError: the target cannot run them, accepts only one job at a time, or a predecessor will not be done.
        UserError: the target does not answer.
    """
    provider = target.open()
    if not isinstance(provider, ArrayProvider):
        raise ConfigError(
            "--sweep needs a target that accepts many jobs at once",
            got=Plain(f"{target.name}, whose provider is {target.provider}"),
            fix="Submit each combination separately, with --set.",
        )
    provider.validate_array(array)
    require_predecessors(array.jobs[0], target.name, targets)
    return provider


def submit_sweep(
    sweep: Sweep,
    jobs: Sequence[Job],
    archive: Archive,
    *,
    at_once: int | None,
    target: Target,
    targets: Mapping[str, Target],
) -> SweepReceipt:
    """Submit the jobs of a sweep that are neither submitted nor done.

    Args:
        sweep: The sweep.
        jobs: The jobs, in the order of the sweep's elements.
        archive: The code of the jobs.
        at_once: Maximum number of jobs that run at the same time; None: the target's own limit.
        target: The target to submit to.
        targets: All targets: a job may already be on another target.

    Raises:
        UserError: the target refuses the jobs (then nothing is written) or does not answer, or the folder of runs
            cannot be written.
    """
    whole = array_of(sweep, jobs, at_once=at_once)
    provider = require_submittable(whole, target=target, targets=targets)
    with writable(sweep.runs, what="the folder of runs", fix="Name another one: --set runs=DIR."):
        sweep.place.mkdir(parents=True, exist_ok=True)
        with alone(sweep.place / "submit.lock"):
            phases = [_phase(job, targets) for job in jobs]
            live = {n for n, phase in enumerate(phases) if phase and not phase.is_over}
            done = {n for n, phase in enumerate(phases) if phase is Phase.DONE}
            wanted = {n: job for n, job in enumerate(jobs) if n not in live | done}
            if wanted:
                write_atomic(sweep.place / CODE, archive.content)
                for job in wanted.values():
                    _write(job, sweep.place / CODE)
                write_sweep(sweep)
                add_to_index(sweep.place)
                provider.submit_array(replace(whole, jobs=wanted))
    return SweepReceipt(
        submitted=tuple(job.id for job in wanted.values()),
        live=tuple(jobs[n].id for n in sorted(live)),
        done=tuple(jobs[n].id for n in sorted(done)),
    )


def _phase(job: Job, targets: Mapping[str, Target]) -> Phase | None:
    """Return the phase of a job's earlier submission; None if there is none, or if its state is unknown."""
    if read_submitted(job.place) is None:
        return None
    phase = state_of(job.place, targets).phase
    return None if phase is Phase.UNKNOWN else phase


def _write(job: Job, code: Path) -> None:
    write_job(job)
    link = job.place / CODE
    link.unlink(missing_ok=True)
    try:
        os.link(code, link)
    except OSError:  # the file system has no hard links
        shutil.copyfile(code, link)
    with contextlib.suppress(OSError):
        add_to_index(job.place)
