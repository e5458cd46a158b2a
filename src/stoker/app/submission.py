"""Creates a job, or the jobs of a sweep, from an experiment: description and code."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from stoker.app.experiment import Experiment, load_experiment, with_absolute_paths
from stoker.cluster.sizes import allowed_sizes
from stoker.core.errors import ConfigError
from stoker.jobs.archive import LIMIT_BYTES, Archive, pack
from stoker.jobs.job import VARIABLE, Job, Resources
from stoker.jobs.submission import find_predecessors
from stoker.jobs.sweep import Element, Sweep, combinations
from stoker.train.elastic import require_size

_LABEL_PART = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL = re.compile(f"{_LABEL_PART}={_LABEL_PART}")
"""Syntax of a label: `KEY=VALUE` by the rules of Kubernetes, without a prefix. The comment of a Slurm job accepts every
such label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobRequest:
    """The user's request."""

    folder: Path
    """The experiment's folder."""

    verb: str = "train"
    """Stoker's command that each task runs."""

    overrides: Sequence[str] = ()
    """`dotted.key=value`."""

    resources: Resources = field(default_factory=Resources)
    secrets: Sequence[str] = ()
    """Names of environment variables."""

    labels: Sequence[str] = ()
    """`KEY=VALUE` strings, which the scheduler shows."""

    after: Sequence[str] = ()
    """Jobs that must succeed before this one starts: IDs or their beginnings."""

    limit_bytes: int = LIMIT_BYTES
    """Maximum size of the code, bytes."""

    def __post_init__(self) -> None:
        for secret in self.secrets:
            if not VARIABLE.fullmatch(secret):
                raise ConfigError(
                    "--secret must be the name of an environment variable",
                    got=secret.partition("=")[0],  # the rest may be the secret value
                    fix="Give only the name. Set the value in `secrets` of the target, or export it before `stoker submit`.",
                )


def prepare_job(request: JobRequest) -> tuple[Experiment, Job, Archive]:
    """Return the experiment, its job and its code, without writing anything.

    Raises:
        ConfigError: the experiment is invalid, or its code is too large.
    """
    experiment = load_experiment(request.folder, overrides=request.overrides)
    runs = experiment.folder / experiment.runs
    archive = pack(experiment.folder, outside=_outside(experiment), limit_bytes=request.limit_bytes)
    job = Job(
        name=experiment.name,
        command=_command(request, request.overrides),
        folder=experiment.folder,
        runs=runs.resolve(),
        code=archive.digest,
        resources=_resources(experiment, request),
        secrets=tuple(sorted(set(request.secrets))),
        labels=_labels(request.labels),
        after=find_predecessors(request.after, runs.resolve()),
    )
    return experiment, job, archive


def prepare_sweep(
    request: JobRequest, sweeps: Sequence[str]
) -> tuple[Experiment, Sweep, list[Job], Archive]:
    """Return the experiment, the sweep, the job of each combination, and their code, without writing anything.

    Args:
        request: The part of the request that all combinations share.
        sweeps: Strings of the form `dotted.key=value,value`.

    Raises:
        ConfigError: the experiment is invalid with the values of a combination, or its code is too large.
    """
    found = combinations(sweeps)
    for each in found:
        load_experiment(request.folder, overrides=[*request.overrides, *each])
    experiment, job, archive = prepare_job(request)
    jobs = [replace(job, command=_command(request, [*request.overrides, *each])) for each in found]
    elements = [Element(job=job.id, settings=each) for job, each in zip(jobs, found, strict=True)]
    sweep = Sweep(name=job.name, runs=job.runs, elements=tuple(elements))
    return experiment, sweep, jobs, archive


def _command(request: JobRequest, overrides: Sequence[str]) -> tuple[str, ...]:
    return (request.verb, *(f"--set={each}" for each in with_absolute_paths(overrides)))


def _labels(texts: Sequence[str]) -> dict[str, str]:
    """Return the labels of a job, sorted by key; if a key is given twice, the last value is used.

    Raises:
        ConfigError: a string is not a label that every scheduler accepts.
    """
    found = {}
    for text in texts:
        if not _LABEL.fullmatch(text):
            raise ConfigError(
                "--label must be KEY=VALUE, each at most 63 letters, digits, `-`, `_` and `.`, with a letter or digit at both ends",
                got=text,
                fix="E.g. --label team=search.",
            )
        key, _, value = text.partition("=")
        found[key] = value
    return dict(sorted(found.items()))


def _resources(experiment: Experiment, request: JobRequest) -> Resources:
    """Return the resources of the job, with the minimum number of workers of an elastic training.

    Raises:
        ConfigError: an elastic training cannot have this number of workers.
    """
    needs, elastic = request.resources, experiment.train.elastic
    if elastic is None or request.verb not in ("run", "train"):
        return needs
    each = max(1, needs.gpus)
    what = "workers" if each == 1 else "replicas over all workers"
    require_size(elastic, needs.workers * each, what=what)
    sizes = allowed_sizes(fewest=elastic.min, most=needs.workers)
    # If each worker has several replicas, the number of workers is fixed.
    fewer = each == 1 and sizes[0] < needs.workers
    return replace(needs, min_workers=sizes[0] if fewer else None)


def _outside(experiment: Experiment) -> list[Path]:
    """Return the paths that are left out of a job's code: runs, models, data and the cache of remote data."""
    found = [experiment.folder / experiment.runs, experiment.models_root]
    if experiment.own_dataset is None:
        files = experiment.files
        named = [str(files.source), str(files.cache_dir) if files.cache_dir else ""]
        found += [Path(each) for each in named if each and "://" not in each]
    return [each for each in found if each.resolve() != experiment.folder]
