"""What a rollout does next, from counts and time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from stoker.rollout.control.next_step import Action, decide
from stoker.rollout.gates.gates import (
    GateResult,
    StageCounts,
    Verdict,
    VersionCounts,
    judge,
)
from stoker.rollout.state.changes import advance, pause, start
from stoker.rollout.state.settings import BAD, BUILT_IN, SHIFT, SLOW_P99, RolloutSettings
from stoker.rollout.state.state import Phase, RolloutState
from stoker.rollout.statistics.histogram import count

SETTINGS = RolloutSettings(stages="10,50,100", step_time_s=60, warm_up_s=10, min_requests=100)
BEGUN = start(None, 2, serving=1, settings=SETTINGS, now_s=0.0)
BEGUN = replace(BEGUN, phase=Phase.RUNNING, slow_s={SLOW_P99: 0.25})


def counts(requests: int, *, bad: int = 0, slow: int = 0, top: float = 0.0) -> VersionCounts:
    return VersionCounts(
        requests=requests,
        bad=bad,
        latency=count(np.repeat([0.01, 0.5], [requests - slow, slow])),
        predictions=count(
            np.concatenate(
                [np.linspace(0, 0.9, int(requests * (1 - top))), np.ones(int(requests * top))]
            )
        ),
    )


Traffic = tuple[float, VersionCounts, VersionCounts]
"""The candidate's share of a stage, and the counts of baseline and candidate."""


def verdicts(*stages: Traffic, state: RolloutState = BEGUN) -> dict[str, Verdict]:
    found = judge(
        [StageCounts(share=share, baseline=b, candidate=c) for share, b, c in stages],
        state,
    )
    return {result.gate: result.verdict for result in found}


def failing(*stages: Traffic, state: RolloutState = BEGUN) -> set[str]:
    found = verdicts(*stages, state=state)
    return {gate for gate, verdict in found.items() if verdict is Verdict.FAIL}


def test_each_built_in_gate_fails_on_its_own_fault_only() -> None:
    good = counts(9_000, bad=9, slow=90)

    assert set(verdicts()) == set(BUILT_IN)
    assert failing((0.1, good, counts(1_000, bad=1, slow=10))) == set()
    assert failing((0.1, good, counts(1_000, bad=30, slow=10))) == {BAD}
    assert failing((0.1, good, counts(1_000, slow=100))) == {SLOW_P99}
    assert failing((0.1, good, counts(4_000, bad=1, slow=10, top=0.6))) == {SHIFT}
    # An outage that both versions share.
    assert failing((0.1, counts(9_000, bad=4_500), counts(1_000, bad=500))) == set()


def test_evidence_of_several_stages_adds_up_and_stages_without_both_versions_add_none() -> None:
    part = (0.1, counts(900, bad=1), counts(100, bad=4))

    assert failing(part) == set()
    assert failing(part, part, part, part) == {BAD}
    assert failing((0.0, counts(10_000, bad=5), counts(0))) == set()


def test_at_full_traffic_more_bad_answers_than_before_need_the_baseline_and_convict_no_version() -> (
    None
):
    before = (0.0, counts(10_000, bad=10), counts(0))
    worse = (1.0, counts(0), counts(200, bad=20))

    def verdict(*stages: Traffic, state: RolloutState) -> Verdict:
        return verdicts(*stages, state=state)[BAD]

    for state in (replace(BEGUN, stage=2), replace(BEGUN, stage=2, phase=Phase.BAKING)):
        good = (1.0, counts(0), counts(2_000, bad=2))
        assert verdict(before, good, state=state) is Verdict.PASS
        assert verdict(before, worse, state=state) is Verdict.INCONCLUSIVE
        # These have led to a comparison already.
        known = replace(state, explained=(20, 200))
        assert verdict(before, worse, state=known) is Verdict.PASS
        # Latency follows the machine's load, and nothing stands next to it.
        slow = (1.0, counts(0), counts(2_000, slow=1_000))
        assert failing(before, slow, state=state) == set()
        # So few requests of the baseline that it may have been as bad.
        few = (0.0, counts(5), counts(0))
        assert verdict(few, worse, state=state) is Verdict.PASS
    # A rollout without a stage of both versions has nothing else to go by.
    at_once = replace(BEGUN, settings=replace(SETTINGS, stages="100"))
    assert verdict(before, worse, state=at_once) is Verdict.FAIL


