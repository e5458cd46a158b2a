"""Computes how many workers of a job this machine has room for."""

from __future__ import annotations

import os

from stoker.cluster.doctor.gpus import read_gpus
from stoker.cluster.doctor.visible import visible_names
from stoker.cluster.limits import usable_cores, usable_memory
from stoker.cluster.sizes import allowed_sizes
from stoker.core.errors import ConfigError, Plain
from stoker.jobs.job import Resources


def workers_here(needs: Resources) -> int:
    """Return how many workers of a job start here: all; for an elastic job, the largest allowed number that fits.

    An elastic job without `--cpus` gets at most one worker per core, unless its minimum number of workers is larger.

    Raises:
        ConfigError: the machine has too few GPUs or cores, or too little memory, even for the minimum number of
            workers.
    """
    sizes = allowed_sizes(fewest=needs.min_workers or needs.workers, most=needs.workers)
    room = _room(needs)
    fitting = [size for size in sizes if all(each * size <= has for each, has in room.values())]
    if fitting:
        cores = usable_cores()
        return max((size for size in fitting if size <= cores), default=fitting[0])
    option, (each, has) = next(
        (option, pair) for option, pair in room.items() if pair[0] * sizes[0] > pair[1]
    )
    raise ConfigError(
        f"{option} must be small enough that all workers fit on this machine",
        got=Plain(f"{sizes[0]} workers with {each:g} each, and {has:.4g} here"),
        fix="Request less, or submit it to another target: --on NAME.",
    )


def why_fewer(needs: Resources) -> str:
    """Return a message if fewer workers start here than the job requests, else "".

    Raises:
        ConfigError: as for `workers_here`.
    """
    workers = workers_here(needs)
    if workers == needs.workers:
        return ""
    return f"{workers} of {needs.workers} workers, as this machine has no room for more"


def _room(needs: Resources) -> dict[str, tuple[float, float]]:
    """Return option -> the amount that each worker needs, and the amount that the machine has."""
    room: dict[str, tuple[float, float]] = {}
    if needs.gpus:
        room["--gpus"] = needs.gpus, len(visible_names(read_gpus().states, os.environ))
    if needs.cpus:
        room["--cpus"] = needs.cpus, usable_cores()
    if needs.memory_gib:
        room["--memory"] = needs.memory_gib, usable_memory() / 2**30
    return room
