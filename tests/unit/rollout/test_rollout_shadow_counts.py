"""What a shadow stage counts, and what the gates make of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from stoker.core.fingerprint import fingerprint
from stoker.rollout.counts.counted_keys import StageKeys
from stoker.rollout.counts.counts import read_counts, requests_of, stage_counts, write_counts
from stoker.rollout.gates.gates import Verdict, VersionCounts, judge
from stoker.rollout.shadow.compare import Comparison
from stoker.rollout.shadow.counts import ShadowTally, summary
from stoker.rollout.state.changes import advance, start
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import RolloutState
from stoker.rollout.statistics import evidence
from stoker.rollout.statistics.evidence import ALLOWED_RATIO, FACTORS, BadAnswers, log_evidence

SLOW_S = 0.01


def shadowed(**settings: str) -> RolloutState:
    chosen = RolloutSettings(stages="shadow,50,100", **settings)  # type: ignore[arg-type]  # mypy cannot check **
    begun = advance(start(None, 2, serving=1, settings=chosen, now_s=0.0), now_s=0.0)
    assert begun.share == 0.0
    return begun


def good(predicted: int = 1, *, took_s: float = 1.0, is_different: bool = False) -> Comparison:
    return Comparison(
        baseline=Counter({1: 1}),
        candidate=Counter({predicted: 1}),
        took_s=took_s,
        is_different=is_different,
        rows=2,
        class_changes=int(is_different),
    )


def verdicts(counts: dict[int, VersionCounts], state: RolloutState) -> dict[str, Verdict]:
    results = judge(stage_counts({0: counts}, state), state)
    return {each.gate: each.verdict for each in results}


def test_both_versions_count_the_same_requests_and_a_slow_copy_is_not_evidence() -> None:
    state, counts = shadowed(), dict[int, VersionCounts]()
    tally = ShadowTally(counts, state, StageKeys())
    for at in range(500):
        tally.compared(None, good(is_different=at < 5), baseline_s=0.001)
    tally.dropped(1)

    assert requests_of({0: counts}, stage=0, version=2) == 500
    assert (counts[1].requests, counts[1].bad, counts[2].bad) == (500, 0, 0)
    found = summary(counts, state)
    assert found is not None
    assert (found.copied, found.compared, found.dropped, found.different) == (501, 500, 1, 5)
    assert (found.rows, found.class_changes, found.distance) == (1_000, 5, 0.0)
    assert found.latency_s["1"][1] == pytest.approx(0.001, rel=0.04)
    assert found.latency_s["2"][1] == pytest.approx(1.0, rel=0.04)
    slow = RolloutState(
        **{
            **state.to_json(),
            "slow_s": {"slow_p99": SLOW_S, "slow_p50": SLOW_S},
            "settings": state.settings,
            "phase": state.phase,
        }
    )
    assert set(verdicts(counts, slow).values()) == {Verdict.PASS}
    assert "501 copied, 500 compared, 1 dropped, 0 bad (baseline 0), 5 different" in str(found)
    assert summary({1: VersionCounts(requests=5)}, state) is None


@pytest.mark.parametrize("bad", ["it raised", "a value is not finite"])
def test_bad_answers_in_shadow_roll_back_unless_the_baseline_has_as_many(bad: str) -> None:
    state = shadowed()
    for baseline_bad, verdict in ((False, Verdict.FAIL), (True, Verdict.PASS)):
        counts: dict[int, VersionCounts] = {}
        tally = ShadowTally(counts, state, StageKeys())
        for at in range(300):
            found = Comparison(bad=bad, baseline_bad=baseline_bad) if at % 10 == 0 else good()
            tally.compared(None, found, baseline_s=0.001)
        assert verdicts(counts, state)["bad_answers"] is verdict


def test_predictions_that_move_in_shadow_roll_back() -> None:
    state, counts = shadowed(), dict[int, VersionCounts]()
    tally = ShadowTally(counts, state, StageKeys())
    for at in range(2_000):
        tally.compared(None, good(predicted=1 + at % 2), baseline_s=0.001)

    assert verdicts(counts, state)["prediction_shift"] is Verdict.FAIL
    found = summary(counts, state)
    assert found is not None
    assert found.distance == pytest.approx(0.5)


def test_a_key_counts_once_for_either_version() -> None:
    state, counts = shadowed(key="x-user"), dict[int, VersionCounts]()
    tally = ShadowTally(counts, state, StageKeys())
    for _ in range(5):
        tally.compared(7, Comparison(bad="it raised"), baseline_s=0.001)
        tally.compared(7, Comparison(baseline_bad=True), baseline_s=0.001)
        tally.compared(7, good(), baseline_s=0.001)

    assert (counts[1].bad, counts[2].bad) == (1, 1)
    assert counts[2].predictions == {1: 1}


def test_the_counts_of_two_servers_add_up_on_disk(tmp_path: Path) -> None:
    state = shadowed()
    for server in ("one", "two"):
        counts: dict[int, VersionCounts] = {}
        tally = ShadowTally(counts, state, StageKeys())
        for _ in range(3):
            tally.compared(None, good(is_different=True), baseline_s=0.001)
        tally.dropped(1)
        write_counts(tmp_path, {0: counts}, {}, rollout=1, server=server)

    found = summary(read_counts(tmp_path, rollout=1)[0], state)

    assert found is not None
    assert (found.copied, found.compared, found.dropped, found.different) == (8, 6, 2, 6)


def test_counts_of_a_server_that_knows_no_shadow_stages_are_read(tmp_path: Path) -> None:
    write_counts(tmp_path, {0: {1: VersionCounts(requests=3)}}, {}, rollout=1, server="old")
    path = tmp_path / "counts/1/old.json"
    content = json.loads(path.read_text())
    del content["stages"]["0"]["1"]["shadow"], content["sha256"]
    content["sha256"] = fingerprint(content)
    path.write_text(json.dumps(content))

    assert read_counts(tmp_path, rollout=1)[0][1] == VersionCounts(requests=3)


@pytest.mark.parametrize("factor", FACTORS)
def test_the_evidence_of_pairs_is_no_larger_than_1_on_average(
    factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both versions answer the same request, so their bad answers are not independent."""
    monkeypatch.setattr(evidence, "FACTORS", np.array([factor]))
    for both in (0.0, 0.001, 0.1, 0.4):
        for baseline_only in (0.0, 0.001, 0.1, 0.3):
            # A candidate that is exactly as bad as is allowed.
            candidate_only = ALLOWED_RATIO * (baseline_only + both) - both
            mean = 1.0 - both - baseline_only - candidate_only
            for share, pair in ((both, (1, 1)), (baseline_only, (0, 1)), (candidate_only, (1, 0))):
                found = BadAnswers(share=0.5, candidate=pair[0], baseline=pair[1])
                mean += share * math.exp(log_evidence([found]))
            assert mean <= 1.0 + 1e-12
