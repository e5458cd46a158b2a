"""The evidence against a candidate: false alarms, power, and what its counts may be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.rollout.statistics.evidence import (
    ALLOWED_RATIO,
    BadAnswers,
    bad_answers_needed,
    log_evidence,
    log_threshold,
)

SHARES = st.floats(0.01, 0.99)
COUNTS = st.integers(0, 2_000)


def bad(share: float, candidate: int, baseline: int) -> BadAnswers:
    return BadAnswers(share=share, candidate=candidate, baseline=baseline)


@given(SHARES, COUNTS, COUNTS)
def test_at_the_allowed_ratio_the_next_bad_answer_leaves_the_expected_evidence_as_it_is(
    share: float, candidate: int, baseline: int
) -> None:
    # A martingale under "just not worse": so it exceeds 1/alpha with probability at most alpha.
    fair = share * ALLOWED_RATIO / (share * ALLOWED_RATIO + 1 - share)
    now = log_evidence([bad(share, candidate, baseline)])
    to_candidate = log_evidence([bad(share, candidate + 1, baseline)]) - now
    to_baseline = log_evidence([bad(share, candidate, baseline + 1)]) - now

    expected = fair * math.exp(to_candidate) + (1 - fair) * math.exp(to_baseline)

    assert expected == pytest.approx(1.0)


@given(SHARES, COUNTS, COUNTS, COUNTS, COUNTS)
def test_counts_of_several_servers_add_up(share: float, a: int, b: int, c: int, d: int) -> None:
    apart = log_evidence([bad(share, a, b), bad(share, c, d)])

    assert apart == pytest.approx(log_evidence([bad(share, a + c, b + d)]), abs=1e-6)


def test_errors_of_the_clients_cancel_and_errors_of_the_candidate_do_not() -> None:
    threshold = log_threshold(gates=4)

    # 1 % of the traffic, 10,000 bad requests of clients: 100 of them at the candidate.
    assert log_evidence([bad(0.01, 100, 9_900)]) < 0 < threshold
    assert log_evidence([bad(0.10, 30, 20)]) > threshold
    assert log_evidence([bad(0.50, 30, 20)]) < threshold
    assert log_evidence([]) == 0.0


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("rate", [0.001, 0.05, 1.0])
def test_of_4000_candidates_that_are_not_worse_at_most_5_percent_raise_an_alarm(
    share: float, rate: float
) -> None:
    runs, answers, alpha = 4_000, 20_000, 0.05
    random = np.random.default_rng(7)
    looks = np.linspace(answers / 200, answers, 200)
    steps = np.diff(np.r_[0, looks.astype(int)])

    candidate = random.binomial(steps, share * rate, (runs, len(steps))).cumsum(1)
    baseline = random.binomial(steps, (1 - share) * rate, (runs, len(steps))).cumsum(1)
    alarms = sum(
        any(
            log_evidence([bad(share, int(c), int(b))]) >= math.log(1 / alpha)
            # The evidence only rises with the candidate's part: these are the looks that matter.
            for c, b in zip(of_candidate[most], of_baseline[most], strict=True)
        )
        for of_candidate, of_baseline, most in (
            (c, b, np.argsort(-(c - share * (c + b)) / np.sqrt(c + b + 1))[:5])
            for c, b in zip(candidate, baseline, strict=True)
        )
    )

    assert alarms <= runs * alpha + 3 * math.sqrt(runs * alpha * (1 - alpha))


@pytest.mark.parametrize("stages", [[bad(0.1, 0, 0)], [bad(0.1, 3, 20), bad(0.5, 1, 2)]])
def test_so_many_more_bad_answers_and_not_one_less_roll_back(stages: list[BadAnswers]) -> None:
    more = bad_answers_needed(stages, gates=4)
    *before, now = stages

    def evidence(added: int) -> float:
        return log_evidence([*before, bad(now.share, now.candidate + added, now.baseline)])

    assert evidence(more) >= log_threshold(gates=4) > evidence(more - 1)
    # The more the baseline fails, the more it takes.
    assert bad_answers_needed([bad(0.1, 0, 2_000)], gates=4) > 10 * bad_answers_needed(
        [bad(0.1, 0, 0)], gates=4
    )
    assert bad_answers_needed([bad(0.5, 1_000, 0)], gates=4) == 0
