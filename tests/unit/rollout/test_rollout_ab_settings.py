"""What an A/B test compares, and how its state begins and ends."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from stoker.core.errors import ConfigError, UserError
from stoker.rollout.state.ab_settings import ABTestSettings, Metric, parse_arms
from stoker.rollout.state.changes import (
    advance,
    begin_test,
    end_test,
    pause,
    promote_fully,
    roll_back,
    start,
)
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import Phase, RolloutState, state_of

ARMS = ((5, 0.5), (6, 0.3), (7, 0.2))
TEST = ABTestSettings(arms=ARMS, baseline=5, salt="00ff" * 8)
KEYED = RolloutSettings(key="x-user")


def begun(state: RolloutState | None = None) -> RolloutState:
    return begin_test(state, TEST, settings=KEYED, now_s=1.0, who="me")


def test_arms_are_read_as_shares() -> None:
    assert parse_arms("5=50, 6=30%,7=20") == ARMS
    assert parse_arms("1=12.5,2=87.5") == ((1, 0.125), (2, 0.875))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("5=50,6=30", "must sum to 100. Received: 5=50,6=30, which is 80"),
        ("5=50,6=51", "must sum to 100"),
        ("5=100", "at least two arms"),
        ("5=100,6=0", "each of at least 0.01 %"),
        ("5=150,6=-50", "each of at least 0.01 %"),
        ("5=50,5=50", "must be a different version"),
        ("-1=50,5=50", "must be a different version"),
        ("5=nan,6=50", "each of at least 0.01 %"),
        ("", "'' is not an arm"),
        ("5,6", "'5' is not an arm"),
    ],
)
def test_arms_that_cannot_be_a_test_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_arms(text)

    assert said in str(error.value)
    assert "Write two or more VERSION=PERCENT" in str(error.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 0.0},
        {"alpha": 1.0},
        {"max_keys": 0},
        {"baseline": 8},
        {"max_value": 0.0},
        {"max_value": math.inf},
        {"max_value": 1.0, "metric": Metric.SUM},
    ],
)
def test_settings_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(TEST, **wrong)  # type: ignore[arg-type]  # mypy cannot check **


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.1])
def test_an_outcome_out_of_its_bounds_is_refused(value: float) -> None:
    bounded = replace(TEST, max_value=1.0)
    bounded.check_value(1.0)
    TEST.check_value(-1e6)
    with pytest.raises(ConfigError):
        bounded.check_value(value)


def test_a_key_is_hashed_with_the_salt_of_its_test() -> None:
    digest = hashlib.blake2b(b"ann@example.com", digest_size=8, key=bytes.fromhex(TEST.salt))
    assert TEST.key_hash()(b"ann@example.com") == int(digest.hexdigest(), 16)
    other = replace(TEST, salt="ab" * 16)
    assert other.key_hash()(b"ann@example.com") != TEST.key_hash()(b"ann@example.com")


def test_a_test_is_a_state_that_json_holds() -> None:
    state = begun()
    assert state_of(json.loads(json.dumps(state.to_json()))) == state
    assert (state.phase, state.baseline, state.stable, state.arms) == (
        Phase.TESTING,
        5,
        5,
        {5: 0.5, 6: 0.3, 7: 0.2},
    )


def test_a_test_ends_with_the_version_that_is_chosen() -> None:
    for chosen in (5, 6, 7):
        over = end_test(begun(), chosen, now_s=2.0)
        assert (over.phase, over.stable, over.test) == (Phase.COMPLETED, chosen, TEST)
        following = start(over, 9, serving=1, settings=RolloutSettings(), now_s=3.0)
        assert (following.baseline, following.test, following.rollout) == (chosen, None, 2)
    back = roll_back(begun(), reason="x", now_s=2.0)
    assert (back.phase, back.stable, back.rejected) == (Phase.ROLLED_BACK, 5, (6, 7))
    other = roll_back(begun(), reason="x", now_s=2.0, to=6)
    assert (other.stable, other.rejected) == (6, (5, 7))
    assert other.split("m").weights == {6: 1.0, 5: 0.0}
    assert begun(back).rejected == ()


def test_what_a_test_does_not_allow_is_refused() -> None:
    canary = start(None, 6, serving=5, settings=RolloutSettings(), now_s=0.0)
    refused: dict[str, Callable[[], object]] = {
        "must be one of its arms": lambda: end_test(begun(), 8, now_s=0.0),
        "--version must be used for an A/B test only": lambda: end_test(canary, 6, now_s=0.0),
        "Only one rollout or A/B test": lambda: begun(canary),
        "started by me, A/B test": lambda: start(
            begun(), 8, serving=5, settings=RolloutSettings(), now_s=0.0
        ),
        "needs a key": lambda: begin_test(None, TEST, settings=RolloutSettings(), now_s=0.0),
        "has no stages": lambda: advance(begun(), now_s=0.0),
        "An A/B test has": lambda: promote_fully(begun(), now_s=0.0),
        "Only a running rollout": lambda: pause(begun(), reason=""),
    }
    for said, act in refused.items():
        with pytest.raises(UserError, match=said):
            act()