def test_counts_of_servers_add_up() -> None:
    whole, other = counts(100, bad=2, slow=3, top=0.5), counts(50, bad=1, slow=4)
    whole.add(other)

    assert (whole.requests, whole.bad) == (150, 3)
    assert whole.latency == count(np.repeat([0.01, 0.5], [143, 7]))
    assert sum(whole.predictions.values()) == 150


def passing(*others: GateResult) -> list[GateResult]:
    return [GateResult(gate=BAD, verdict=Verdict.PASS, detail="none"), *others]


def next_of(state: RolloutState, results: list[GateResult], requests: int, now_s: float) -> Action:
    return decide(state, results, requests=requests, now_s=now_s).action


def test_a_stage_ends_when_its_time_and_its_requests_are_there() -> None:
    assert next_of(BEGUN, passing(), 1_000, 69.0) is Action.WAIT
    assert next_of(BEGUN, passing(), 99, 1e6) is Action.WAIT
    assert next_of(BEGUN, passing(), 100, 70.0) is Action.ADVANCE
    waits = replace(BEGUN, settings=replace(SETTINGS, stages="10,pause,100"), stage=1)
    assert next_of(waits, passing(), 10**6, 1e6) is Action.WAIT
    header = replace(BEGUN, settings=replace(SETTINGS, stages="header=x:5s,100"))
    assert [next_of(header, passing(), requests, 15.0) for requests in (0, 1)] == [
        Action.WAIT,
        Action.ADVANCE,
    ]


@pytest.mark.parametrize("phase", [Phase.RUNNING, Phase.PAUSED, Phase.BAKING])
def test_a_gate_that_fails_rolls_back_at_once_in_each_phase(phase: Phase) -> None:
    failed = passing(GateResult(gate=SHIFT, verdict=Verdict.FAIL, detail="0.4"))
    state = replace(BEGUN, phase=phase)

    decision = decide(state, failed, requests=1, now_s=0.1)

    assert (decision.action, decision.reason) == (Action.ROLL_BACK, f"{SHIFT}: 0.4")
    dry = replace(state, settings=replace(SETTINGS, dry_run=(SHIFT,)))
    assert next_of(dry, failed, 1, 0.1) is not Action.ROLL_BACK


def test_a_gate_without_an_answer_waits_then_pauses_and_rolls_back_only_if_strict() -> None:
    def silent(for_s: float) -> list[GateResult]:
        return passing(
            GateResult(gate="query", verdict=Verdict.INCONCLUSIVE, detail="refused", silent_s=for_s)
        )

    strict = replace(BEGUN, settings=replace(SETTINGS, strict=True))

    assert next_of(BEGUN, silent(299), 1_000, 1e6) is Action.WAIT
    assert next_of(BEGUN, silent(300), 1_000, 1e6) is Action.PAUSE
    assert next_of(strict, silent(300), 1_000, 1e6) is Action.ROLL_BACK
    assert next_of(pause(BEGUN, reason="x"), silent(300), 1_000, 1e6) is Action.WAIT


def test_the_bake_time_ends_by_the_clock_and_nothing_follows_the_end() -> None:
    state = replace(BEGUN, settings=replace(SETTINGS, bake_s=100), stage=2)
    baking = advance(state, now_s=1_000.0)

    assert baking.phase is Phase.BAKING
    assert next_of(baking, passing(), 0, 1_099.0) is Action.WAIT
    assert next_of(baking, passing(), 0, 1_100.0) is Action.ADVANCE
    assert next_of(advance(baking, now_s=1_100.0), passing(), 10**6, 1e6) is Action.WAIT
