"""The closed loop: measure, name the bottleneck, change one thing, measure again, keep or revert."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, replace
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

LEAST_WAIT = 0.05
"""Share of the time that has to be waited for batches, so that more of them at once can help: what else
the input costs is what it takes from the step."""

Settings = Mapping[str, Any]
"""Dotted names of `stoker.yaml` -> values."""


Watch = Callable[[int, int], AbstractContextManager[Callable[[], Load | None]]]
"""`stoker.tune.compare.watched_load`, of two processes."""


class Bench(Protocol):
    """One setting of the experiment, in a process of its own."""

    situation: Situation

    @property
    def pid(self) -> int:
        """Of that process, which leads a session of its own."""

    is_usable: bool
    """Whether it can still be asked: all that it was asked has had an answer."""

    def speed(self) -> float:
        """Samples in a second of a window of training."""

    def input_speed(self) -> float:
        """Samples that a second of CPU makes, in a window of the input alone."""

    def profile(self) -> Profile:
        """Where its time goes."""

    def curve(self, *, seed: int, steps: int, every: int) -> list[float]:
        """Mean losses of stretches of a training."""

    def close(self) -> None:
        """End the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What a tuning may take."""

    budget_s: float = 600.0
    """Wall time; what is under way when it is over is given up, what was kept stays."""

    parity_steps: int = 100
    """Steps of each loss curve."""

    lever_s: float = 300.0
    """Longest that one question to a process may take, but for the first ingest: what has no answer
    by then hangs."""

    busy_goal: float = GOAL
    """From this busy fraction on no lever of the input is tried; where the input is not waited for, an
    interval that reaches it counts as much, but for levers that CPU time decides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What became of one lever."""

    lever: str
    settings: dict[str, Any]
    decision: str
    """kept, reverted, proposed, failed or skipped."""

    why: str
    gain: Gain = SAME
    """Of samples a second."""

    input_gain: Gain | None = None
    """Of the input's CPU time, where that decides."""

    parity: Parity | None = None
    took_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """What a tuning found."""

    settings: dict[str, Any]
    """What was kept; empty: nothing helps."""

    outcomes: tuple[Outcome, ...]
    noise: Gain
    """How two processes of the same settings differ, when it was measured last: at first, and before
    the next lever once something else is waited for."""

    before: Profile
    after: Profile
    diagnosis_before: Diagnosis
    diagnosis_after: Diagnosis
    took_s: float
    ended: str
    """Why nothing more was tried."""

    finished: bool = True
    """Whether that was because nothing was left to be tried."""


@dataclass
class _Search:
    open_bench: Callable[[Settings, float], Bench]
    ledger: Ledger
    limits: Limits
    log: Callable[[str, float], None]
    watch: Watch
    began_s: float = field(default_factory=time.monotonic)
    settings: dict[str, Any] = field(default_factory=dict)
    before_lever: dict[str, Any] = field(default_factory=dict)
    """Without the lever that was kept last."""
    outcomes: list[Outcome] = field(default_factory=list)
    curves: dict[str, list[list[float]]] = field(default_factory=dict)
    threshold: float = 1.0
    now: Bench | None = None
    """What was kept so far."""
    lost: set[str] = field(default_factory=set)
    """Levers beside which the process of what was kept has died."""

    @property
    def left_s(self) -> float:
        """Of the budget."""
        return self.limits.budget_s - (time.monotonic() - self.began_s)

    def require_time(self) -> None:
        if self.left_s <= 0:
            raise TrialFailed("budget", f"the budget of {self.limits.budget_s:.0f} s is used up")

    def close(self) -> None:
        if self.now is not None:
            self.now.close()

    def say(self, line: str) -> None:
        self.log(line, max(0.0, self.left_s))


