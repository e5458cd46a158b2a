"""The tuning loop: measure, find the bottleneck, change one thing, measure again, keep or revert."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from stoker.tune.compare import (
    SAME,
    SEEDS,
    Gain,
    Load,
    Parity,
    compare,
    gain_of,
    parity_of,
    stretches,
    threshold_of,
)
from stoker.tune.ledger import Ledger, decide
from stoker.tune.levers import EXHAUSTED, Lever, Situation, data_service, levers
from stoker.tune.process import TrialFailed
from stoker.tune.profile import GOAL, Diagnosis, Profile, diagnose, most_idle

MIN_WAIT = 0.05
"""A lever that prepares more batches at once is tried only if training waits for batches for at least this
share of the time. Otherwise the input's cost is only the CPU time that it takes from the step."""

Settings = Mapping[str, Any]
"""Dotted name of a setting of `stoker.yaml` -> value."""

Watch = Callable[[int, int], AbstractContextManager[Callable[[], Load | None]]]
"""`stoker.tune.compare.watched_load`, called with the IDs of two processes."""


class Trial(Protocol):
    """A process that measures the experiment with some settings; see `stoker.tune.client`."""

    situation: Situation

    is_usable: bool
    """Whether it still works: none of its requests has failed."""

    @property
    def pid(self) -> int:
        """ID of the process, which leads its own session."""

    def speed(self) -> float:
        """Return the samples per second of a window of training."""

    def input_speed(self) -> float:
        """Return the samples per CPU second of a window of the input alone."""

    def profile(self) -> Profile:
        """Measure where the time of a step goes."""

    def curve(self, *, seed: int, steps: int, every: int) -> list[float]:
        """Train for some steps; return the mean loss of each stretch of `every` steps."""

    def close(self) -> None:
        """End the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of a tuning."""

    budget_s: float = 600.0
    """Wall time of the tuning, seconds. At its end the current lever is given up; kept levers stay."""

    parity_steps: int = 100
    """Number of steps of each loss curve."""

    lever_s: float = 300.0
    """Maximum time for one answer of a process, seconds; after that, the process counts as hung."""

    busy_goal: float = GOAL
    """If the busy fraction is at least this, no lever of the input is tried. `_why_not` decides whether the median or
    the upper end of its interval is compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Result of one lever."""

    lever: str
    settings: dict[str, Any]
    decision: str
    """kept, reverted, proposed, failed or skipped."""

    why: str
    gain: Gain = SAME
    """Gain in samples per second."""

    input_gain: Gain | None = None
    """Gain in samples per CPU second of the input, for levers judged by it; None for others."""

    parity: Parity | None = None
    took_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """Result of a tuning."""

    settings: dict[str, Any]
    """Settings that were kept; empty if no lever helped."""

    outcomes: tuple[Outcome, ...]
    noise: Gain
    """Ratio of the speeds of two processes with the same settings. It is measured at the start, and again
    when the bottleneck may have changed; this is the last measurement."""

    before: Profile
    after: Profile
    diagnosis_before: Diagnosis
    diagnosis_after: Diagnosis
    took_s: float
    ended: str
    """Why the tuning ended, a clause."""

    finished: bool = True
    """Whether all levers that may help were tried."""


def search(
    open_trial: Callable[[Settings, float], Trial],
    *,
    ledger: Ledger,
    limits: Limits,
    log: Callable[[str, float], None],
    watch: Watch,
) -> Tuned:
    """Tune a training.

    Args:
        open_trial: Starts a trial. Its arguments are settings in addition to the experiment's own, and
            the time that the trial may take, seconds. Raises `TrialFailed` if it cannot measure.
        ledger: Receives every sample and decision.
        limits: Limits of time, and the goal.
        log: Called with a line for the user, and the time that is left, seconds.
        watch: Measures the load of other processes.

    Returns:
        The settings that were kept, and their measurements.

    Raises:
        TrialFailed: the unchanged experiment cannot be measured.
    """
    running = _Search(open_trial, ledger, limits, log, watch)
    try:
        return running.run()
    finally:
        running.current.close()


