"""Comparisons: speeds by pairs of windows, loss curves by seeds, and the load of other processes."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

MIN_PAIRS, MAX_PAIRS = 6, 16
"""Minimum and maximum number of pairs of windows: fewer give no interval, more hardly narrow it."""

CONFIDENCE = 0.95
"""Probability that the interval contains the true median."""

MIN_GAIN = 0.05
"""Difference of two processes with the same settings on a quiet machine: less is not a gain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """Ratio of the second speed to the first."""

    ratio: float
    """Median over the pairs."""

    low: float
    high: float
    """Interval of the median at `CONFIDENCE`, without an assumption about the noise."""

    pairs: int

    def shown(self) -> str:
        """Return the ratio and its interval: `1.25x [1.20, 1.31]`."""
        return f"{self.ratio:.3g}x [{self.low:.3g}, {self.high:.3g}]"


SAME = Gain(ratio=1.0, low=1.0, high=1.0, pairs=0)
"""Placeholder for a gain that was not measured."""


def gain_of(pairs: Sequence[tuple[float, float]]) -> Gain:
    """Return the gain that pairs of speeds show.

    Args:
        pairs: [pairs] speeds of the first and the second, in one unit, measured side by side; at
            least `MIN_PAIRS`.

    Raises:
        ValueError: there are too few pairs.

    Source: the sign test's interval of a median by order statistics (Conover, Practical
    Nonparametric Statistics, 3.2).
    """
    if len(pairs) < MIN_PAIRS:
        raise ValueError(f"{len(pairs)} pairs give no interval, {MIN_PAIRS} do")
    ratios = [second / first for first, second in pairs]
    low, high = interval(ratios)
    return Gain(ratio=median(ratios), low=low, high=high, pairs=len(ratios))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the median, see `gain_of`; the whole range of fewer than `MIN_PAIRS` values."""
    ordered = sorted(values)
    outside = _outside(len(ordered))
    return ordered[outside], ordered[-1 - outside]


def _outside(count: int) -> int:
    """Return how many of the smallest, and of the largest, values are outside the interval."""
    # As integers: 2**1024 overflows a float.
    tail, total = 0.0, 2**count
    for outside in range(count):
        tail += math.comb(count, outside) / total
        if 2 * tail > 1 - CONFIDENCE:
            return max(0, outside - 1)
    return 0


def threshold_of(noise: Gain) -> float:
    """Return the least ratio that counts as a gain if two equal processes differ by `noise`."""
    return 1.0 + max(MIN_GAIN, noise.ratio - 1.0, 1.0 / noise.ratio - 1.0)


def compare(
    first: Callable[[], float], second: Callable[[], float], *, threshold: float
) -> tuple[Gain, list[tuple[float, float]]]:
    """Measure two settings in turn, until it is clear on which side of the threshold the ratio lies.

    Args:
        first: Measures a window of the first setting; returns its speed.
        second: The same for the second setting.
        threshold: The least ratio that counts.

    Returns:
        The gain, and the speeds of every pair, in order.
    """
    pairs: list[tuple[float, float]] = []
    while True:
        # The first window of a pair warms the machine for the second.
        if len(pairs) % 2:
            later = second()
            pairs.append((first(), later))
        else:
            earlier = first()
            pairs.append((earlier, second()))
        if len(pairs) < MIN_PAIRS:
            continue
        gain = gain_of(pairs)
        if gain.low > threshold or gain.high < threshold or len(pairs) >= MAX_PAIRS:
            return gain, pairs


SEEDS = (0, 1, 2)
"""Seeds of the loss curves: three pairs of them give the spread."""

POINTS = 10
"""Points of a curve, each the mean loss over a stretch of steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Comparison of the loss curves of two settings."""

    alike: bool
    """Whether they differ no more than seeds do."""

    differ_by: float
    """Mean distance of the two curves of a seed, over the second half; the largest of all seeds."""

    seeds_differ_by: float
    """Mean distance of the curves of two seeds with the first setting; the largest of all pairs."""

    why: str
    """The result as a clause."""


def parity_of(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Parity:
    """Compare curves seed by seed.

    Args:
        first: [seeds][points] losses with the first setting.
        second: [seeds][points] losses with the second setting, for the same seeds and samples.

    Raises:
        ValueError: the shapes differ, or there are fewer than two seeds.
    """
    before, after = np.array(first, np.float64), np.array(second, np.float64)
    if before.shape != after.shape or len(before) < 2:
        raise ValueError(f"curves of {before.shape} and {after.shape} cannot be compared")
    if not np.isfinite(after).all():
        return Parity(
            alike=False,
            differ_by=float("inf"),
            seeds_differ_by=0.0,
            why="a loss is not finite",
        )
    settled = slice(before.shape[1] // 2, None)
    differ_by = max(map(_distance, before[:, settled], after[:, settled]))
    spread = max(_distance(one, two) for one, two in combinations(before[:, settled], 2))
    alike = differ_by <= spread
    what = "no more than" if alike else "more than"
    return Parity(
        alike=alike,
        differ_by=differ_by,
        seeds_differ_by=spread,
        why=f"its loss differs by {differ_by:.3g}, {what} the {spread:.3g} between seeds",
    )


def _distance(one: NDArray[np.float64], two: NDArray[np.float64]) -> float:
    return float(np.abs(one - two).mean())


def stretches(steps: int) -> int:
    """Return the steps of a stretch for a curve of this many steps."""
    return max(1, steps // POINTS)


STAT = Path("/proc/stat")
"""CPU time by core and kind. Source: proc_stat(5)."""

IDLE_FIELDS = (3, 4)
"""Positions of idle and iowait, in which a core did nothing."""

GUEST_FIELDS = (8, 9)
"""Positions of guest and guest_nice, which user and nice include."""

SESSION_FIELD, OWN_FIELDS = 3, slice(11, 15)
"""Positions after the name in /proc/PID/stat: session; utime, stime, cutime and cstime.
Source: proc_pid_stat(5)."""

QUIET_SHARE = 0.1
"""Share of the cores' time; the kernel and the services of an idle machine take less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Load of other processes on the cores that a measurement could use."""

    cores: int
    """Cores that this process may use."""

    others: float
    """Mean number of them that other processes used, including other guests of the host."""

    @property
    def is_quiet(self) -> bool:
        """Whether a measurement had the machine to itself."""
        return self.others <= QUIET_SHARE * self.cores

    def text(self) -> str:
        """Return the load as a clause."""
        return f"other processes took {self.others:.1f} of its {self.cores} cores"


