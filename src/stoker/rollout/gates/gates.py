"""The built-in gates of a rollout: compute pass, fail or inconclusive from the servers' counts."""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Self

from stoker.rollout.state.settings import BAD, SHIFT, SLOW_P50, SLOW_P99
from stoker.rollout.state.state import RolloutState
from stoker.rollout.statistics.evidence import (
    BadAnswers,
    FullTraffic,
    log_evidence,
    log_suspicion,
    log_threshold,
)
from stoker.rollout.statistics.histogram import aligned, count_above
from stoker.rollout.statistics.prediction_shift import least_shift


@dataclass(kw_only=True, slots=True)
class VersionCounts:
    """Counts of one version's answers in one stage; counts of several servers can be added."""

    requests: int = 0
    bad: int = 0
    """Number of answers with a status other than 2xx, after the deadline, or with a value that is not finite."""

    latency: Counter[int] = field(default_factory=Counter)
    """Bucket of the latency in seconds -> number of answers, and of running requests that are already slow."""

    predictions: Counter[int] = field(default_factory=Counter)
    """Bucket of the predicted number or class -> number of predictions."""

    shadow: Counter[str] = field(default_factory=Counter)
    """Results of copied requests, for a candidate in a shadow stage; see `shadow.counts`."""

    def copy(self) -> VersionCounts:
        """Return a copy."""
        return VersionCounts(
            requests=self.requests,
            bad=self.bad,
            latency=self.latency.copy(),
            predictions=self.predictions.copy(),
            shadow=self.shadow.copy(),
        )

    def add(self, other: VersionCounts) -> None:
        """Add other counts, such as another server's, to these."""
        self.requests += other.requests
        self.bad += other.bad
        self.latency.update(other.latency)
        self.predictions.update(other.predictions)
        self.shadow.update(other.shadow)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageCounts:
    """Counts of both versions in one stage."""

    share: float
    """The candidate's share of the traffic, in [0, 1]."""

    baseline: VersionCounts
    candidate: VersionCounts

    is_shadow: bool = False
    """Whether both versions answered the same requests (a shadow stage); their latencies are then not comparable."""


class Verdict(StrEnum):
    """A gate's verdict on the candidate."""

    PASS = "pass"  # noqa: S105 - a verdict
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, kw_only=True, slots=True)
class GateResult:
    """The current result of one gate."""

    gate: str
    verdict: Verdict
    detail: str
    """The figures that lead to the verdict, as one clause."""

    silent_s: float = 0.0
    """Time since the gate last had an answer, seconds."""

    needs_baseline: bool = False
    """Whether the gate can decide only if the baseline takes traffic again."""

    @classmethod
    def no_answer(cls, gate: str, detail: str = "no answer yet") -> Self:
        """Return an inconclusive result."""
        return cls(gate=gate, verdict=Verdict.INCONCLUSIVE, detail=detail)

    def to_json(self) -> dict[str, str]:
        """Return the fields as a JSON object."""
        return {"gate": self.gate, "verdict": self.verdict, "detail": self.detail}


def judge(stages: Sequence[StageCounts], state: RolloutState) -> list[GateResult]:
    """Return the results of the built-in gates.

    Args:
        stages: Counts of each stage so far, oldest first.
        state: State of the rollout.
    """
    found = [_compared(BAD, stages, state, operator.attrgetter("bad"))]
    for gate in (SLOW_P99, SLOW_P50):
        above = functools.partial(_slow, limit_s=state.slow_s.get(gate, math.inf))
        found.append(_compared(gate, stages, state, above))
    return [*found, _shifted(stages, state)]


def _slow(counts: VersionCounts, *, limit_s: float) -> int:
    return count_above(counts.latency, limit_s)


def _compared(
    gate: str,
    stages: Sequence[StageCounts],
    state: RolloutState,
    bad: Callable[[VersionCounts], int],
) -> GateResult:
    seen = compared_stages(stages, gate, bad)
    found = log_evidence(seen, allowed_ratio=state.settings.allowed_ratio)
    limit = log_threshold(alpha=state.settings.alpha, gates=state.settings.gates)
    # Latency is not compared with the baseline's of an earlier stage, because it depends on the machine's load.
    if found < limit and gate == BAD and state.share == 1.0:
        suspicion = _suspicion(stages, state, limit)
        if suspicion is not None:
            return suspicion
    candidate, baseline = sum(each.candidate for each in seen), sum(each.baseline for each in seen)
    return GateResult(
        gate=gate,
        verdict=Verdict.FAIL if found >= limit else Verdict.PASS,
        detail=f"candidate {candidate}, baseline {baseline}; log evidence {found:.1f} of {limit:.1f}",
    )


