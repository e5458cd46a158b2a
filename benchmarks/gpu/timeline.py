"""How many samples a training had done at which time, measured from outside while it runs."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVERY_S = 0.02
"""Polling interval of the file, seconds: the resolution of every time here."""

WARM_SHARE = 0.2
"""Share of the time after the first step that a steady rate leaves out."""

WINDOWS = 8
"""Number of windows for the median of a steady rate, if there are that many marks."""

FIVE_MINUTES_S = 300.0

ONE_TIME_EPOCHS = 3
"""Epochs after which nothing happens for the first time: validation is traced after the first, and
MFU and ceiling are measured after the second call, which may be the whole second epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """The number of samples done at a time."""

    at: float
    """By time.time."""

    samples: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """One training, from the start of its process."""

    began_at: float
    marks: tuple[Mark, ...]

    stepping: tuple[float, ...] = ()
    """Samples per second of each call but the first, by the training's clock; may be empty."""

    def until_first_step_s(self, *, batch: float) -> float | None:
        """From the process's start to the end of its first step; None if there was none.

        If the first mark covers several steps, the time of all but the first is subtracted, at the
        pace of the marks after it.
        """
        if not self.marks:
            return None
        first = self.marks[0]
        more = max(0.0, first.samples - batch)
        pace = self.steady()
        return first.at - self.began_at - (more / pace[0] if more and pace else 0.0)

    def steady(self) -> tuple[float, float, float] | None:
        """Samples per second in steps: median, least and most of calls, else of windows."""
        if self.stepping:
            return statistics.median(self.stepping), min(self.stepping), max(self.stepping)
        if len(self.marks) < 3:
            return None
        after_s = (self.marks[-1].at - self.marks[0].at) * WARM_SHARE
        warm = [mark for mark in self.marks if mark.at >= self.marks[0].at + after_s]
        size = max(1, (len(warm) - 1) // WINDOWS)
        ends = warm[::size]
        rates = [
            (b.samples - a.samples) / (b.at - a.at)
            for a, b in itertools.pairwise(ends)
            if b.at > a.at and b.samples > a.samples
        ]
        return (statistics.median(rates), min(rates), max(rates)) if rates else None

    def mean_rate(self) -> float | None:
        """Samples per second from the first mark to the last, ends of epochs included."""
        if len(self.marks) < 2:
            return None
        first, last = self.marks[0], self.marks[-1]
        return (last.samples - first.samples) / (last.at - first.at)

    def epoch_share(self, found: Mapping[str, Any]) -> float:
        """Share of the time outside steps, from the end of epoch `ONE_TIME_EPOCHS` on.

        Args:
            found: The training's result: `steps`, `epochs`, `step_time_s`.
        """
        last = self.marks[-1]
        known = last.samples * ONE_TIME_EPOCHS / found["epochs"]
        first = next(mark for mark in self.marks if mark.samples >= min(0.99 * known, last.samples))
        if last.at <= first.at:
            return 0.0
        steps = (last.samples - first.samples) / (last.samples / found["steps"])
        return max(0.0, 1 - steps * found["step_time_s"] / (last.at - first.at))

    def five_minutes(self) -> float | None:
        """Samples in the first five minutes: those seen, then on at the rate of the marks' second half.

        The first half has costs that come once; the ends of epochs count in both.
        """
        later = Timeline(began_at=self.began_at, marks=self.marks[len(self.marks) // 2 :])
        rate = later.mean_rate() or self.mean_rate()
        if rate is None:
            return None
        last = self.marks[-1]
        left_s = FIVE_MINUTES_S - (last.at - self.began_at)
        return last.samples + left_s * rate


def of_fit(lines: Path, *, began_at: float) -> Timeline:
    """The marks written by `fit.py`."""
    found = [json.loads(line) for line in _whole_lines(lines)]
    marks = [Mark(at=line["at"], samples=line["samples"]) for line in found]
    return Timeline(began_at=began_at, marks=tuple(marks))


class Following:
    """Follows the `metrics.jsonl` of a running `stoker train`, and records when lines appear."""

    def __init__(self, runs: Path, *, began_at: float) -> None:
        self._runs, self._began_at = runs, began_at
        self._known = set(runs.glob("*/*/train/metrics.jsonl"))
        self._lines: list[tuple[float, dict[str, Any]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def steps_seen(self) -> int:
        """Steps in the newest line."""
        return max((int(line["step"]) for _, line in self._lines), default=0)

    def runs(self) -> list[Path]:
        """Folders of the runs that have started since."""
        return [path.parents[1] for path in self._new()]

    def _new(self) -> set[Path]:
        return set(self._runs.glob("*/*/train/metrics.jsonl")) - self._known

    def end(self, *, batch: float) -> Timeline:
        """Stop following.

        Args:
            batch: Samples per step, on average.
        """
        self._over.set()
        self._thread.join()
        marks: list[Mark] = []
        for at, line in self._lines:
            samples = float(line["step"]) * batch
            if not marks or samples > marks[-1].samples:
                marks.append(Mark(at=at, samples=samples))
        rates = [line["samples_per_s"] for _, line in self._lines if "samples_per_s" in line]
        return Timeline(began_at=self._began_at, marks=tuple(marks), stepping=tuple(rates[1:]))

    def _follow(self) -> None:
        seen = 0
        while True:
            last = self._over.is_set()
            for path in self._new():
                lines = _whole_lines(path)
                now = time.time()
                self._lines += [(now, json.loads(line)) for line in lines[seen:]]
                seen = len(lines)
            if last:
                return
            time.sleep(EVERY_S)


def _whole_lines(path: Path) -> list[str]:
    if not path.is_file():
        return []
    return [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
