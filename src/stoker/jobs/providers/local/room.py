"""How many workers of a job this machine has room for."""

from __future__ import annotations

import os

from stoker.cluster.doctor.gpus import read_gpus
from stoker.cluster.doctor.visible import visible_names
from stoker.cluster.limits import usable_cores, usable_memory
from stoker.cluster.sizes import allowed_sizes
from stoker.core.errors import ConfigError, Plain
from stoker.jobs.job import Resources


def workers_here(needs: Resources) -> int:
    """Return how many workers of a job start here: all, or of an elastic job the largest allowed number that fits.

    An elastic job without `--cpus` has at most one worker per core, if its fewest workers fit that way.

    Raises:
        ConfigError: the machine lacks GPUs, cores or memory even for the fewest.
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
        f"{option} must leave enough of this machine for all workers",
        got=Plain(f"{sizes[0]} workers with {each:g} each, and {has:.4g} here"),
        fix="Request less, or submit it to another target: --on NAME.",
    )


def why_fewer(needs: Resources) -> str:
    """Return a message if fewer workers start here than the job may have; empty if all do. Raises as `workers_here`."""
    workers = workers_here(needs)
    if workers == needs.workers:
        return ""
    return f"{workers} of {needs.workers} workers, as this machine has no room for more"


def _room(needs: Resources) -> dict[str, tuple[float, float]]:
    """Return option -> what each worker needs, and what the machine has."""
    room: dict[str, tuple[float, float]] = {}
    if needs.gpus:
        room["--gpus"] = needs.gpus, len(visible_names(read_gpus().states, os.environ))
    if needs.cpus:
        room["--cpus"] = needs.cpus, usable_cores()
    if needs.memory_gib:
        room["--memory"] = needs.memory_gib, usable_memory() / 2**30
    return room
