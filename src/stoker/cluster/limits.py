"""Limits of this process (memory, cores, open files), counts of the kernel's refusals, and shares for children."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import ConfigError, Plain, UserError

CGROUPS = Path("/sys/fs/cgroup")
"""Mount point of the kernel's control groups."""

WORKER_FILES = 256
"""Number of open files that a worker may need: TensorFlow opens about 40, and each shard adds one."""

FILES_EACH = 4
"""Number of descriptors that the launcher holds for each worker: output, heartbeats, and one spare."""

OWN_FILES = 32
"""Number of descriptors that the launcher needs for itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusals:
    """How often the kernel has refused memory or processes to this control group since the group was created."""

    out_of_memory: int = 0
    """Number of processes that were killed because the memory was used up."""

    too_many_processes: int = 0
    """Number of processes and threads that were not started."""


def memory_limit(root: Path = CGROUPS) -> int | None:
    """Return the memory limit of the container's control group (version 1 or 2); None: no limit."""
    for place in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / place).read_text().strip()
        except OSError:
            continue
        # Without a limit, version 2 reports "max", and version 1 a number larger than the memory of any machine.
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def usable_memory() -> int:
    """Return the bytes of memory that this process may use: the machine's, or its container's if less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return physical if limit is None else min(physical, limit)


def cpu_limit(root: Path = CGROUPS) -> float | None:
    """Return the number of cores that the container's control group allows on average; None: no limit."""
    try:
        quota, _, period = (root / "cpu.max").read_text().strip().partition(" ")
    except OSError:
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    # Without a limit, version 2 reports "max", and version 1 reports -1.
    if not quota.isdigit() or not period.isdigit() or not int(period):
        return None
    return int(quota) / int(period)


def usable_cores(root: Path = CGROUPS) -> int:
    """Return how many threads can compute at the same time.

    This is the number of cores in the CPU affinity, or the CPU limit of the container if it is smaller.
    """
    cores, limit = len(os.sched_getaffinity(0)), cpu_limit(root)
    return max(1, min(cores, math.ceil(limit) if limit else cores))


def raise_open_files(need: int) -> None:
    """Raise this process's limit of open files to a number, or to the highest number that the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = need if hard == resource.RLIM_INFINITY else min(need, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def kernel_refusals(
    *, membership: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS
) -> Refusals:
    """Return how often the kernel refused memory or processes to this process's control group (version 1 or 2).

    Child processes in the same group are included. Counters that cannot be read are 0.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return Refusals()
    places: dict[str, Path] = {}
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in controllers.split(",") if controllers else ["unified"]:
            top = root / name if controllers else root
            own = top / path.lstrip("/")
            # Inside a container the path may be that of the host; then the group is at the mount point itself.
            places[name] = own if own.is_dir() else top
    return Refusals(
        out_of_memory=_count(places, "memory.events", "oom_kill")
        or _count(places, "memory.oom_control", "oom_kill", controller="memory"),
        too_many_processes=_count(places, "pids.events", "max")
        or _count(places, "pids.events", "max", controller="pids"),
    )


def _count(places: dict[str, Path], file: str, key: str, *, controller: str = "unified") -> int:
    folder = places.get(controller)
    if folder is None:
        return 0
    try:
        lines = (folder / file).read_text().splitlines()
    except OSError:
        return 0
    counts = [line.split()[1] for line in lines if line.split()[:1] == [key]]
    return int(counts[0]) if counts else 0


def allow_open_files(processes: int) -> None:
    """Raise this process's limit of open files, which its children inherit.

    Args:
        processes: Number of child processes.

    Raises:
        UserError: the hard limit is too low for them.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    need = max(WORKER_FILES, OWN_FILES + FILES_EACH * processes)
    if hard != resource.RLIM_INFINITY and hard < need:
        raise UserError(
            f"{processes} processes need a limit of at least {need} open files",
            got=Plain(f"{hard}"),
            fix="Raise it with `ulimit -n`, or in the container's settings.",
        )
    raise_open_files(need)


THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
"""Environment variables that set the number of threads with which libraries compute."""


def share_cores(cores: Sequence[int], processes: int) -> list[tuple[int, ...]]:
    """Divide cores into parts of equal size, each of neighboring cores; a remainder is not used.

    Args:
        cores: Numbers of the usable cores.
        processes: Number of parts.

    Raises:
        ConfigError: there are fewer cores than processes.
    """
    each = len(cores) // processes
    if not each:
        raise ConfigError(
            "--pin needs a core for each process",
            got=Plain(f"{processes} processes, {len(cores)} cores"),
            fix="Leave --pin out, or start fewer workers.",
        )
    in_order = sorted(cores)
    return [tuple(in_order[rank * each : (rank + 1) * each]) for rank in range(processes)]


def share_threads(environ: Mapping[str, str], *, cores: int, processes: int) -> dict[str, str]:
    """Return environment variables that limit threads so that all processes together use no more than the cores.

    Args:
        environ: The user's environment; variables that are set there are left out.
        cores: Cores for all processes together.
        processes: Number of processes.
    """
    each = str(max(1, cores // processes))
    return {name: each for name in THREADS if name not in environ}