class _Search:
    def __init__(
        self,
        open_trial: Callable[[Settings, float], Trial],
        ledger: Ledger,
        limits: Limits,
        log: Callable[[str, float], None],
        watch: Watch,
    ) -> None:
        self.ledger, self.limits, self.watch = ledger, limits, watch
        self._open_trial, self._log = open_trial, log
        self._began_s = time.monotonic()
        self.settings: dict[str, Any] = {}
        self._settings_before: dict[str, Any] = {}
        """The kept settings without those of the last kept lever."""
        self.outcomes: list[Outcome] = []
        self._curves: dict[str, list[list[float]]] = {}
        self._threshold = 1.0
        self._noise = SAME
        self._retried: set[str] = set()
        """Levers during whose measurement the process with the kept settings failed; each is tried only once more."""
        self.log("measuring the experiment as it is")
        self.current = self.open({})
        """The trial with the kept settings."""

    @property
    def left_s(self) -> float:
        """Remaining time of the budget, seconds."""
        return self.limits.budget_s - (time.monotonic() - self._began_s)

    def log(self, line: str) -> None:
        self._log(line, max(0.0, self.left_s))

    def open(self, settings: Settings) -> Trial:
        return self._open_trial(settings, self.left_s)

    def run(self) -> Tuned:
        before = after = self.current.profile()
        diagnosis_before = diagnosis = self._diagnose("before", before)
        ended, finished = "no lever is left", True
        try:
            self._measure_noise()
            is_another = False
            while (lever := self._next(after, diagnosis)) is not None:
                if is_another:
                    self._measure_noise_again()
                    is_another = False
                self._replace_dead_trial()
                if not self._try(lever):
                    continue
                after, bottleneck = self._profile_with(lever), diagnosis.bottleneck
                diagnosis = self._diagnose("after", after)
                is_another = lever.part == "input" or diagnosis.bottleneck != bottleneck
            self._propose_service(after, diagnosis)
        except TrialFailed as failed:
            if failed.kind != "budget" and not self.outcomes:
                raise
            # The result is valid: all kept settings have been measured.
            finished = False
            ended = failed.text if failed.kind == "budget" else f"it could not continue: {failed}"
        tuned = Tuned(
            settings=self.settings,
            outcomes=tuple(self.outcomes),
            noise=self._noise,
            before=before,
            after=after,
            diagnosis_before=diagnosis_before,
            diagnosis_after=diagnosis,
            took_s=time.monotonic() - self._began_s,
            ended=ended,
            finished=finished,
        )
        self.ledger.write(
            "end", {"settings": tuned.settings, "ended": ended, "took_s": tuned.took_s}
        )
        return tuned

    def _diagnose(self, event: str, profile: Profile) -> Diagnosis:
        diagnosis = diagnose(profile, own_dataset=self.current.situation.own_dataset)
        self.ledger.write(event, {"profile": profile.to_json(), "diagnosis": asdict(diagnosis)})
        return diagnosis

    def _profile_with(self, lever: Lever) -> Profile:
        """Measure the training with a lever that was just kept; if this fails, the lever is only proposed.

        Raises:
            TrialFailed: the training could not be measured.
        """
        try:
            return self.current.profile()
        except TrialFailed as failed:
            # The figures of a lock file must have been measured with all of its settings.
            why = f"{self.outcomes[-1].why}; not applied: its result was not measured, {failed}"
            self.outcomes[-1] = replace(self.outcomes[-1], decision="proposed", why=why)
            self.settings = self._settings_before
            self.ledger.write("taken back", {"lever": lever.name, "why": failed.text})
            raise

    def _measure_noise(self) -> None:
        """Measure how much faster one of two processes with the same settings seems to be."""
        self.log("measuring the noise: two processes with the same settings")
        other = self.open(self.settings)
        try:
            # With the threshold 0, only `MIN_PAIRS` pairs are measured, which are enough for an interval.
            self._noise, pairs = compare(self.current.speed, other.speed, threshold=0.0)
        finally:
            other.close()
        self._threshold = threshold_of(self._noise)
        self.ledger.write("noise", {"pairs": pairs, "gain": asdict(self._noise)})

    def _measure_noise_again(self) -> None:
        """Measure the noise with the kept settings: with another bottleneck, the speed varies differently."""
        try:
            self._measure_noise()
        except TrialFailed as failed:
            if failed.kind == "budget" or self.left_s <= 0:
                raise
            # E.g. two processes do not fit in memory. The old threshold stays valid.
            self.log(f"the noise could not be measured again: {failed}")

    def _next(self, profile: Profile, diagnosis: Diagnosis) -> Lever | None:
        """Return the first lever that was not tried yet and may help now; None if there is none."""
        tried = [outcome for outcome in self.outcomes if outcome.decision != "skipped"]
        done = {outcome.lever for outcome in tried}
        no_memory = {outcome.lever for outcome in tried if outcome.why.startswith("memory:")}
        skipped = []
        for lever in levers(self.current.situation):
            if lever.name in done or lever.after_memory_of not in {None, *no_memory}:
                continue
            why = self._why_not(lever, profile, diagnosis)
            if why is None:
                return lever
            skipped.append(_outcome_of(lever, "skipped", why))
        self.outcomes = tried + skipped
        for outcome in skipped:
            facts = {"lever": outcome.lever, "decision": "skipped", "why": outcome.why}
            self.ledger.write("decision", facts)
        return None

    def _propose_service(self, profile: Profile, diagnosis: Diagnosis) -> None:
        """Propose a data service, which cannot be tried here, if the input is still the bottleneck."""
        if diagnosis.bottleneck != "input":
            return
        lever = data_service(
            self.current.situation,
            cores_used=profile.cores_used,
            busy_fraction=profile.busy_fraction,
        )
        if lever is not None:
            self.outcomes.append(_outcome_of(lever, "proposed", lever.why))
            self.ledger.write("decision", _facts(self.outcomes[-1]))

    def _why_not(self, lever: Lever, profile: Profile, diagnosis: Diagnosis) -> str | None:
        """Return why a lever cannot help now; None if it may help."""
        waits = diagnosis.bottleneck == "input"
        # The median of U is compared with the goal if the input is the bottleneck. It is also compared for
        # levers judged by CPU time, which is less noisy, if the input causes most of the idle time. In all
        # other cases the upper end of U's interval is compared.
        by_median = not lever.by_speed and most_idle(profile) == "input"
        busy = profile.busy_fraction if waits or by_median else profile.busy_high
        cores = self.current.situation.cores
        if lever.part == "input" and busy >= self.limits.busy_goal:
            return (
                f"the device is already busy {profile.busy_low:.0%} to {profile.busy_high:.0%} of the "
                "time"
            )
        if lever.does_more_at_once and profile.input_wait < MIN_WAIT:
            return f"training waits for batches only {profile.input_wait:.1%} of the time"
        if lever.does_more_at_once and profile.cores_used >= EXHAUSTED * cores:
            return f"training uses {profile.cores_used:.1f} of {cores} cores: no core is idle"
        if lever.part != "input" and waits:
            return "the input is the bottleneck: a faster step would only wait longer for it"
        if lever.only_for not in {None, diagnosis.bottleneck}:
            return f"{lever.only_for} is not the bottleneck"
        return None

    def _replace_dead_trial(self) -> None:
        """Start another process with the kept settings if the current one has failed, e.g. out of memory."""
        if self.current.is_usable:
            return
        self._require_time()
        self.log("the process with the kept settings has ended; another one replaces it")
        self.ledger.write("replaced", {"settings": self.settings})
        self.current.close()
        self.current = self.open(self.settings)

    def _require_time(self) -> None:
        if self.left_s <= 0:
            text = f"the budget of {self.limits.budget_s:.0f} s is used up"
            raise TrialFailed("budget", text)

    def _try(self, lever: Lever) -> bool:
        """Compare a lever with the kept settings; return whether the lever was kept."""
        self._require_time()
        self.log(f"trying {lever.name}")
        began_s = time.monotonic()
        samples: dict[str, Any] = {"only_proposed": lever.only_proposed}
        candidate: Trial | None = None
        kept = False
        try:
            candidate = self.open(self.settings | dict(lever.settings))
            self._measure_in_quiet(lever, candidate, samples)
            outcome = _judged(lever, samples, threshold=self._threshold)
            kept = outcome.decision == "kept"
        except TrialFailed as failed:
            if failed.kind == "budget" or self.left_s <= 0:
                text = f"the budget ended while {lever.name} was tried"
                raise TrialFailed("budget", text) from None
            if not self.current.is_usable and lever.name not in self._retried:
                # The process with the kept settings failed, so perhaps the lever is not the cause: try it once more.
                self._retried.add(lever.name)
                return False
            outcome = _outcome_of(lever, "failed", f"{failed.kind}: {failed.text}")
        finally:
            if candidate is not None and not kept:
                candidate.close()
        outcome = replace(outcome, took_s=time.monotonic() - began_s)
        self.outcomes.append(outcome)
        self.ledger.write("decision", samples | _facts(outcome))
        self.log(f"{lever.name}: {outcome.decision}, {outcome.why}")
        if kept and candidate is not None:
            self.current.close()
            self.current = candidate
            self._settings_before = dict(self.settings)
            self.settings |= dict(lever.settings)
        return kept

    def _measure_in_quiet(self, lever: Lever, candidate: Trial, samples: dict[str, Any]) -> None:
        """Measure a lever; if other programs disturbed this and the lever is not reverted, measure once more."""
        for is_second in (False, True):
            with self.watch(self.current.pid, candidate.pid) as load:
                self._measure(lever, candidate, samples)
            found = load()
            samples["other_load"] = "" if found is None or found.is_quiet else found.text()
            decision = decide(samples, threshold=self._threshold)
            if is_second or not samples["other_load"] or decision == "reverted":
                break
            self.log(f"{samples['other_load']}: measuring {lever.name} once more")
            samples["disturbed"] = dict(samples)
        if lever.changes_numbers and decision == "kept":
            self._require_time()
            samples["curves"] = self._loss_curves(candidate)

    def _measure(self, lever: Lever, candidate: Trial, samples: dict[str, Any]) -> None:
        """Measure pairs of windows: of the trial with the kept settings, and of the candidate."""
        current, threshold = self.current, self._threshold
        if lever.part == "input" and not lever.by_speed:
            speeds = current.input_speed, candidate.input_speed
            _, samples["input_pairs"] = compare(*speeds, threshold=threshold)
            threshold = 1.0 / threshold
        _, samples["pairs"] = compare(current.speed, candidate.speed, threshold=threshold)

    def _loss_curves(self, candidate: Trial) -> list[list[list[float]]]:
        """Return the loss curves of both settings. Both train at the same time, because nothing is timed."""
        steps = self.limits.parity_steps
        every = stretches(steps)

        def curves(trial: Trial) -> list[list[float]]:
            return [trial.curve(seed=seed, steps=steps, every=every) for seed in SEEDS]

        self.log(f"comparing loss curves over {steps} steps, {len(SEEDS)} seeds")
        key = repr(sorted(self.settings.items()))
        with ThreadPoolExecutor(2) as pool:
            others = pool.submit(curves, candidate)
            if key not in self._curves:
                self._curves[key] = curves(self.current)
            return [self._curves[key], others.result()]


