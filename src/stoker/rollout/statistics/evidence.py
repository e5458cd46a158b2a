"""Tests whether the candidate is worse than the baseline. The test is exact, even if it is computed after each answer."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

FACTORS = np.array([1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0])
"""The alternatives of the test: factors by which the candidate is worse than allowed."""

ALLOWED_RATIO = 1.25
"""Bad answers of the candidate per bad answer of the baseline, at equal traffic, that still count as not worse."""

MAX_NEEDED = 1 << 30
"""`bad_answers_needed` stops searching at this number."""

ALPHA = 0.001
"""Maximum probability, over all gates and times, that a candidate that is not worse is rolled back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadAnswers:
    """Bad answers of one stage, in which the weights do not change."""

    share: float
    """The candidate's share of the traffic, strictly between 0 and 1."""

    candidate: int
    """Number of the candidate's bad answers."""

    baseline: int
    """Number of the baseline's bad answers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FullTraffic:
    """Bad answers of a candidate with all traffic, and of the baseline in the earlier stages."""

    candidate: int
    """Number of the candidate's bad answers."""

    requests: int
    """Number of the candidate's answers."""

    baseline: int
    """Number of the baseline's bad answers in all earlier stages."""

    baseline_requests: int
    """Number of the baseline's answers in all earlier stages."""

    @property
    def accepted_rate(self) -> float:
        """Return an upper limit of the baseline's bad-answer rate: three standard errors above the observed rate."""
        bad = self.baseline + 3.0 + 3.0 * math.sqrt(self.baseline + 2.25)
        return min(bad / max(self.baseline_requests, 1), 1.0)


def log_evidence(stages: Iterable[BadAnswers], *, allowed_ratio: float = ALLOWED_RATIO) -> float:
    """Return the natural logarithm of the evidence that the candidate gives too many bad answers.

    The test looks at which version gave each bad answer. Let w be the candidate's share of the traffic and r the
    `allowed_ratio`. If the candidate gives r times as many bad answers as the baseline, a bad answer is the candidate's
    with probability t = w r / (w r + 1 - w). If the candidate is g times worse than that, the probability is
    q = w g r / (w g r + 1 - w). The evidence is the likelihood ratio of q to t, averaged over the `FACTORS` g. If the
    candidate is not worse, the evidence ever reaches 1/a with probability at most a (Ville's inequality), for any rate
    of bad answers and however often it is computed. Errors of clients affect both versions equally and cancel.

    Only the counts matter, so the counts of several servers can be added.

    Args:
        stages: Counts of each stage so far, with the stage's share of the traffic.
        allowed_ratio: See `ALLOWED_RATIO`; at least 1.

    Source: Turner, Ly, Grunwald, J. Statist. Plann. Inference 230 (2024); Lindon, Sanden, Shirikian, KDD 2022.
    """
    logs = np.zeros_like(FACTORS)
    for stage in stages:
        odds = stage.share * allowed_ratio / (1.0 - stage.share)
        fair, worse = odds / (odds + 1.0), odds * FACTORS / (odds * FACTORS + 1.0)
        logs += stage.candidate * np.log(worse / fair)
        logs += stage.baseline * np.log((1.0 - worse) / (1.0 - fair))
    return _log_mean(logs)


def log_suspicion(full: FullTraffic, *, allowed_ratio: float = ALLOWED_RATIO) -> float:
    """Return the natural logarithm of the evidence that a candidate at 100 % is worse than the baseline was before.

    This is not proof: an outage that would affect both versions equally looks the same.

    Args:
        full: Counts at 100 %.
        allowed_ratio: See `ALLOWED_RATIO`; at least 1.
    """
    accepted = full.accepted_rate * allowed_ratio
    if accepted >= 1.0:
        return 0.0
    rates = np.minimum(accepted * FACTORS, (1.0 + accepted) / 2.0)
    logs = full.candidate * np.log(rates / accepted)
    logs += (full.requests - full.candidate) * np.log((1.0 - rates) / (1.0 - accepted))
    return _log_mean(logs)


def _log_mean(logs: NDArray[np.float64]) -> float:
    """Return the logarithm of the mean likelihood ratio over the alternatives."""
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).mean()))


def log_threshold(*, alpha: float = ALPHA, gates: int) -> float:
    """Return the `log_evidence` at which a rollout with this number of gates is rolled back."""
    return math.log(gates / alpha)


def bad_answers_needed(
    stages: Sequence[BadAnswers],
    *,
    gates: int,
    alpha: float = ALPHA,
    allowed_ratio: float = ALLOWED_RATIO,
) -> int:
    """Return how many more bad answers of the candidate in the last stage would roll it back.

    Args:
        stages: Counts of each stage so far.
        gates: Number of gates of the rollout.
        alpha: See `ALPHA`.
        allowed_ratio: See `ALLOWED_RATIO`.
    """
    *before, now = stages

    def evidence(more: int) -> float:
        worse = replace(now, candidate=now.candidate + more)
        return log_evidence([*before, worse], allowed_ratio=allowed_ratio)

    limit = log_threshold(alpha=alpha, gates=gates)
    return bisect.bisect_left(range(MAX_NEEDED), limit, key=evidence)