def compared_stages(
    stages: Iterable[StageCounts],
    gate: str,
    bad: Callable[[VersionCounts], int] = operator.attrgetter("bad"),
) -> list[BadAnswers]:
    """Return the bad answers, as a gate counts them, in each stage in which both versions answered.

    Args:
        stages: Counts of each stage, oldest first.
        gate: Name of the gate.
        bad: Counts the answers of a version that are bad according to the gate.
    """
    return [
        BadAnswers(share=each.share, candidate=bad(each.candidate), baseline=bad(each.baseline))
        for each in stages
        if 0.0 < each.share < 1.0 and (gate == BAD or not each.is_shadow)
    ]


def _suspicion(
    stages: Sequence[StageCounts], state: RolloutState, limit: float
) -> GateResult | None:
    """Return a result if the candidate at 100 % gives more bad answers than the baseline did before; else None."""
    before = [each.baseline for each in stages if each.share < 1.0 and not each.is_shadow]
    bad, requests = at_full_traffic(stages)
    # negative if the counts of a damaged file are missing for a while
    bad = max(bad - state.explained[0], 0)
    full = FullTraffic(
        candidate=bad,
        requests=max(requests - state.explained[1], bad),
        baseline=sum(each.bad for each in before),
        baseline_requests=sum(each.requests for each in before),
    )
    found = log_suspicion(full, allowed_ratio=state.settings.allowed_ratio)
    if found < limit:
        return None
    can_compare = state.split_stage is not None
    return GateResult(
        gate=BAD,
        verdict=Verdict.INCONCLUSIVE if can_compare else Verdict.FAIL,
        detail=f"{full.candidate} of {full.requests} at 100 %, {full.baseline} of {full.baseline_requests} of the "
        f"baseline before; log evidence {found:.1f} of {limit:.1f}",
        needs_baseline=can_compare,
    )


def at_full_traffic(stages: Sequence[StageCounts]) -> tuple[int, int]:
    """Return the candidate's bad answers and requests at 100 %."""
    full = [each.candidate for each in stages if each.share == 1.0]
    return sum(each.bad for each in full), sum(each.requests for each in full)


def _shifted(stages: Sequence[StageCounts], state: RolloutState) -> GateResult:
    baseline, candidate = Counter[int](), Counter[int]()
    for each in stages:
        baseline.update(each.baseline.predictions)
        candidate.update(each.candidate.predictions)
    settings = state.settings
    shift = least_shift(*aligned(baseline, candidate), alpha=settings.alpha / settings.gates)
    limit = settings.max_shift
    return GateResult(
        gate=SHIFT,
        verdict=Verdict.FAIL if shift > limit else Verdict.PASS,
        detail=f"predictions moved by at least {shift:.2f}, the limit is {limit:.2f}",
    )


def compared_with_limits(
    gate: str, found: Sequence[bool | float | None], *, least: float | None, most: float | None
) -> GateResult:
    """Return the result of a user's gate; it is inconclusive without a value or with a number that is not finite.

    Args:
        gate: Name of the gate.
        found: Booleans or numbers, each of which must pass.
        least: Smallest number that passes; None: no lower limit.
        most: Largest number that passes; None: no upper limit.
    """
    shown = ", ".join("nothing" if each is None else f"{each:g}" for each in found[:5]) or "nothing"
    claims = [each for each in found if isinstance(each, bool)]
    numbers = [each for each in found if each is not None and not isinstance(each, bool)]
    low = -math.inf if least is None else least
    high = math.inf if most is None else most
    known = all(map(math.isfinite, numbers)) and (low, high) != (-math.inf, math.inf)
    if not all(claims) or any(math.isfinite(each) and not low <= each <= high for each in numbers):
        verdict = Verdict.FAIL
    elif not found or None in found or (numbers and not known):
        verdict = Verdict.INCONCLUSIVE
    else:
        verdict = Verdict.PASS
    accepted = f", accepted are {low:g} to {high:g}" if numbers else ""
    return GateResult(gate=gate, verdict=verdict, detail=f"it gave {shown}{accepted}")
