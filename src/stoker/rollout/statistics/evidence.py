"""Is the candidate worse than the baseline? An exact test of counts that may be looked at after each answer."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

FACTORS = np.array([1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0])
"""How much worse than allowed a candidate may be: the alternatives that the test considers."""

ALLOWED_RATIO = 1.25
"""Bad answers of the candidate for each of the baseline, at equal traffic, that still count as not worse."""

MAX_NEEDED = 1 << 30
"""Counting stops after this many bad answers."""

ALPHA = 0.001
"""Probability that a rollout of a candidate that is not worse is rolled back, over all gates and looks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadAnswers:
    """Bad answers of one stage, while its weights did not change."""

    share: float
    """The candidate's share of the traffic, strictly between 0 and 1."""

    candidate: int
    """Bad answers of the candidate."""

    baseline: int
    """Bad answers of the baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FullTraffic:
    """Bad answers of a candidate with all traffic, and of the baseline before."""

    candidate: int
    """Bad answers of the candidate."""

    requests: int
    """Answers of the candidate."""

    baseline: int
    """Bad answers of the baseline in all stages before."""

    baseline_requests: int
    """Answers of the baseline in all stages before."""

    @property
    def accepted_rate(self) -> float:
        """The highest rate of bad answers that the baseline may have had: three standard errors above."""
        bad = self.baseline + 3.0 + 3.0 * math.sqrt(self.baseline + 2.25)
        return min(bad / max(self.baseline_requests, 1), 1.0)


def log_evidence(stages: Iterable[BadAnswers], *, allowed_ratio: float = ALLOWED_RATIO) -> float:
    """Natural logarithm of the evidence that the candidate gives too many bad answers.

    Given a bad answer, which version gave it? A candidate with w of the traffic that gives `allowed_ratio` r times as many
    bad answers as the baseline gave it with probability t = w r / (w r + 1 - w); one that is g times worse than that, with
    q = w g r / (w g r + 1 - w). The evidence is the likelihood ratio of q to t, averaged over the `FACTORS` g. If
    the candidate is not worse, it ever reaches 1/a with probability at most a (Ville's inequality), whatever the rate of bad
    answers and how often it is looked at: what clients do wrong hits both versions alike and cancels.

    The counts are sufficient: those of several servers add up.

    Args:
        stages: counts of each stage so far, each with its own share of the traffic.
        allowed_ratio: see `ALLOWED_RATIO`; at least 1.

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
    """Natural logarithm of the evidence that a candidate with all traffic gives more bad answers than the baseline before.

    It is not proof: an outage that would hit both versions alike looks the same.

    Args:
        full: counts at 100 %.
        allowed_ratio: see `ALLOWED_RATIO`; at least 1.
    """
    accepted = full.accepted_rate * allowed_ratio
    if accepted >= 1.0:
        return 0.0
    rates = np.minimum(accepted * FACTORS, (1.0 + accepted) / 2.0)
    logs = full.candidate * np.log(rates / accepted)
    logs += (full.requests - full.candidate) * np.log((1.0 - rates) / (1.0 - accepted))
    return _log_mean(logs)


def _log_mean(logs: NDArray[np.float64]) -> float:
    """Logarithm of the mean over the alternatives."""
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).mean()))


def log_threshold(*, alpha: float = ALPHA, gates: int) -> float:
    """The `log_evidence` at which a rollout with so many gates is rolled back."""
    return math.log(gates / alpha)


def bad_answers_needed(
    stages: Sequence[BadAnswers],
    *,
    gates: int,
    alpha: float = ALPHA,
    allowed_ratio: float = ALLOWED_RATIO,
) -> int:
    """How many more bad answers the candidate must give in the last of the stages to be rolled back.

    Args:
        stages: counts of each stage so far.
        gates: number of gates of the rollout.
        alpha: see `ALPHA`.
        allowed_ratio: see `ALLOWED_RATIO`.
    """
    *before, now = stages

    def evidence(more: int) -> float:
        worse = replace(now, candidate=now.candidate + more)
        return log_evidence([*before, worse], allowed_ratio=allowed_ratio)

    limit = log_threshold(alpha=alpha, gates=gates)
    return bisect.bisect_left(range(MAX_NEEDED), limit, key=evidence)
