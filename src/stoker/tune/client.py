"""Client of a trial, a process that measures an experiment with some settings."""

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
"""Length of a window, seconds: longer than the scheduler's time slice, shorter than most loads by other programs."""

MORE_PAIRS = 2
"""Number of pairs of windows to add if the first `MIN_PAIRS` pairs give no clear result."""

_TIME_FACTOR = 8
"""More pairs are measured only if the remaining time is this many times their duration."""

PACE_S = 0.1
"""Time to measure the machine's own speed after each pair of windows, seconds."""

SCRATCH = ".scratch"
"""Suffix of a trial's scratch folder, which is next to its input file and its log."""

TIMELINE_CALLS = 12
"""Number of calls in a profile's timeline."""

PEAK_S = 2.0
"""Time to measure the device's peak rate, seconds."""

_ACTIVITY = {
    "prepare": "the data was prepared",
    "begin": "a process did its first steps",
    "curve": "a loss curve was computed",
    "window": "steps were measured",
}
"""Request to the process -> what happens until its answer, for messages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSpec:
    """What a trial measures."""

    inputs: Mapping[str, Any]
    """Input of the process, JSON values, without the path of its scratch folder."""

    train: TrainConfig
    data: IngestConfig | OwnDatasetConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialLimits:
    """How long a trial may take."""

    left_s: Callable[[], float]
    """Returns the time that is left for the whole trial, seconds."""

    max_s: float
    """Maximum time for one answer, seconds."""

    window_s: float = WINDOW_S
    """Length of a window, seconds."""

    @classmethod
    def within(cls, seconds: float, *, max_s: float | None = None) -> TrialLimits:
        """Return the limits of a trial that must end in this many seconds from now."""
        end_s = time.monotonic() + seconds
        max_s = seconds if max_s is None else max_s
        return cls(left_s=lambda: end_s - time.monotonic(), max_s=max_s)

    def timeout_s(self, max_s: float) -> float:
        """Return `max_s`, or the time that is left if it is shorter, seconds.

        Raises:
            TrialFailed: no time is left.
        """
        left_s = self.left_s()
        if left_s <= 0:
            raise TrialFailed("budget", "the time is used up")
        return min(max_s, left_s)

    def failure(self, failed: TrialFailed, what: str) -> TrialFailed:
        """Return the failure of a request; a hang becomes a failure of kind `budget` if no time is left."""
        if failed.kind == "hang" and self.left_s() <= 0:
            activity = _ACTIVITY.get(what, f"a process computed the answer to `{what}`")
            return TrialFailed("budget", f"the time was up while {activity}")
        return failed


Turns = tuple[list[Any], list[float | None]]
"""Pairs of windows, and the machine's own speed after each pair. The first window of a pair trains on a
resident batch, the second one on real input."""


def enough_turns(
    measure: Callable[[int], Turns], *, left_s: Callable[[], float], max_pairs: int = MAX_PAIRS
) -> Turns:
    """Measure pairs of windows until they show whether the device is busy, or the time is up.

    Args:
        measure: Measures this number of pairs.
        left_s: Returns the time that is left for the whole trial, seconds.
        max_pairs: Maximum number of pairs, at least `MIN_PAIRS`.
    """
    began_s = time.monotonic()
    turns, paces = measure(MIN_PAIRS)
    longest_s = (time.monotonic() - began_s) * MORE_PAIRS / MIN_PAIRS
    while not is_clear(turns) and len(turns) < max_pairs and left_s() > _TIME_FACTOR * longest_s:
        began_s = time.monotonic()
        more_turns, more_paces = measure(MORE_PAIRS)
        turns, paces = turns + more_turns, paces + more_paces
        longest_s = max(longest_s, time.monotonic() - began_s)
    return turns, paces


class TrialClient:
    """A process that measures an experiment with some settings."""

    def __init__(self, spec: TrialSpec, *, folder: Path, name: str, limits: TrialLimits) -> None:
        """Start the process, and wait until it can measure.

        Args:
            spec: What the process measures.
            folder: Receives the process's input file, its log and its scratch folder.
            name: Name of these files, without suffix.
            limits: How long the trial may take.

        Raises:
            TrialFailed: the settings cannot be measured.
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
        """Measure `count` pairs of windows."""
        found = self._ask("turns", seconds=self._limits.window_s, count=count, pace_s=PACE_S)
        return found["turns"], found["paces"]

    def profile(self, *, max_pairs: int = MAX_PAIRS) -> Profile:
        """Measure where the time of a step goes, with at most this many pairs of windows."""
        turns, paces = enough_turns(self.turns, left_s=self._limits.left_s, max_pairs=max_pairs)
        windows = Windows(
            turns=turns,
            paces=paces,
            called=[self._window("called") for _ in range(3)],
            taken=[self._window("input") for _ in range(3)],
        )
        return profile_of(self._facts, windows)

    def curve(self, *, seed: int, steps: int, every: int) -> list[float]:
        """Train for some steps; return the mean loss of each stretch of `every` steps."""
        found: list[float] = self._ask("curve", seed=seed, steps=steps, every=every)
        return found

    def other_precision(self) -> tuple[str, Gain]:
        """Return another precision, and how much faster the step is with it."""
        found = self._ask("precision", seconds=self._limits.window_s / 2, count=MIN_PAIRS)
        return found["precision"], gain_of(found["pairs"])

    def explain(self) -> dict[str, Any]:
        """Return the other facts of a profile; see `stoker.app.tuning.session.Session.explain`."""
        found: dict[str, Any] = self._ask(
            "explain", seconds=self._limits.window_s, peak_s=PEAK_S, calls=TIMELINE_CALLS
        )
        return found

    def close(self) -> None:
        """End the process, and remove its scratch folder."""
        self._process.close()
        remove(self._scratch)

    def _window(self, kind: str) -> Any:
        return self._ask("window", kind=kind, seconds=self._limits.window_s)

    def _ask(self, what: str, **arguments: Any) -> Any:
        timeout_s = self._limits.timeout_s(self._limits.max_s)
        try:
            answer = self._process.ask(what, timeout_s=timeout_s, **arguments)
            # Otherwise this process's input pipeline would compete with the next measurement.
            self._process.pause()
            return answer
        except TrialFailed as failed:
            self.is_usable = False
            raise self._limits.failure(failed, what) from None
