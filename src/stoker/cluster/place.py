"""The place of a process among the tasks of a job, from the environment that its launcher sets.

| launcher | rank | number of tasks |
|---|---|---|
| target `local` | `STOKER_RANK` | `STOKER_TASKS` |
| Slurm's `srun` | `SLURM_PROCID` | `SLURM_NTASKS` |
| Kubernetes, Indexed Job | `JOB_COMPLETION_INDEX` | `STOKER_TASKS`, or the job's workers |
| any other | from the task in `TF_CONFIG` | number of workers in `TF_CONFIG` |

Sources: srun(1), "OUTPUT ENVIRONMENT VARIABLES"; Kubernetes, "Indexed Job for Parallel Processing".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from stoker.cluster.nodelist import expand_nodelist
from stoker.cluster.resolver import ClusterSpec, read_tf_config
from stoker.cluster.sizes import allowed_sizes
from stoker.core.errors import ConfigError, Plain

RANK, TASKS = "STOKER_RANK", "STOKER_TASKS"
"""Environment variables of the target `local`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Says which task of a job this process is."""

    rank: int
    """Rank of the task, from 0; task 0 leads."""

    tasks: int
    """Number of tasks."""

    nodes: tuple[str, ...] = ()
    """Names of the machines, as far as the launcher provides them; several tasks may share one."""

    node: str = ""
    """Name of this task's machine; empty if the launcher does not provide it."""

    launcher: str = ""
    """Address of the machine from which the tasks were started; empty if the launcher does not set it."""

    cluster: ClusterSpec | None = None
    """Addresses of all tasks from `TF_CONFIG`, if the launcher has set it."""

    @property
    def is_spare(self) -> bool:
        """Whether this task is not needed: an elastic job was started with more tasks than can share its work."""
        return self.rank >= self.tasks

    @property
    def others(self) -> tuple[str, ...]:
        """Names or addresses of the job's other machines; they are used to find this machine's own address."""
        names = [name for name in (self.launcher, *self.nodes) if name and name != self.node]
        return tuple(dict.fromkeys(names))


def find_place(
    environ: Mapping[str, str], *, workers: int, min_workers: int | None = None
) -> Place:
    """Return the place of this process.

    Args:
        environ: The environment that the launcher has set.
        workers: Number of tasks that the job was submitted with.
        min_workers: Minimum number of tasks of an elastic job; None: exactly `workers` tasks are required.

    Raises:
        ConfigError: the environment contradicts itself or the job.
    """
    if TASKS in environ and RANK in environ:
        found = _place(environ, rank=RANK, tasks=_number(environ, TASKS))
    elif "SLURM_PROCID" in environ:
        found = _slurm(environ)
    elif "JOB_COMPLETION_INDEX" in environ:
        tasks = _number(environ, TASKS) if TASKS in environ else workers
        found = _place(environ, rank="JOB_COMPLETION_INDEX", tasks=tasks)
    elif (cluster := read_tf_config(environ)) is not None:
        found = Place(rank=cluster.rank, tasks=cluster.trainers, cluster=cluster)
    else:
        found = Place(rank=0, tasks=1)
    sizes = (workers,) if min_workers is None else allowed_sizes(fewest=min_workers, most=workers)
    if found.tasks in sizes:
        return found
    fewer = [size for size in sizes if size < found.tasks <= workers]
    # If another launcher has set the addresses, every listed task is waited for, so none can be left out.
    if not fewer or found.cluster is not None:
        raise ConfigError(
            f"a job of {workers} workers must be started as {' or '.join(map(str, sizes))} tasks",
            got=Plain(f"{found.tasks} tasks"),
            fix="Start each task with its rank: `srun --ntasks=N`, an Indexed Job, or STOKER_RANK and STOKER_TASKS.",
        )
    return replace(found, tasks=fewer[-1])


def _slurm(environ: Mapping[str, str]) -> Place:
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    nodes = expand_nodelist(listed) if listed else ()
    index = _number(environ, "SLURM_NODEID") if "SLURM_NODEID" in environ else len(nodes)
    own = nodes[index] if index < len(nodes) else environ.get("SLURMD_NODENAME", "")
    # SLURM_NTASKS is the number of tasks of the allocation; a step may have fewer.
    name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    tasks = _number(environ, name) if name in environ else 1
    return _place(
        environ,
        rank="SLURM_PROCID",
        tasks=tasks,
        nodes=nodes,
        node=own,
        launcher=environ.get("SLURM_LAUNCH_NODE_IPADDR", ""),
    )


def _place(
    environ: Mapping[str, str],
    *,
    rank: str,
    tasks: int,
    nodes: tuple[str, ...] = (),
    node: str = "",
    launcher: str = "",
) -> Place:
    number = _number(environ, rank)
    if not 0 <= number < tasks:
        raise ConfigError(
            f"{rank} must be from 0 to {tasks - 1}, because the job has {tasks} tasks",
            got=number,
            fix="Start the tasks with one launcher, which numbers them.",
        )
    return Place(rank=number, tasks=tasks, nodes=nodes, node=node, launcher=launcher)


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name]
    if not (text.isascii() and text.isdecimal()):
        raise ConfigError(
            f"{name} must be a whole number", got=text, fix="Do not set it: your launcher sets it."
        )
    return int(text)
