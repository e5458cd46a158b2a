"""Is one setting faster than another, and how sure is that? By pairs of windows beside each other."""

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

PAIRS_LEAST, PAIRS_MOST = 6, 16
"""Pairs of windows: so few give an interval at all, and after so many it is what it is."""

CONFIDENCE = 0.95
"""How often the interval holds the true median."""

LEAST_GAIN = 0.05
"""What two processes with the same settings differ by on a quiet machine: less is no gain."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How much faster the second of two is, as a ratio."""

    ratio: float
    """Median over the pairs."""

    low: float
    high: float
    """Interval of the median that holds with `CONFIDENCE`, without any assumption about the noise."""

    pairs: int

    def shown(self) -> str:
        """`1.25x [1.20, 1.31]`."""
        return f"{self.ratio:.3g}x [{self.low:.3g}, {self.high:.3g}]"


SAME = Gain(ratio=1.0, low=1.0, high=1.0, pairs=0)
"""Of what was not measured."""


def gain_of(pairs: Sequence[tuple[float, float]]) -> Gain:
    """The gain that pairs of speeds show.

    Args:
        pairs: [pairs] speeds of the first and the second, in one unit, measured side by side; at
            least `PAIRS_LEAST`.

    Raises:
        ValueError: there are too few.

    Source: the sign test's interval of a median by order statistics (Conover, Practical
    Nonparametric Statistics, 3.2).
    """
    if len(pairs) < PAIRS_LEAST:
        raise ValueError(f"{len(pairs)} pairs give no interval, {PAIRS_LEAST} do")
    ratios = [second / first for first, second in pairs]
    low, high = interval(ratios)
    return Gain(ratio=median(ratios), low=low, high=high, pairs=len(ratios))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval of the values' median, as `gain_of` says; of fewer than `PAIRS_LEAST` all of them."""
    ordered = sorted(values)
    outside = _outside(len(ordered))
    return ordered[outside], ordered[-1 - outside]


def _outside(count: int) -> int:
    """How many of the smallest, and of the largest, lie outside of the interval."""
    # As whole numbers: 1,024 pairs and more are beyond what a float holds.
    tail, total = 0.0, 2**count
    for outside in range(count):
        tail += math.comb(count, outside) / total
        if 2 * tail > 1 - CONFIDENCE:
            return max(0, outside - 1)
    return 0


def threshold_of(noise: Gain) -> float:
    """The least ratio that is a gain, where two processes of the same settings differ by `noise`."""
    return 1.0 + max(LEAST_GAIN, noise.ratio - 1.0, 1.0 / noise.ratio - 1.0)


def compare(
    first: Callable[[], float], second: Callable[[], float], *, threshold: float
) -> tuple[Gain, list[tuple[float, float]]]:
    """Measure two in turn, until it is clear on which side of the threshold the second lies.

    Args:
        first: Measures the first for a window; its speed.
        second: The same for the second.
        threshold: The least ratio that counts.

    Returns:
        The gain, and the speeds of every pair, in their order.
    """
    pairs: list[tuple[float, float]] = []
    while True:
        # Whoever comes second in a pair meets a machine that the other has warmed.
        if len(pairs) % 2:
            later = second()
            pairs.append((first(), later))
        else:
            earlier = first()
            pairs.append((earlier, second()))
        if len(pairs) < PAIRS_LEAST:
            continue
        gain = gain_of(pairs)
        if gain.low > threshold or gain.high < threshold or len(pairs) >= PAIRS_MOST:
            return gain, pairs


SEEDS = (0, 1, 2)
"""Trainings from other weights, in another order: three pairs of them give the spread."""

POINTS = 10
"""Stretches of a curve, each the mean loss over its steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """Two settings' loss curves beside each other."""

    alike: bool
    """Whether they differ by no more than seeds do."""

    differ_by: float
    """Mean distance of the curves of a seed, over the second half; the largest of all seeds."""

    seeds_differ_by: float
    """Mean distance of the curves of two seeds under the first setting, the largest of all pairs."""

    why: str
    """In a sentence."""


def parity_of(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Parity:
    """Compare curves seed by seed.

    Args:
        first: [seeds][points] losses under the one setting.
        second: [seeds][points] losses under the other, of the same seeds and as many samples.

    Raises:
        ValueError: they are not as many, or there are fewer than two seeds.
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
        why=f"its loss differs by {differ_by:.3g}, {what} the {spread:.3g} that seeds make",
    )


def _distance(one: NDArray[np.float64], two: NDArray[np.float64]) -> float:
    return float(np.abs(one - two).mean())


def stretches(steps: int) -> int:
    """Steps of a stretch, where a curve has so many."""
    return max(1, steps // POINTS)


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
