"""One setting of an experiment under measurement: a trial, asked as the tuning asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from stoker.app.experiment import Experiment
from stoker.app.tuned_settings import with_settings
from stoker.core.errors import UserError
from stoker.core.files import remove
from stoker.core.finding import Finding
from stoker.tune.compare import PAIRS_LEAST, PAIRS_MOST, Gain, gain_of
from stoker.tune.levers import Situation
from stoker.tune.process import Trial, TrialFailed
from stoker.tune.profile import Profile, is_clear, profile_of

WINDOW_S = 0.5
"""A window: long against a scheduler's slice, short against what else the machine takes up."""

TURNS_MORE = 2
"""Pairs of windows that are added where so many as give an interval do not tell yet."""

_ROOM = 8
"""How many times as long as they take must be left for more of them: other windows follow."""

PACE_S = 0.1
"""How long the machine's own pace is measured behind each of them."""

SCRATCH = ".scratch"
"""How the folder ends that a trial has until its end, beside its file and its log."""

CALLS = 12
"""Calls of a timeline."""

_DOING = {
    "prepare": "a process was getting ready",
    "begin": "a process did its first steps",
    "curve": "a loss curve was drawn",
    "window": "steps were measured",
}
"""What is asked of a trial -> what it does meanwhile."""


def _late(what: str) -> str:
    return f"the time was up while {_DOING.get(what, f'a process was asked for its {what}')}"


@contextmanager
def one_bench(
    experiment: Experiment,
    *,
    folder: Path,
    name: str,
    within_s: float,
    tell: Callable[[str], None],
) -> Iterator[TrialBench]:
    """An experiment as it is set, alone.

    Args:
        experiment: What is measured.
        folder: Takes what the process is told and prints.
        name: Of its files.
        within_s: Time for all, seconds.
        tell: Told what the process does before it can measure.

    Raises:
        TrialFailed: it cannot be measured.
    """
    end_s = time.monotonic() + within_s
    bench = TrialBench(
        experiment,
        {},
        folder=folder,
        name=name,
        left_s=lambda: end_s - time.monotonic(),
        most_s=within_s,
        tell=tell,
    )
    try:
        yield bench
    finally:
        bench.close()


Turns = tuple[list[Any], list[float | None]]
"""Pairs of windows, resident and real, and the machine's pace behind each."""


def enough_turns(
    take: Callable[[int], Turns], *, left_s: Callable[[], float], most: int = PAIRS_MOST
) -> Turns:
    """Pairs of windows, as many as tell whether the device is busy, or as there is time for.

    Args:
        take: Measures so many.
        left_s: Seconds that are left for all.
        most: How many there may be; no fewer than `PAIRS_LEAST`.
    """
    began_s = time.monotonic()
    turns, paces = take(PAIRS_LEAST)
    longest_s = (time.monotonic() - began_s) * TURNS_MORE / PAIRS_LEAST
    while not is_clear(turns) and len(turns) < most and left_s() > _ROOM * longest_s:
        began_s = time.monotonic()
        more_turns, more_paces = take(TURNS_MORE)
        turns, paces = turns + more_turns, paces + more_paces
        longest_s = max(longest_s, time.monotonic() - began_s)
    return turns, paces