@contextmanager
def watched_load(*sessions: int) -> Iterator[Callable[[], Load | None]]:
    """Measure the load of other processes until the end of the block.

    Args:
        sessions: IDs of the measured processes, each of which leads a session of its own. These
            sessions and this process do not count.

    Yields:
        A function that returns the load; None without /proc/stat, i.e. outside of Linux.
    """
    begun = _CpuTime.now(sessions)
    found: list[Load | None] = []
    try:
        yield lambda: found[-1] if found else None
    finally:
        found.append(_between(begun, _CpuTime.now(sessions)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _CpuTime:
    """CPU seconds until now."""

    wall_s: float
    busy_s: float | None
    """All processes, on the cores that this process may use; None if unknown."""

    own_s: float
    cores: int

    @classmethod
    def now(cls, sessions: Collection[int]) -> _CpuTime:
        cores = os.sched_getaffinity(0)
        return cls(
            wall_s=time.monotonic(),
            busy_s=busy_s(STAT.read_text(), cores) if STAT.is_file() else None,
            own_s=_own_s(sessions),
            cores=len(cores),
        )


def _between(begun: _CpuTime, end: _CpuTime) -> Load | None:
    wall_s = end.wall_s - begun.wall_s
    if begun.busy_s is None or end.busy_s is None or wall_s <= 0:
        return None
    others_s = end.busy_s - begun.busy_s - (end.own_s - begun.own_s)
    return Load(cores=end.cores, others=min(float(end.cores), max(0.0, others_s / wall_s)))


def busy_s(stat: str, cores: set[int]) -> float:
    """Return the CPU seconds since the start of the machine in which some cores were busy.

    Args:
        stat: Content of /proc/stat.
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
    """Return the CPU seconds of this process and of sessions, including ended children."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # A process may end meanwhile.
        with suppress(OSError):
            # The name, in parentheses, may hold anything.
            fields = stat.read_text().rpartition(") ")[2].split()
            if int(fields[SESSION_FIELD]) in sessions or int(stat.parent.name) == os.getpid():
                ticks += sum(map(int, fields[OWN_FIELDS]))
    return ticks / os.sysconf("SC_CLK_TCK")