def search(
    open_bench: Callable[[Settings, float], Bench],
    *,
    ledger: Ledger,
    limits: Limits,
    log: Callable[[str, float], None],
    watch: Watch,
) -> Tuned:
    """Tune a training.

    Args:
        open_bench: Starts a process for settings beside the experiment's own, and the seconds that
            it may take. It raises `TrialFailed` where they cannot be measured.
        ledger: Takes every sample and decision.
        limits: What it may take.
        log: Receives a line, and the seconds that are left.
        watch: Looks at what others take of the cores meanwhile.

    Returns:
        What was kept, and the proof.

    Raises:
        TrialFailed: the experiment as it is cannot be measured.
    """
    state = _Search(open_bench, ledger, limits, log, watch)
    with ExitStack() as at_end:
        state.say("measuring the experiment as it is")
        state.now = open_bench({}, state.left_s)
        at_end.callback(state.close)
        before = after = state.now.profile()
        own_dataset = state.now.situation.own_dataset
        diagnosis_before = diagnosis = diagnose(before, own_dataset=own_dataset)
        ledger.write("before", {"profile": before.to_json(), "diagnosis": asdict(diagnosis)})
        noise, ended, finished = SAME, "no lever is left", True
        try:
            noise = _noise(state, state.now)
            is_another = False
            while (lever := _next(state, after, diagnosis)) is not None:
                if is_another:
                    noise, is_another = _noise_again(state, noise), False
                if not _try(state, lever, now=_alive(state, state.now)):
                    continue
                after, waited_for = _result(state, lever), diagnosis.bottleneck
                diagnosis = diagnose(after, own_dataset=own_dataset)
                ledger.write("after", {"profile": after.to_json(), "diagnosis": asdict(diagnosis)})
                is_another = lever.part == "input" or diagnosis.bottleneck != waited_for
            _propose(state, after, diagnosis)
        except TrialFailed as failed:
            if failed.kind != "budget" and not state.outcomes:
                raise
            # What was kept has its proof, and its figures, already.
            finished = False
            ended = failed.text if failed.kind == "budget" else f"it could not go on: {failed}"
    tuned = Tuned(
        settings=state.settings,
        outcomes=tuple(state.outcomes),
        noise=noise,
        before=before,
        after=after,
        diagnosis_before=diagnosis_before,
        diagnosis_after=diagnosis,
        took_s=time.monotonic() - state.began_s,
        ended=ended,
        finished=finished,
    )
    ledger.write("end", {"settings": tuned.settings, "ended": ended, "took_s": tuned.took_s})
    return tuned


def _result(state: _Search, lever: Lever) -> Profile:
    """What it is with a lever that was just kept; without that, the lever is only proposed.

    Raises:
        TrialFailed: it could not be measured.
    """
    assert state.now is not None
    try:
        return state.now.profile()
    except TrialFailed as failed:
        # A lock file promises what was measured with all that it sets.
        why = f"{state.outcomes[-1].why}; not applied: what it led to was not measured, {failed}"
        state.outcomes[-1] = replace(state.outcomes[-1], decision="proposed", why=why)
        state.settings = state.before_lever
        state.ledger.write("taken back", {"lever": lever.name, "why": failed.text})
        raise


def _noise(state: _Search, bench: Bench) -> Gain:
    """How much faster one of two equal processes seems to be."""
    state.say("measuring the noise: two processes with the same settings")
    other = state.open_bench(state.settings, state.left_s)
    try:
        # No threshold decides early: as many pairs as give an interval.
        noise, pairs = compare(bench.speed, other.speed, threshold=0.0)
    finally:
        other.close()
    state.threshold = threshold_of(noise)
    state.ledger.write("noise", {"pairs": pairs, "gain": asdict(noise)})
    return noise


def _noise_again(state: _Search, before: Gain) -> Gain:
    """The noise of what was kept: what is waited for now varies otherwise than what was."""
    if state.now is None:
        return before
    try:
        return _noise(state, state.now)
    except TrialFailed as failed:
        if failed.kind == "budget" or state.left_s <= 0:
            raise
        # E.g. two of them do not fit in memory: what was kept stays, and the bar where it was.
        state.say(f"the noise could not be measured again: {failed}")
        return before