class TrialBench:
    """A process that measures one setting."""

    def __init__(
        self,
        experiment: Experiment,
        settings: Mapping[str, Any],
        *,
        folder: Path,
        name: str,
        left_s: Callable[[], float],
        tell: Callable[[str], None] = lambda _: None,
        most_s: float,
        window_s: float = WINDOW_S,
    ) -> None:
        """Start it, and wait until it can measure.

        Args:
            experiment: As it is.
            settings: Dotted names of `stoker.yaml` -> values, beside its own.
            folder: Takes what the process is told and prints.
            name: Of its files.
            left_s: Seconds that are left for all.
            tell: Told what the process does before it can measure.
            most_s: Longest that an answer may take, but for the stages before `train`, seconds.
            window_s: Length of a window.

        Raises:
            TrialFailed: it cannot be measured.
        """
        self._left_s, self._most_s, self._window_s = left_s, most_s, window_s
        self.is_usable = True
        try:
            candidate = with_settings(experiment, settings)
        except UserError as error:
            raise TrialFailed("refused", error.line()) from None
        self._scratch = (folder / f"{name}{SCRATCH}").absolute()
        spec = {
            "base": yaml.safe_dump(experiment.to_json()),
            "settings": yaml.safe_dump(candidate.to_json()),
            "scratch": str(self._scratch),
        }
        self._trial = Trial(spec, folder=folder, name=name)
        try:
            # Ingest of what has never been read takes as long as it takes.
            self.prepared = self._ask("prepare", most_s=float("inf"), told=tell)
            self.facts = self._ask("begin", told=tell)
            told = self.facts["situation"]
            self.situation = Situation(**told | {"blocks": tuple(told["blocks"])})
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._trial.pid

    def speed(self) -> float:
        """Samples in a second of a window of training."""
        window = self._window("real")
        return float(window["rows"] / window["wall_s"])

    def input_speed(self) -> float:
        """Samples that a second of CPU makes, in a window of the input alone."""
        window = self._window("input")
        return float(window["rows"] / window["cpu_s"])

    def turns(self, count: int) -> Turns:
        """So many pairs of windows, whatever they show."""
        found = self._ask("turns", seconds=self._window_s, count=count, pace_s=PACE_S)
        return found["turns"], found["paces"]

    def profile(self, *, most_pairs: int = PAIRS_MOST) -> Profile:
        """Where its time goes, by so many pairs of windows at most."""
        turns, paces = enough_turns(self.turns, left_s=self._left_s, most=most_pairs)
        return profile_of(
            self.facts,
            turns=turns,
            paces=paces,
            called=[self._window("called") for _ in range(3)],
            taken=[self._window("input") for _ in range(3)],
            checkpoint_s=self.facts["checkpoint_s"],
            communication_s=self.facts["communication_s"],
            transfer_s=self.facts["transfer_s"],
        )

    def curve(self, *, seed: int, steps: int, every: int) -> list[float]:
        """Mean losses of stretches of a training."""
        found: list[float] = self._ask("curve", seed=seed, steps=steps, every=every)
        return found

    def other_precision(self) -> tuple[str, Gain]:
        """The same step in another precision, and how much faster it is."""
        found = self._ask("precision", seconds=self._window_s / 2, count=PAIRS_LEAST)
        return found["precision"], gain_of(found["pairs"])

    def machine(self) -> dict[str, Any]:
        """What the model computes, what the device reaches, and memory; see `Session.machine`."""
        found: dict[str, Any] = self._ask("machine", seconds=2.0)
        return found

    def device(self) -> dict[str, Any]:
        """Device time by kernel class; see `Session.device`."""
        found: dict[str, Any] = self._ask("device", seconds=self._window_s)
        return found

    def stages(self) -> list[dict[str, Any]]:
        """What each stage of the input costs."""
        found: list[dict[str, Any]] = self._ask("stages")
        return found

    def findings(self) -> list[Finding]:
        """Avoidable costs in the model itself."""
        return [Finding(**each) for each in self._ask("findings")]

    def timeline(self) -> list[dict[str, Any]]:
        """Some calls, one after the other."""
        found: list[dict[str, Any]] = self._ask("timeline", calls=CALLS)
        return found

    def close(self) -> None:
        """End the process."""
        self._trial.close()
        remove(self._scratch)

    def _window(self, kind: str) -> Any:
        return self._ask("window", kind=kind, seconds=self._window_s)

    def _ask(self, what: str, *, most_s: float | None = None, **arguments: Any) -> Any:
        left_s, most_s = self._left_s(), self._most_s if most_s is None else most_s
        if left_s <= 0:
            raise TrialFailed("budget", "the time is used up")
        try:
            answer = self._trial.ask(what, timeout_s=min(most_s, left_s), **arguments)
            # Its input would go on beside whoever is measured next.
            self._trial.pause()
            return answer
        except TrialFailed as failed:
            self.is_usable = False
            if failed.kind == "hang" and left_s < most_s:
                raise TrialFailed("budget", _late(what)) from None
            raise
