"""Checks that the machines of a partition can run a job: Slurm would let some impossible jobs wait forever."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain
from stoker.jobs.job import Job
from stoker.jobs.providers.slurm.client import NodeGroup
from stoker.jobs.providers.slurm.script import workers_per_node
from stoker.jobs.providers.slurm.settings import SlurmTarget

_MIB = 1024


def require_capacity(job: Job, target: SlurmTarget, groups: Sequence[NodeGroup]) -> None:
    """Refuse a job that needs more than any machine has, or more machines than exist.

    Args:
        job: The job.
        target: The settings of the target.
        groups: The machines of all partitions.

    Raises:
        ConfigError: the job does not fit; the message says what the partition has.
    """
    chosen = [group for group in groups if _is_chosen(group, target)]
    if not chosen and target.partition is not None:
        known = sorted({group.partition for group in groups})
        raise ConfigError(
            "partition must exist in the cluster",
            got=target.partition,
            fix=nearest(target.partition, known),
        )
    if not chosen:  # the cluster has no default partition, which sbatch reports
        return
    needs, per_node = job.resources, workers_per_node(job, target)
    where = f"partition {chosen[0].partition}"
    _at_most(
        needs.gpus * per_node, max(each.gpus for each in chosen), f"GPUs of a machine in {where}"
    )
    cpus = (needs.cpus or 1) * per_node
    _at_most(cpus, max(each.cpus for each in chosen), f"cores of a machine in {where}")
    memory = (needs.memory_gib or 0) * per_node
    _at_most(
        memory,
        max(each.memory_mib for each in chosen) / _MIB,
        f"GiB of memory of a machine in {where}",
    )
    fewest = needs.min_workers or needs.workers
    _at_most(fewest // per_node, sum(each.nodes for each in chosen), f"machines of {where}")
    _require_time(needs.time_limit_s, chosen[0])


def _is_chosen(group: NodeGroup, target: SlurmTarget) -> bool:
    if target.partition is None:
        return group.is_default
    return group.partition in target.partition.split(",")


def _at_most(requested: float, most: float, what: str) -> None:
    if requested > most:
        raise ConfigError(
            f"a job must request at most the {most:g} {what}",
            got=Plain(f"{requested:g}"),
            fix="Request less, or choose another partition.",
        )


def _require_time(limit_s: float | None, group: NodeGroup) -> None:
    most_s = seconds(group.time_limit)
    if limit_s is not None and most_s is not None and limit_s > most_s:
        raise ConfigError(
            f"the time limit must be at most {most_s:g} s, the limit of partition {group.partition}",
            got=Plain(f"{limit_s:g} s"),
            fix="Request less time: at the limit the job saves, and continues in its next start.",
        )


def seconds(limit: str) -> float | None:
    """Convert a limit of sinfo, `[D-]H:M:S` or `M:S`, to seconds; None without one."""
    days, dash, clock = limit.rpartition("-")
    parts = clock.split(":")
    if not all(part.isdecimal() for part in parts) or (dash and not days.isdecimal()):
        return None
    total = 0
    for part in parts:
        total = 60 * total + int(part)
    return float(total + 86400 * int(days or 0))