def _next(state: _Search, profile: Profile, diagnosis: Diagnosis) -> Lever | None:
    """The first lever that was not tried and can help, as things are."""
    if state.now is None:
        return None
    done = {outcome.lever for outcome in state.outcomes if outcome.decision != "skipped"}
    waiting = []
    no_memory = {o.lever for o in state.outcomes if o.why.startswith("memory:")}
    for lever in levers(state.now.situation):
        if lever.name in done or lever.after_memory_of not in {None, *no_memory}:
            continue
        why = _why_not(lever, profile, diagnosis, state)
        if why is None:
            return lever
        waiting.append((lever, why))
    state.outcomes = [outcome for outcome in state.outcomes if outcome.decision != "skipped"]
    for lever, why in waiting:
        state.outcomes.append(
            Outcome(lever=lever.name, settings=dict(lever.settings), decision="skipped", why=why)
        )
        state.ledger.write("decision", {"lever": lever.name, "decision": "skipped", "why": why})
    return None


def _propose(state: _Search, profile: Profile, diagnosis: Diagnosis) -> None:
    """What cannot be tried here, where it is what is left."""
    if state.now is None or diagnosis.bottleneck != "input":
        return
    lever = data_service(
        state.now.situation, cores_used=profile.cores_used, busy_fraction=profile.busy_fraction
    )
    if lever is not None:
        outcome = Outcome(lever=lever.name, settings={}, decision="proposed", why=lever.why)
        state.outcomes.append(outcome)
        state.ledger.write("decision", _facts(outcome))


def _why_not(lever: Lever, profile: Profile, diagnosis: Diagnosis, state: _Search) -> str | None:
    waits = diagnosis.bottleneck == "input"
    # Where the input is waited for, U decides. Else an interval that reaches the goal is taken for
    # busy; not for levers that CPU time decides, of which noise hides little, where most of what is
    # idle is the input's.
    told = not lever.by_speed and most_idle(profile) == "input"
    busy = profile.busy_fraction if waits or told else profile.busy_high
    if lever.part == "input" and busy >= state.limits.busy_goal:
        return (
            f"the device is busy {profile.busy_low:.0%} to {profile.busy_high:.0%} of the time "
            "already"
        )
    cores = state.now.situation.cores if state.now is not None else 1
    if lever.does_more_at_once and profile.input_wait < LEAST_WAIT:
        return f"batches are waited for {profile.input_wait:.1%} of the time: more would lie there"
    if lever.does_more_at_once and profile.cores_used >= EXHAUSTED * cores:
        return (
            f"training uses {profile.cores_used:.1f} of {cores} cores: nothing more can be done at "
            "once"
        )
    if lever.part != "input" and waits:
        return "the input is what is waited for: a faster step would wait longer"
    if lever.only_for not in {None, diagnosis.bottleneck}:
        return f"{lever.only_for} is not what is waited for"
    return None


def _alive(state: _Search, now: Bench) -> Bench:
    """What was kept; another process of it, where that one has died (for want of memory, say)."""
    if now.is_usable:
        return now
    state.require_time()
    state.say("the process of what was kept has ended; another takes its place")
    state.ledger.write("replaced", {"settings": state.settings})
    now.close()
    state.now = None
    state.now = state.open_bench(state.settings, state.left_s)
    return state.now


def _try(state: _Search, lever: Lever, *, now: Bench) -> bool:
    """Measure a lever against what there is; whether it was kept."""
    state.require_time()
    state.say(f"trying {lever.name}")
    began_s, samples = time.monotonic(), {"only_proposed": lever.only_proposed}
    candidate: Bench | None = None
    kept = False
    try:
        candidate = state.open_bench(state.settings | dict(lever.settings), state.left_s)
        _measure_in_quiet(state, lever, (now, candidate), samples)
        outcome = _outcome(state, lever, samples, took_s=time.monotonic() - began_s)
        kept = outcome.decision == "kept"
    except TrialFailed as failed:
        if failed.kind == "budget" or state.left_s <= 0:
            raise TrialFailed("budget", f"the budget ended while {lever.name} was tried") from None
        if not now.is_usable and lever.name not in state.lost:
            # Not the lever's fault, as far as is known: it is tried again, once.
            state.lost.add(lever.name)
            return False
        outcome = Outcome(
            lever=lever.name,
            settings=dict(lever.settings),
            decision="failed",
            why=f"{failed.kind}: {failed.text}",
            took_s=time.monotonic() - began_s,
        )
    finally:
        if candidate is not None and not kept:
            candidate.close()
    state.outcomes.append(outcome)
    state.ledger.write("decision", samples | _facts(outcome))
    state.say(f"{lever.name}: {outcome.decision}, {outcome.why}")
    if kept and candidate is not None:
        now.close()
        state.now = candidate
        state.before_lever = dict(state.settings)
        state.settings |= dict(lever.settings)
    return kept


