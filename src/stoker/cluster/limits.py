"""The limits that the kernel ends a process for, and what it has counted."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import ConfigError, Plain, UserError

CGROUPS = Path("/sys/fs/cgroup")
"""Where the kernel shows its control groups."""

WORKER_FILES = 256
"""Open files that a worker may need: TensorFlow takes some 40, each shard that is read one more."""

FILES_EACH = 4
"""Descriptors that the launcher holds for a worker: its output and its beats, with one to spare."""

OWN_FILES = 32
"""Descriptors that the launcher needs for itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusals:
    """How often the kernel has refused this control group something, since it exists."""

    out_of_memory: int = 0
    """Processes killed because memory was used up."""

    too_many_processes: int = 0
    """Processes and threads that were not started."""


def memory_limit(root: Path = CGROUPS) -> int | None:
    """Most bytes that the control group of a container may use, version 2 or 1; None: no limit."""
    for place in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            text = (root / place).read_text().strip()
        except OSError:
            continue
        # Without a limit version 2 says "max", and version 1 a number that no machine has.
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return None


def usable_memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's where less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    return physical if limit is None else min(physical, limit)


def cpu_limit(root: Path = CGROUPS) -> float | None:
    """Average cores that the container's cgroup (version 2 or 1) allows; None: no limit."""
    try:
        quota, _, period = (root / "cpu.max").read_text().strip().partition(" ")
    except OSError:
        try:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text().strip()
            period = (root / "cpu/cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    # Without a limit, version 2 says "max" and version 1 says -1.
    if not quota.isdigit() or not period.isdigit() or not int(period):
        return None
    return int(quota) / int(period)


def usable_cores(root: Path = CGROUPS) -> int:
    """Number of useful processes or threads: the CPU affinity, or a container's limit."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limit = cpu_limit(root)
    return max(1, min(cores or 1, math.ceil(limit) if limit else cores or 1))


def raise_open_files(need: int) -> None:
    """Raise this process's limit of open files to so many, or to what the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = need if hard == resource.RLIM_INFINITY else min(need, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def kernel_refusals(
    *, membership: Path = Path("/proc/self/cgroup"), root: Path = CGROUPS
) -> Refusals:
    """What the kernel has counted for the control group of this process, under version 2 or 1.

    A process of ours that is in no other group is counted with it. Where nothing can be read,
    nothing was counted.
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
            # Inside a container the path may be the host's, and the group what is mounted.
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
    """Raise this process's limit of open files as far as it may, which its children inherit.

    Args:
        processes: How many it will start.

    Raises:
        UserError: they would not have enough even so.
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
"""Environment variables by which libraries are told how many threads compute at once."""


def share_cores(cores: Sequence[int], processes: int) -> list[tuple[int, ...]]:
    """Cut the cores into equal parts of neighbours; what is left over goes to nobody.

    Args:
        cores: Numbers of the cores that may be used.
        processes: How many parts.

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
    """Thread counts by which N processes compute on no more cores than there are.

    Args:
        environ: What the user has set is let be.
        cores: How many may be used by all together.
        processes: How many share them.
    """
    each = str(max(1, cores // processes))
    return {name: each for name in THREADS if name not in environ}
