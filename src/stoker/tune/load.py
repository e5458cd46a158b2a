"""What other processes take of the cores while something is measured, by Linux's own counters."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

STAT = Path("/proc/stat")
"""CPU time by core and kind. Source: proc_stat(5)."""

IDLE_FIELDS = (3, 4)
"""idle and iowait: of the numbers behind a core's name those in which it did nothing."""

GUEST_FIELDS = (8, 9)
"""guest and guest_nice, which are counted in user and nice already."""

SESSION_FIELD, OWN_FIELDS = 3, slice(11, 15)
"""Behind the name in /proc/PID/stat: its session; utime, stime, cutime and cstime.
Source: proc_pid_stat(5)."""

QUIET_SHARE = 0.1
"""Of the cores' time: what the kernel and an idle machine's own services take is less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """How busy others kept the cores that a measurement could use."""

    cores: int
    """That this process may use."""

    others: float
    """Of them, how many other processes used on the mean; another guest of the same host too."""

    @property
    def is_quiet(self) -> bool:
        """Whether a measurement had the machine to itself."""
        return self.others <= QUIET_SHARE * self.cores

    def text(self) -> str:
        """For a person, a clause."""
        return f"other processes took {self.others:.1f} of its {self.cores} cores"


@contextmanager
def watched_load(*sessions: int) -> Iterator[Callable[[], Load | None]]:
    """Look at what others take of the cores from here to the end of the block.

    Args:
        sessions: Ids of the processes that are measured, each of which leads a session of its own:
            neither what they have started nor this process is another one.

    Yields:
        The load up to the end of the block; None where there is no /proc/stat, as outside of Linux.
    """
    begun = _Counted.now(sessions)
    found: list[Load | None] = []
    try:
        yield lambda: found[-1] if found else None
    finally:
        found.append(_between(begun, _Counted.now(sessions)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Counted:
    """CPU seconds by now."""

    wall_s: float
    busy_s: float | None
    """Of the cores that this process may use, by anyone; None: not told."""

    own_s: float
    cores: int

    @classmethod
    def now(cls, sessions: Collection[int]) -> _Counted:
        cores = os.sched_getaffinity(0)
        return cls(
            wall_s=time.monotonic(),
            busy_s=busy_s(STAT.read_text(), cores) if STAT.is_file() else None,
            own_s=_own_s(sessions),
            cores=len(cores),
        )


def _between(begun: _Counted, end: _Counted) -> Load | None:
    wall_s = end.wall_s - begun.wall_s
    if begun.busy_s is None or end.busy_s is None or wall_s <= 0:
        return None
    others_s = end.busy_s - begun.busy_s - (end.own_s - begun.own_s)
    return Load(cores=end.cores, others=min(float(end.cores), max(0.0, others_s / wall_s)))


def busy_s(stat: str, cores: set[int]) -> float:
    """CPU seconds since the start of the machine in which some cores did something.

    Args:
        stat: The text of /proc/stat.
        cores: Numbers of cores.
    """
    ticks = 0
    for line in stat.splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            left_out = (*IDLE_FIELDS, *GUEST_FIELDS)
            ticks += sum(int(n) for at, n in enumerate(numbers) if at not in left_out)
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_s(sessions: Collection[int]) -> float:
    """CPU seconds of this process and of sessions, of what they have started and outlived too."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # A process may end while it is looked at.
        with suppress(OSError):
            # The name, in parentheses, may hold anything.
            fields = stat.read_text().rpartition(") ")[2].split()
            if int(fields[SESSION_FIELD]) in sessions or int(stat.parent.name) == os.getpid():
                ticks += sum(map(int, fields[OWN_FIELDS]))
    return ticks / os.sysconf("SC_CLK_TCK")
