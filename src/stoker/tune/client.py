"""Client of a trial: one setting of an experiment, measured in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.cluster.devices import find_devices
from stoker.core.files import remove
from stoker.data.ingest import IngestConfig
from stoker.data.user_dataset.config import OwnDatasetConfig
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.tune.compare import MAX_PAIRS, MIN_PAIRS, Gain, gain_of
from stoker.tune.levers import ModelFacts, Situation
from stoker.tune.process import TrialFailed, TrialProcess
from stoker.tune.profile import Profile, TrialFacts, Windows, is_clear, profile_of

WINDOW_S = 0.5
"""Length of a window: long compared with a scheduler's slice, short compared with other load."""

MORE_PAIRS = 2
"""Pairs of windows that are added if the first `MIN_PAIRS` do not decide."""

_TIME_FACTOR = 8
"""More pairs are measured if the remaining time is this many times their duration."""

PACE_S = 0.1
"""Length of the measurement of the machine's own speed after each pair, seconds."""

SCRATCH = ".scratch"
"""Suffix of a trial's scratch folder, next to its input and its log."""

TIMELINE_CALLS = 12
"""Number of calls in a timeline."""

PEAK_S = 2.0
"""Length of the measurement of the device's peak, seconds."""

_ACTIVITY = {
    "prepare": "the data was prepared",
    "begin": "a process did its first steps",
    "curve": "a loss curve was computed",
    "window": "steps were measured",
}
"""Question -> the activity until the answer, for messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSpec:
    """The subject of a trial."""

    inputs: Mapping[str, Any]
    """Input of the process, JSON values, without its scratch folder."""

    train: TrainConfig
    data: IngestConfig | OwnDatasetConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialLimits:
    """How long a trial may take."""

    left_s: Callable[[], float]
    """Returns the time that is left for everything, seconds."""

    most_s: float
    """Longest time for one answer, seconds."""

    window_s: float = WINDOW_S
    """Length of a window, seconds."""

    @classmethod
    def within(cls, seconds: float, *, most_s: float | None = None) -> TrialLimits:
        """Return limits that end after some seconds from now."""
        end_s = time.monotonic() + seconds
        most_s = seconds if most_s is None else most_s
        return cls(left_s=lambda: end_s - time.monotonic(), most_s=most_s)

    def timeout_s(self, most_s: float) -> float:
        """Return the longest time for an answer now.

        Raises:
            TrialFailed: no time is left.
        """
        left_s = self.left_s()
        if left_s <= 0:
            raise TrialFailed("budget", "the time is used up")
        return min(most_s, left_s)

    def failure(self, failed: TrialFailed, what: str) -> TrialFailed:
        """Return the failure of a question, as one of the budget if the time was up."""
        if failed.kind == "hang" and self.left_s() <= 0:
            activity = _ACTIVITY.get(what, f"a process computed the answer to `{what}`")
            return TrialFailed("budget", f"the time was up while {activity}")
        return failed


Turns = tuple[list[Any], list[float | None]]
"""Pairs of windows, resident and real, and the machine's own speed after each."""


def enough_turns(
    measure: Callable[[int], Turns], *, left_s: Callable[[], float], most: int = MAX_PAIRS
) -> Turns:
    """Measure pairs of windows until they show whether the device is busy, or the time is up.

    Args:
        measure: Measures a number of pairs.
        left_s: Returns the time that is left for everything, seconds.
        most: Maximum number of pairs, at least `MIN_PAIRS`.
    """
    began_s = time.monotonic()
    turns, paces = measure(MIN_PAIRS)
    longest_s = (time.monotonic() - began_s) * MORE_PAIRS / MIN_PAIRS
    while not is_clear(turns) and len(turns) < most and left_s() > _TIME_FACTOR * longest_s:
        began_s = time.monotonic()
        more_turns, more_paces = measure(MORE_PAIRS)
        turns, paces = turns + more_turns, paces + more_paces
        longest_s = max(longest_s, time.monotonic() - began_s)
    return turns, paces


class TrialClient:
    """A process that measures one setting."""

    def __init__(self, spec: TrialSpec, *, folder: Path, name: str, limits: TrialLimits) -> None:
        """Start the process, and wait until it can measure.

        Args:
            spec: What it measures.
            folder: Receives its input, its log and its scratch folder.
            name: Name of these files.
            limits: How long it may take.

        Raises:
            TrialFailed: the setting cannot be measured.
        """
        self._limits = limits
        self.is_usable = True
        self._scratch = (folder / f"{name}{SCRATCH}").absolute()
        inputs = {**spec.inputs, "folder": str(self._scratch)}
        self._process = TrialProcess(inputs, folder=folder, name=name)
        try:
            begun = self._ask("begin")
        except BaseException:
            self.close()
            raise
        self._facts = TrialFacts(**begun["facts"])
        model = ModelFacts(**begun["model"] | {"blocks": tuple(begun["model"]["blocks"])})
        self.situation = Situation(
            train=spec.train,
            data=spec.data,
            resolved=ResolvedTraining(**begun["resolved"]),
            devices=find_devices(),
            model=model,
        )

    @property
    def pid(self) -> int:
        """Process ID."""
        return self._process.pid

    def speed(self) -> float:
        """Return the samples per second of a window of training."""
        window = self._window("real")
        return float(window["rows"] / window["wall_s"])

    def input_speed(self) -> float:
        """Return the samples per CPU second of a window of the input alone."""
        window = self._window("input")
        return float(window["rows"] / window["cpu_s"])

    def turns(self, count: int) -> Turns:
        """Measure a number of pairs of windows."""
        found = self._ask("turns", seconds=self._limits.window_s, count=count, pace_s=PACE_S)
        return found["turns"], found["paces"]

    def profile(self, *, most_pairs: int = MAX_PAIRS) -> Profile:
        """Measure where the time goes, with at most this many pairs of windows."""
        turns, paces = enough_turns(self.turns, left_s=self._limits.left_s, most=most_pairs)
        windows = Windows(
            turns=turns,
            paces=paces,
            called=[self._window("called") for _ in range(3)],
            taken=[self._window("input") for _ in range(3)],
        )
        return profile_of(self._facts, windows)

    def curve(self, *, seed: int, steps: int, every: int) -> list[float]:
        """Return the mean losses of a training, one for each `every` steps."""
        found: list[float] = self._ask("curve", seed=seed, steps=steps, every=every)
        return found

    def other_precision(self) -> tuple[str, Gain]:
        """Return another precision, and how much faster the step is in it."""
        found = self._ask("precision", seconds=self._limits.window_s / 2, count=MIN_PAIRS)
        return found["precision"], gain_of(found["pairs"])

    def explain(self) -> dict[str, Any]:
        """Return what else a profile shows; see `Session.explain`."""
        found: dict[str, Any] = self._ask(
            "explain", seconds=self._limits.window_s, peak_s=PEAK_S, calls=TIMELINE_CALLS
        )
        return found

    def close(self) -> None:
        """End the process."""
        self._process.close()
        remove(self._scratch)

    def _window(self, kind: str) -> Any:
        return self._ask("window", kind=kind, seconds=self._limits.window_s)

    def _ask(self, what: str, **arguments: Any) -> Any:
        timeout_s = self._limits.timeout_s(self._limits.most_s)
        try:
            answer = self._process.ask(what, timeout_s=timeout_s, **arguments)
            # Otherwise its input pipeline would compete with the next measurement.
            self._process.pause()
            return answer
        except TrialFailed as failed:
            self.is_usable = False
            raise self._limits.failure(failed, what) from None