def _outcome_of(lever: Lever, decision: str, why: str) -> Outcome:
    return Outcome(lever=lever.name, settings=dict(lever.settings), decision=decision, why=why)


def _judged(lever: Lever, samples: Mapping[str, Any], *, threshold: float) -> Outcome:
    """Return the outcome that follows from the samples."""
    decision = decide(samples, threshold=threshold)
    gain = gain_of(samples["pairs"])
    input_gain = gain_of(samples["input_pairs"]) if "input_pairs" in samples else None
    parity = parity_of(*samples["curves"]) if "curves" in samples else None
    why = f"{gain.shown()} samples/s"
    if input_gain is not None:
        why += f", {input_gain.shown()} samples per CPU second of the input"
    if decision == "proposed":
        reason = lever.why if lever.only_proposed or parity is None else parity.why
        why += f"; not applied: {reason}"
    elif decision == "kept":
        why += "" if parity is None else f"; {parity.why}"
    else:
        why += ": slower" if gain.high < 1.0 else ": no gain beyond the noise"
    why += f"; {samples['other_load']} during the trial" if samples["other_load"] else ""
    outcome = _outcome_of(lever, decision, why)
    return replace(outcome, gain=gain, input_gain=input_gain, parity=parity)


def _facts(outcome: Outcome) -> dict[str, Any]:
    names = ("lever", "settings", "decision", "why", "took_s")
    return {name: getattr(outcome, name) for name in names}