def _measure_in_quiet(
    state: _Search, lever: Lever, benches: tuple[Bench, Bench], samples: dict[str, Any]
) -> None:
    """Take the samples that decide; a gain beside other work has to be seen once more."""
    now, candidate = benches
    for disturbed in (False, True):
        with state.watch(now.pid, candidate.pid) as load:
            _measure(state, lever, benches, samples)
        found = load()
        samples["beside"] = "" if found is None or found.is_quiet else found.text()
        decision = decide(samples, threshold=state.threshold)
        if disturbed or not samples["beside"] or decision == "reverted":
            break
        state.say(f"{samples['beside']}: measuring {lever.name} once more")
        samples["disturbed"] = dict(samples)
    if lever.changes_numbers and decision == "kept":
        state.require_time()
        samples["curves"] = _curves(state, benches)


def _measure(
    state: _Search, lever: Lever, benches: tuple[Bench, Bench], samples: dict[str, Any]
) -> None:
    """Take pairs of windows."""
    now, candidate = benches
    threshold = state.threshold
    if lever.part == "input" and not lever.by_speed:
        _, samples["input_pairs"] = compare(
            now.input_speed, candidate.input_speed, threshold=threshold
        )
        _, samples["pairs"] = compare(now.speed, candidate.speed, threshold=1.0 / threshold)
    else:
        _, samples["pairs"] = compare(now.speed, candidate.speed, threshold=threshold)


def _curves(state: _Search, benches: tuple[Bench, Bench]) -> list[list[list[float]]]:
    """Loss curves of both settings; the two processes train at once, since nothing is timed."""
    steps = state.limits.parity_steps
    every = stretches(steps)

    def of(bench: Bench) -> list[list[float]]:
        return [bench.curve(seed=seed, steps=steps, every=every) for seed in SEEDS]

    state.say(f"comparing loss curves over {steps} steps, {len(SEEDS)} seeds")
    key = repr(sorted(state.settings.items()))
    with ThreadPoolExecutor(2) as pool:
        candidate = pool.submit(of, benches[1])
        if key not in state.curves:
            state.curves[key] = of(benches[0])
        return [state.curves[key], candidate.result()]


def _outcome(state: _Search, lever: Lever, samples: Mapping[str, Any], *, took_s: float) -> Outcome:
    decision = decide(samples, threshold=state.threshold)
    gain = gain_of(samples["pairs"])
    cheaper = gain_of(samples["input_pairs"]) if "input_pairs" in samples else None
    parity = parity_of(*samples["curves"]) if "curves" in samples else None
    return Outcome(
        lever=lever.name,
        settings=dict(lever.settings),
        decision=decision,
        why=_why(decision, lever, gain=gain, cheaper=cheaper, parity=parity)
        + (f"; {samples['beside']} meanwhile" if samples["beside"] else ""),
        gain=gain,
        input_gain=cheaper,
        parity=parity,
        took_s=took_s,
    )


def _why(
    decision: str, lever: Lever, *, gain: Gain, cheaper: Gain | None, parity: Parity | None
) -> str:
    seen = f"{gain.shown()} samples/s"
    if cheaper is not None:
        seen += f", {cheaper.shown()} samples per CPU second of the input"
    if decision == "proposed":
        reason = lever.why if lever.only_proposed or parity is None else parity.why
        return f"{seen}; not applied: {reason}"
    if decision == "kept" and parity is not None:
        return f"{seen}; {parity.why}"
    if decision == "kept":
        return seen
    return f"{seen}: slower" if gain.high < 1.0 else f"{seen}: no gain beyond the noise"


def _facts(outcome: Outcome) -> dict[str, Any]:
    return {
        "lever": outcome.lever,
        "settings": outcome.settings,
        "decision": outcome.decision,
        "why": outcome.why,
        "took_s": outcome.took_s,
    }
