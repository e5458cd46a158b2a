"""Where the wall time of a training process went: parts that add up to the whole.

At every instant exactly one part is running, so the parts add up by construction. The main thread
alone decides which one it is: what another thread does meanwhile costs the run no time of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a training's wall time."""

    name: str
    """As `--json` has it."""

    label: str
    """As a person reads it."""

    advice: str
    """What makes it shorter."""


PARTS: Final = (
    Part(
        name="start",
        label="imports and start",
        advice="one training of more epochs starts once; keep the environment on a local disk",
    ),
    Part(
        name="other_stages",
        label="other stages",
        advice="they are skipped while their inputs stay the same",
    ),
    Part(
        name="data",
        label="opening the data",
        advice="keep the runs on a local disk; `stoker profile` splits the time of the input",
    ),
    Part(
        name="build",
        label="building and tracing the model",
        advice="build repeated blocks in a layer of their own, and avoid Python loops over layers",
    ),
    Part(
        name="compile",
        label="compiling and autotuning",
        advice="train.xla: false starts at once; a longer training pays for compilation",
    ),
    Part(name="steps", label="steps", advice="U and W say how well the steps use the device"),
    Part(
        name="repeated",
        label="steps done again",
        advice="lower train.checkpoint.every_s, so that less is lost when a process ends",
    ),
    Part(
        name="validation",
        label="validation",
        advice="a smaller eval split, or fewer and longer epochs",
    ),
    Part(
        name="checkpoints",
        label="checkpoints",
        advice="raise train.checkpoint.every_s, or write runs to a faster disk",
    ),
    Part(
        name="measuring",
        label="measuring the ceiling of the step",
        advice="it takes about a second of a process: it weighs less in a longer training",
    ),
    Part(
        name="tensorboard",
        label="TensorBoard and metrics",
        advice="train.tensorboard.gradients: false, or raise train.tensorboard."
        "histograms_every_steps",
    ),
    Part(name="callbacks", label="callbacks", advice="do less in train.callbacks"),
    Part(
        name="between",
        label="Python between calls of the step",
        advice="raise train.steps_per_call",
    ),
    Part(
        name="ending",
        label="ending",
        advice="it is short unless the disk is slow: the run's files are hashed",
    ),
)
"""All of them, in the order of a training."""

NAMES: Final = tuple(part.name for part in PARTS)

STEPS, REPEATED, OTHER_STAGES = "steps", "repeated", "other_stages"


class WallTime:
    """Knows at every instant which part of a process is running."""

    def __init__(
        self,
        *,
        began_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        part: str = "start",
    ) -> None:
        """Begin with a part; the calling thread is the one that is accounted for.

        Args:
            began_s: When the process began, by the clock; by default now.
            clock: Seconds that never jump.
            part: What has been running since then.
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
        """Account for this process from its start on, the interpreter's own start included."""
        return cls(began_s=time.monotonic() - process_age_s())

    def within(self, part: str) -> Within:
        """Count the body of a `with` as this part; what it holds of other parts is theirs."""
        _require(part)
        return Within(self, part)

    def enter(self, part: str) -> str:
        """Count what follows as this part; the part until now.

        From another thread nothing changes.
        """
        if threading.get_ident() != self._thread:
            return part
        with self._lock:
            now_s, before = self._clock(), self._part
            self._seconds[before] += now_s - self._since_s
            self._part, self._since_s = part, now_s
        return before

    def move(self, part: str, to: str, seconds: float) -> None:
        """Count some seconds of a part as another one, at most as many as it has."""
        _require(part)
        _require(to)
        with self._lock:
            moved_s = min(seconds, self._seconds[part])
            self._seconds[part] -= moved_s
            self._seconds[to] += moved_s

    def parts(self) -> dict[str, float]:
        """Seconds of each part until now; together they are `wall_s`."""
        with self._lock:
            seconds = dict(self._seconds)
            seconds[self._part] += self._clock() - self._since_s
        return seconds


class Within:
    """A `with` block of one part."""

    __slots__ = ("_before", "_part", "_wall")

    def __init__(self, wall: WallTime, part: str) -> None:
        self._wall, self._part, self._before = wall, part, part

    def __enter__(self) -> None:
        """The part begins."""
        self._before = self._wall.enter(self._part)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The part before it goes on, whatever happened."""
        self._wall.enter(self._before)


def goodput(parts: Mapping[str, float]) -> float | None:
    """The share of a training's wall time in which it did steps that count; None before any time.

    The stages before training are not training: their time is left out of both.
    """
    total_s = sum(parts.values()) - parts[OTHER_STAGES]
    return parts[STEPS] / total_s if total_s > 0 else None


def largest_other(parts: Mapping[str, float]) -> Part:
    """The part with the most time among those that are not steps."""
    others = [part for part in PARTS if part.name not in (STEPS, OTHER_STAGES)]
    return max(others, key=lambda part: parts[part.name])


def process_age_s() -> float:
    """Seconds since this process was started; its CPU time where the system does not tell.

    Source: proc(5), /proc/[pid]/stat, field 22 (starttime), in clock ticks since boot.
    """
    try:
        with Path("/proc/self/stat").open(encoding="utf-8", errors="replace") as stat:
            # The second field is the program's name, which may hold spaces and parentheses.
            fields = stat.read().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, ValueError, IndexError, AttributeError):
        return time.process_time()
    return max(0.0, age_s)


def _require(part: str) -> None:
    if part not in NAMES:
        raise ValueError(f"no part of a training's wall time: {part}")
