"""Splits the wall time of a training process into parts that add up to the whole; estimates the remaining time.

At every moment, exactly one part is running, so the sum of all parts is the wall time. Only the main thread selects
the part: work in other threads does not add wall time.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a training's wall time."""

    name: str
    """Name of the part in `--json`."""

    label: str
    """Name of the part for the user."""

    advice: str
    """How to reduce the time of the part."""


PARTS: Final = (
    Part(
        name="start",
        label="imports and start",
        advice="its share is smaller in a longer training; keep the Python environment on a local disk",
    ),
    Part(
        name="other_stages",
        label="other stages",
        advice="they are skipped while their inputs stay the same",
    ),
    Part(
        name="data",
        label="opening the data",
        advice="keep the runs on a local disk; `stoker profile` shows which part of the input is slow",
    ),
    Part(
        name="build",
        label="building and tracing the model",
        advice="put repeated blocks into one layer, and avoid Python loops over layers",
    ),
    Part(
        name="compile",
        label="compiling and autotuning",
        advice="train.xla: false saves this time, but makes steps slower, which matters in a longer training",
    ),
    Part(
        name="steps",
        label="steps",
        advice="the busy fraction U and the input wait W show how well the steps use the device",
    ),
    Part(
        name="repeated",
        label="steps done again",
        advice="lower train.checkpoint.every_s, so that less work is lost when a process ends",
    ),
    Part(
        name="validation",
        label="validation",
        advice="use a smaller eval split, or fewer and longer epochs",
    ),
    Part(
        name="checkpoints",
        label="checkpoints",
        advice="raise train.checkpoint.every_s, or write runs to a faster disk",
    ),
    Part(
        name="measuring",
        label="measuring U and MFU",
        advice="it takes about a second per process: its share is smaller in a longer training",
    ),
    Part(
        name="tensorboard",
        label="TensorBoard and metrics",
        advice="set train.tensorboard.gradients: false, or raise train.tensorboard."
        "histograms_every_steps",
    ),
    Part(name="callbacks", label="callbacks", advice="do less work in train.callbacks"),
    Part(
        name="between",
        label="Python between calls of the step",
        advice="raise train.steps_per_call",
    ),
    Part(
        name="ending",
        label="ending",
        advice="it hashes the run's files, which is short unless the disk is slow",
    ),
)
"""All parts, in the order in which they occur in a training."""

NAMES: Final = tuple(part.name for part in PARTS)

STEPS, REPEATED, OTHER_STAGES = "steps", "repeated", "other_stages"


class WallTime:
    """Records how long each part of a process runs."""

    def __init__(
        self,
        *,
        began_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        part: str = "start",
    ) -> None:
        """Start with one part; only the calling thread can switch to another part.

        Args:
            began_s: Time on `clock` when the process began; by default now.
            clock: Monotonic clock, seconds.
            part: The part that has been running since `began_s`.
        """
        _require(part)
        self._clock = clock
        self._began_s = self._since_s = clock() if began_s is None else began_s
        self._part = part
        self._seconds = dict.fromkeys(NAMES, 0.0)
        self._thread = threading.get_ident()
        self._lock = threading.Lock()

    @classmethod
    def of_process(cls) -> WallTime:
        """Record this process from its start, including the startup of the interpreter."""
        return cls(began_s=time.monotonic() - process_age_s())

    def within(self, part: str) -> Within:
        """Count the body of a `with` as this part; the time of a nested part counts only for the nested part."""
        _require(part)
        return Within(self, part)

    def enter(self, part: str) -> str:
        """Switch to this part; return the previous one.

        In another thread, this does nothing.
        """
        if threading.get_ident() != self._thread:
            return part
        with self._lock:
            now_s, before = self._clock(), self._part
            self._seconds[before] += now_s - self._since_s
            self._part, self._since_s = part, now_s
        return before

    def move(self, part: str, to: str, seconds: float) -> None:
        """Move seconds from one part to another, but not more than the part has."""
        _require(part)
        _require(to)
        with self._lock:
            moved_s = min(seconds, self._seconds[part])
            self._seconds[part] -= moved_s
            self._seconds[to] += moved_s

    def parts(self) -> dict[str, float]:
        """Part -> seconds so far; the sum of all parts is the wall time of the process."""
        with self._lock:
            seconds = dict(self._seconds)
            seconds[self._part] += self._clock() - self._since_s
        return seconds


class Within:
    """A context manager whose body counts as one part."""

    __slots__ = ("_before", "_part", "_wall")

    def __init__(self, wall: WallTime, part: str) -> None:
        self._wall, self._part, self._before = wall, part, part

    def __enter__(self) -> None:
        """Start the part."""
        self._before = self._wall.enter(self._part)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Resume the previous part, even after an error."""
        self._wall.enter(self._before)


def goodput(parts: Mapping[str, float]) -> float | None:
    """Return the share of a training's wall time in steps that were not repeated; None if no time has passed.

    The wall time here does not include the stages before training.
    """
    total_s = sum(parts.values()) - parts[OTHER_STAGES]
    return parts[STEPS] / total_s if total_s > 0 else None


def largest_other(parts: Mapping[str, float]) -> Part:
    """Return the part with the most time, except the steps and the stages before training."""
    others = [part for part in PARTS if part.name not in (STEPS, OTHER_STAGES)]
    return max(others, key=lambda part: parts[part.name])


def process_age_s() -> float:
    """Return the seconds since this process was started; its CPU time if the system does not report its start.

    Source: proc(5), /proc/[pid]/stat, field 22 (starttime), in clock ticks since boot.
    """
    try:
        with Path("/proc/self/stat").open(encoding="utf-8", errors="replace") as stat:
            # The second field is the program's name, which may contain spaces and parentheses.
            fields = stat.read().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()
    return max(0.0, age_s)


def _require(part: str) -> None:
    if part not in NAMES:
        raise ValueError(f"not a part of a training's wall time: {part}")


WINDOW = 100
"""Number of latest observations from which the rate is computed: after this many, a slowdown is fully visible."""


class TimeLeft:
    """Estimates the remaining time from the progress since the first observation.

    Progress before it (a resumed run, a compiled first step) does not count.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start without observations.

        Args:
            clock: Monotonic clock, seconds; not the time of day, which may be set.
        """
        self._clock = clock
        self._looks: deque[tuple[float, float]] = deque(maxlen=WINDOW)

    def seconds(self, share: float) -> float | None:
        """Add an observation; return the estimated seconds until the share is 1, or None if it is too early.

        Args:
            share: Progress in [0, 1]. If it is lower than the last one, other work has started.
        """
        now_s = self._clock()
        if self._looks and share < self._looks[-1][1]:
            self._looks.clear()
        self._looks.append((now_s, share))
        began_s, began = self._looks[0]
        if share <= began or now_s <= began_s:
            return None
        return (now_s - began_s) / (share - began) * (1 - share)


def shown_time(seconds: float) -> str:
    """Format seconds as `1:05` (minutes), `2:03:00` (hours) or `3 d 4 h`."""
    whole = max(0, round(seconds))
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if days:
        return f"{days} d {hours % 24} h"
    if hours:
        return f"{hours}:{minutes % 60:02d}:{whole % 60:02d}"
    return f"{minutes}:{whole % 60:02d}"
