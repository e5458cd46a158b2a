"""What may change the state of a rollout, and what the state says of the traffic."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from stoker.core.errors import ConfigError, DataError, UserError
from stoker.rollout.state.changes import advance, pause, promote_fully, resume, roll_back, start
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import Phase, RolloutState, state_of


def started(settings: RolloutSettings | None = None) -> RolloutState:
    return start(None, 2, serving=1, settings=settings or RolloutSettings(), now_s=0.0)


def begun(settings: RolloutSettings | None = None) -> RolloutState:
    return advance(started(settings), now_s=0.0)


def test_a_rollout_goes_from_stage_to_stage_to_its_end() -> None:
    state = started(RolloutSettings(stages="10,50,100", bake_s=60))
    shares = []
    while state.phase is not Phase.COMPLETED:
        shares.append((state.phase, state.share, state.stable))
        state = advance(state, now_s=state.began_s + 1)

    assert shares == [
        (Phase.MEASURING, 0.0, 1),
        (Phase.RUNNING, 0.1, 1),
        (Phase.RUNNING, 0.5, 1),
        (Phase.RUNNING, 1.0, 1),
        (Phase.BAKING, 1.0, 2),
    ]
    assert (state.share, state.stable) == (1.0, 2)
    assert state.split("m").weights == {1: 0.0, 2: 1.0}
    following = start(state, 5, serving=99, settings=RolloutSettings(), now_s=9.0)
    assert (following.rollout, following.baseline, following.candidate) == (2, 2, 5)


@pytest.mark.parametrize(
    "how",
    [
        lambda s: s,
        lambda _: started(),
        lambda s: advance(s, now_s=1),
        lambda s: pause(s, reason="x"),
        lambda s: promote_fully(s, now_s=1),
    ],
)
def test_a_rollback_takes_all_traffic_off_the_candidate_and_keeps_it_out(
    how: Callable[[RolloutState], RolloutState],
) -> None:
    state = roll_back(how(begun()), reason="bad_answers", now_s=5.0)

    assert (state.phase, state.share, state.stable, state.rejected) == (
        Phase.ROLLED_BACK,
        0.0,
        1,
        (2,),
    )
    assert state.split("m").weights == {1: 1.0, 2: 0.0}
    again = start(state, 2, serving=1, settings=RolloutSettings(), now_s=9.0)
    assert (again.rejected, again.baseline, again.rollout) == ((), 1, 2)
    other = start(state, 3, serving=1, settings=RolloutSettings(), now_s=9.0)
    assert other.rejected == (2,)


def test_an_operator_goes_back_to_any_version_without_stages() -> None:
    done = promote_fully(begun(), now_s=1.0)
    back = roll_back(done, reason="operator", now_s=2.0, to=7)

    assert (back.stable, back.share, back.rejected) == (7, 0.0, (2,))
    with pytest.raises(UserError, match="rolled back only once"):
        roll_back(back, reason="operator", now_s=3.0)
    with pytest.raises(UserError, match="already takes all traffic"):
        roll_back(done, reason="operator", now_s=3.0, to=2)


def test_a_rollback_to_the_candidate_is_refused_while_it_is_under_rollout_and_possible_later() -> (
    None
):
    with pytest.raises(UserError, match="use `stoker rollout promote --full`"):
        roll_back(begun(), reason="operator", now_s=1.0, to=2)
    baking = promote_fully(begun(RolloutSettings(bake_s=9.0)), now_s=1.0)
    with pytest.raises(UserError, match="already takes all traffic"):
        roll_back(baking, reason="operator", now_s=2.0, to=2)

    first = roll_back(begun(), reason="page 17", now_s=2.0)
    again = roll_back(first, reason="1 is worse", now_s=3.0, to=2)

    assert (again.stable, again.candidate, again.rejected) == (2, 1, (1,))
    assert again.split("m").weights == {2: 1.0, 1: 0.0}


def test_pauses_and_stages_that_wait_for_a_person() -> None:
    state = advance(begun(RolloutSettings(stages="10,pause,100")), now_s=1.0)
    assert (state.current.waits, state.share) == (True, 0.1)
    assert resume(state, now_s=2.0).share == 1.0

    paused = pause(begun(), reason="a look")
    assert (paused.phase, paused.share, paused.reason) == (Phase.PAUSED, 0.01, "a look")
    assert resume(paused, now_s=3.0) == replace(begun(), began_s=3.0)
    with pytest.raises(UserError, match="Only a running rollout"):
        pause(paused, reason="again")
    with pytest.raises(UserError, match="can be resumed"):
        resume(begun(), now_s=1.0)


def test_two_rollouts_at_once_and_one_of_the_version_that_serves_are_refused() -> None:
    with pytest.raises(UserError, match=r"version 2, started by an operator, running"):
        start(begun(), 3, serving=1, settings=RolloutSettings(), now_s=1.0)
    with pytest.raises(UserError, match="must not be the version that serves"):
        start(None, 1, serving=1, settings=RolloutSettings(), now_s=1.0)
    with pytest.raises(UserError, match="A rollout must be running"):
        advance(promote_fully(begun(), now_s=1.0), now_s=2.0)


def test_a_state_is_the_same_after_its_file() -> None:
    settings = RolloutSettings(stages="header=x,5,100", dry_run=("slow_p50",))
    state = replace(begun(settings), slow_s={"slow_p99": 0.25}, rejected=(4, 5))

    written = json.loads(json.dumps(state.to_json()))

    assert state_of(written) == state
    assert state_of({**written, "of_a_newer_release": 1}) == state
    with pytest.raises(DataError, match="cannot be read"):
        state_of({**written, "phase": "unheard of"})
    with pytest.raises(DataError, match="cannot be read"):
        state_of({})


@pytest.mark.parametrize(
    "wrong",
    [
        {"stages": "5"},
        {"bake_s": -1},
        {"alpha": 0},
        {"allowed_ratio": 0.9},
        {"max_shift": 1.5},
        {"shadow_tolerance": -0.1},
        {"shadow_tolerance": float("nan")},
    ],
)
def test_settings_that_no_rollout_could_follow_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        RolloutSettings(**wrong)  # type: ignore[arg-type]  # mypy cannot check **
