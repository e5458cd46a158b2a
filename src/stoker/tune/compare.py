"""Compares speeds by pairs of windows, and loss curves by seeds; measures the load of other processes."""

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
"""Minimum and maximum number of pairs of windows: fewer give no interval, and more hardly narrow it."""

CONFIDENCE = 0.95
"""Probability that the interval contains the true median."""

MIN_GAIN = 0.05
"""Minimum gain in speed that counts: on a quiet machine, two processes with the same settings may differ by this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """Ratio of the second speed to the first one, over some pairs."""

    ratio: float
    """Median of the pairs' ratios."""

    low: float
    high: float
    """Confidence interval of the median at `CONFIDENCE`, for noise of any distribution."""

    pairs: int

    def shown(self) -> str:
        """Return the ratio and its interval: `1.25x [1.20, 1.31]`."""
        return f"{self.ratio:.3g}x [{self.low:.3g}, {self.high:.3g}]"


SAME = Gain(ratio=1.0, low=1.0, high=1.0, pairs=0)
"""Placeholder for a gain that was not measured."""


def gain_of(pairs: Sequence[tuple[float, float]]) -> Gain:
    """Return the gain that pairs of speeds show.

    Args:
        pairs: [pairs] speed of the first and speed of the second setting, in the same unit; the two
            windows of a pair are measured one after the other. At least `MIN_PAIRS`.

    Raises:
        ValueError: there are too few pairs.

    Source of the interval: order statistics, as in the sign test (Conover, Practical Nonparametric
    Statistics, 3.2).
    """
    if len(pairs) < MIN_PAIRS:
        raise ValueError(f"an interval needs at least {MIN_PAIRS} pairs, got {len(pairs)}")
    ratios = [second / first for first, second in pairs]
    low, high = interval(ratios)
    return Gain(ratio=median(ratios), low=low, high=high, pairs=len(ratios))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the interval of the median as in `gain_of`; of fewer than `MIN_PAIRS` values, their whole range."""
    ordered = sorted(values)
    outside = _outside(len(ordered))
    return ordered[outside], ordered[-1 - outside]


def _outside(count: int) -> int:
    """Return how many of the smallest values are below the interval; as many of the largest are above it."""
    # `total` is an integer, because 2**1024 overflows a float.
    tail, total = 0.0, 2**count
    for outside in range(count):
        tail += math.comb(count, outside) / total
        if 2 * tail > 1 - CONFIDENCE:
            return max(0, outside - 1)
    return 0


def threshold_of(noise: Gain) -> float:
    """Return the minimum ratio that counts as a gain if two processes with the same settings differ by `noise`."""
    return 1.0 + max(MIN_GAIN, noise.ratio - 1.0, 1.0 / noise.ratio - 1.0)


def compare(
    first: Callable[[], float], second: Callable[[], float], *, threshold: float
) -> tuple[Gain, list[tuple[float, float]]]:
    """Measure two settings in turn, until it is clear whether the ratio is above the threshold.

    Args:
        first: Measures a window with the first settings; returns its speed.
        second: The same with the second settings.
        threshold: The minimum ratio that counts as a gain.

    Returns:
        The gain, and the two speeds of each pair, in order.
    """
    pairs: list[tuple[float, float]] = []
    while True:
        # The first window of a pair warms up the machine for the second one, so they change places.
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
"""Seeds of the loss curves; the three pairs of seeds show how much seeds alone change a curve."""

POINTS = 10
"""Number of points of a loss curve; each is the mean loss over a stretch of steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Comparison of the loss curves with two settings."""

    alike: bool
    """Whether the settings change the curves by no more than another seed does."""

    differ_by: float
    """Mean distance between a seed's two curves in their second half; the maximum over all seeds."""

    seeds_differ_by: float
    """Mean distance between the curves of two seeds with the first setting, in their second half; the maximum over all
    pairs of seeds."""

    why: str
    """The result as a clause."""


def parity_of(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Parity:
    """Compare loss curves seed by seed.

    Args:
        first: [seeds][points] losses with the first setting.
        second: [seeds][points] losses with the second setting, with the same seeds and samples.

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
    """Return the number of steps per point of a loss curve over this many steps."""
    return max(1, steps // POINTS)


STAT = Path("/proc/stat")
"""File with the CPU time of each core by kind. Source: proc_stat(5)."""

IDLE_FIELDS = (3, 4)
"""Positions of idle and iowait in a line of `STAT`: time in which a core did nothing."""

GUEST_FIELDS = (8, 9)
"""Positions of guest and guest_nice in a line of `STAT`; user and nice already include them."""

SESSION_FIELD, OWN_FIELDS = 3, slice(11, 15)
"""Positions in /proc/PID/stat, counted after the name: session; utime, stime, cutime and cstime.
Source: proc_pid_stat(5)."""

QUIET_SHARE = 0.1
"""A machine is quiet if other processes use at most this share of the cores' time. The kernel and the
services of an idle machine use less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """Load of other processes on the cores that a measurement could use."""

    cores: int
    """Number of cores that this process may use."""

    others: float
    """Mean number of these cores that were used by other processes, or by other guests of the host."""

    @property
    def is_quiet(self) -> bool:
        """Whether other processes used so little that a measurement was not disturbed."""
        return self.others <= QUIET_SHARE * self.cores

    def text(self) -> str:
        """Return the load as a clause."""
        return f"other processes used {self.others:.1f} of its {self.cores} cores"


@contextmanager
def watched_load(*sessions: int) -> Iterator[Callable[[], Load | None]]:
    """Measure the load of other processes during a `with` block.

    Args:
        sessions: IDs of the measured processes, each of which leads its own session. These
            sessions and this process do not count as other processes.

    Yields:
        A function that returns the load after the block; None without /proc/stat, i.e. not on Linux.
    """
    begun = _CpuTime.now(sessions)
    found: list[Load | None] = []
    try:
        yield lambda: found[-1] if found else None
    finally:
        found.append(_between(begun, _CpuTime.now(sessions)))


@dataclass(frozen=True, kw_only=True, slots=True)
class _CpuTime:
    """CPU time that was used until now."""

    wall_s: float
    busy_s: float | None
    """CPU time of all processes on the cores that this process may use, seconds; None if unknown."""

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
    """Return the CPU time of some cores since the machine started, without idle time, seconds.

    Args:
        stat: Content of /proc/stat.
        cores: Numbers of these cores.
    """
    ticks = 0
    for line in stat.splitlines():
        name, *numbers = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cores:
            left_out = (*IDLE_FIELDS, *GUEST_FIELDS)
            ticks += sum(int(n) for at, n in enumerate(numbers) if at not in left_out)
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_s(sessions: Collection[int]) -> float:
    """Return the CPU time of this process and of some sessions, with their ended children, seconds."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        # The process may have ended since `glob` listed it.
        with suppress(OSError):
            # The process's name, in parentheses, may contain any characters, even ") ".
            fields = stat.read_text().rpartition(") ")[2].split()
            if int(fields[SESSION_FIELD]) in sessions or int(stat.parent.name) == os.getpid():
                ticks += sum(map(int, fields[OWN_FIELDS]))
    return ticks / os.sysconf("SC_CLK_TCK")
