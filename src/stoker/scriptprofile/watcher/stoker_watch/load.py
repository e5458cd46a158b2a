"""How long threads of this process waited for a core while other programs had it.

Linux keeps for each thread how long it ran and how long it waited for a core (`schedstat`, proc(5));
`/proc/stat` says how long the cores were busy. Where these files are missing, nothing is said.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any, NamedTuple

_TASKS = "/proc/self/task"
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_CORES = {f"cpu{core}" for core in os.sched_getaffinity(0)}
"""Those that this process may use."""


class Moment(NamedTuple):
    """Sums up to now, seconds."""

    wall_s: float
    run_s: float
    """CPU time of the calling thread."""
    wait_s: float
    """Time that it waited for a core."""
    others_run_s: float
    """The same of all other threads of this process."""
    others_wait_s: float
    cores_busy_s: float
    """CPU time of all programs on the cores that this process may use."""
    own_s: float
    """CPU time of this process."""


def now() -> Moment | None:
    """The sums of this moment; None where Linux does not keep them. It takes 0.2 ms for 10 threads."""
    try:
        run_s, wait_s = _schedstat("/proc/thread-self")
        ran_s = waited_s = 0.0
        for thread in os.listdir(_TASKS):  # noqa: PTH208 - pathlib costs a start
            # A thread may end meanwhile.
            with suppress(OSError):
                each_run_s, each_wait_s = _schedstat(f"{_TASKS}/{thread}")
                ran_s, waited_s = ran_s + each_run_s, waited_s + each_wait_s
        busy_s = _cores_busy_s()
    except (OSError, ValueError, IndexError):
        return None
    others = (max(0.0, ran_s - run_s), max(0.0, waited_s - wait_s))
    return Moment(time.perf_counter(), run_s, wait_s, *others, busy_s, time.process_time())


def _schedstat(folder: str) -> tuple[float, float]:
    with open(f"{folder}/schedstat") as stream:  # noqa: PTH123 - as above
        run_ns, wait_ns, _ = stream.read().split()
    return int(run_ns) / 1e9, int(wait_ns) / 1e9


def _cores_busy_s() -> float:
    with open("/proc/stat") as stream:  # noqa: PTH123 - as above
        rows = [line.split() for line in stream if line.startswith("cpu")]
    # user, nice, system, irq, softirq
    kinds = (1, 2, 3, 6, 7)
    ticks = (int(row[kind]) for row in rows if row[0] in _CORES for kind in kinds)
    return sum(ticks) * _TICK_S


class Span(NamedTuple):
    """What other programs took of a time; all zero where that is not known."""

    wall_s: float = 0.0
    run_s: float = 0.0
    """CPU time of the calling thread."""
    wait_s: float = 0.0
    """It waited so long for a core that another program had."""
    away_s: float = 0.0
    """Of the wall time what would not have passed on a machine without other programs."""

    def away(self) -> float:
        """The share of its wall time, in [0, 1)."""
        return self.away_s / self.wall_s if self.wall_s > 0 else 0.0


class Load:
    """The load of this machine by others since this process was begun to be watched."""

    def __init__(self) -> None:
        self._begun: Moment | None = None
        self._began_session_s = 0.0
        self._helped = 1.0
        """CPU time of this process and of all that belongs to its command, by its own."""

    def begin(self) -> None:
        """Count from here."""
        self._begun, self._began_session_s = now(), _session_s()
        self._helped = 1.0

    def share_of_others(self, spent: Moment) -> float:
        """Of the time that all cores were busy, the part that no process of the command took, in [0, 1]."""
        if spent.cores_busy_s <= 0:
            return 0.0
        return min(1.0, max(0.0, 1.0 - self._helped * spent.own_s / spent.cores_busy_s))

    def between(self, begun: Moment | None, ended: Moment | None) -> Span:
        """What other programs took between two moments of the same thread."""
        if begun is None or ended is None:
            return Span()
        spent = Moment(*(max(0.0, last - first) for first, last in zip(begun, ended, strict=True)))
        share = self.share_of_others(spent)
        wait_s, behind_s = spent.wait_s * share, spent.others_wait_s * share
        blocked_s = max(0.0, spent.wall_s - spent.run_s - spent.wait_s)
        if behind_s > 0:
            # Threads that it waits for have waited themselves: several at once, or in turn.
            behind_s = min(behind_s, blocked_s * behind_s / (spent.others_run_s + behind_s))
        away_s = min(wait_s + behind_s, max(0.0, spent.wall_s - spent.run_s))
        return Span(spent.wall_s, spent.run_s, wait_s, away_s)

    def told(self) -> dict[str, Any]:
        """As facts: how long threads of this process ran, and waited for a core that another program had."""
        ended = now()
        if self._begun is None or ended is None:
            return {}
        spent = Moment(*(b - a for a, b in zip(self._begun, ended, strict=True)))
        session_s = _session_s() - self._began_session_s
        self._helped = max(1.0, session_s / max(spent.own_s, _TICK_S))
        waited_s = max(0.0, spent.wait_s + spent.others_wait_s) * self.share_of_others(spent)
        return {"run_s": spent.own_s, "waited_s": waited_s}


def _session_s() -> float:
    """CPU time of all processes of this session, which is the command's, and of those that have ended."""
    session, found = str(os.getsid(0)), 0
    for process in os.listdir("/proc"):  # noqa: PTH208 - as above
        if process.isdigit():
            with suppress(OSError, IndexError), open(f"/proc/{process}/stat") as stream:  # noqa: PTH123 - as above
                fields = stream.read().rpartition(") ")[2].split()
                if fields[3] == session:
                    found += sum(map(int, fields[11:15]))
    return found * _TICK_S


LOAD = Load()
"""Of this process."""
