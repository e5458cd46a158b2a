"""What a run says about a bad step, and what it does."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.errors import ConfigError, UserError
from stoker.train.health.bad_steps import BadStep, NanConfig, Rollbacks, bad_step_error
from stoker.train.health.layers import BadValues

BAD = BadStep(
    step=7,
    loss=math.nan,
    positions=(60, 61, 62, 63),
    learning_rate=0.01,
    precision="float32",
    xla=False,
)
FOUND = BadValues(
    place="output",
    name="block/dense",
    nan_share=0.25,
    infinite_share=0.0,
    least=-2.0,
    most=3.0,
    dtype="float32",
    rows=(1, 3),
)


def line(bad: BadStep = BAD, found: BadValues | None = FOUND) -> str:
    text = bad_step_error(bad, found).line()
    assert "\n" not in text
    return text


def test_the_error_names_step_loss_layer_figures_rows_and_samples() -> None:
    text = line()

    for part in (
        "the loss of step 7 must be finite",
        "loss nan, learning rate 0.01, float32",
        "the output of layer block/dense",
        "0.25 of its values NaN, the others from -2 to 3",
        "rows 1, 3 of its batch (samples 61, 63 of the run's order)",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("bad", "found", "advice"),
    [
        ({}, {"place": "feature", "name": "fare"}, "preprocessing_fn"),
        ({}, {"place": "weight"}, "An earlier update"),
        ({}, {"dtype": "float16", "most": 60000.0}, "mixed_bfloat16"),
        ({}, {"most": 3e38}, r"lower the learning rate \(0.01\)"),
        ({"loss": 0.5}, {"place": "gradient"}, "the gradient of step 7 must.*square root"),
        ({"loss": math.inf}, {}, "the loss of step 7"),
        ({"xla": True}, None, r"without XLA, every value.*samples 60 to 63.*train\.xla: false"),
        ({"positions": ()}, None, "is finite. Try"),
    ],
)
def test_the_advice_fits_what_was_found(
    bad: dict[str, object], found: dict[str, object] | None, advice: str
) -> None:
    changed = None if found is None else dataclasses.replace(FOUND, **found)  # type: ignore[arg-type]  # mypy cannot check **

    assert re.search(advice, line(dataclasses.replace(BAD, **bad), changed))  # type: ignore[arg-type]  # mypy cannot check **


def decide(rollbacks: Rollbacks, *, step: int = 7, positions: tuple[int, ...] = (60, 61)) -> None:
    bad = dataclasses.replace(BAD, step=step, positions=positions)
    rollbacks.decide(bad, bad_step_error(bad, FOUND))


def test_stop_ends_with_the_error_itself() -> None:
    with pytest.raises(UserError, match="the loss of step 7 must be finite") as caught:
        decide(Rollbacks(NanConfig()))
    assert "budget" not in caught.value.line()


def test_a_rollback_skips_the_samples_of_the_step_from_then_on() -> None:
    rollbacks = Rollbacks(NanConfig(on_nan="rollback"))
    decide(rollbacks)

    assert rollbacks.skipped == {60, 61}
    decide(rollbacks, step=9, positions=(61, 62))
    assert rollbacks.skipped == {60, 61, 62}


def test_a_spent_budget_ends_the_run_and_says_so() -> None:
    rollbacks = Rollbacks(NanConfig(on_nan="rollback", nan_budget=2))
    decide(rollbacks, step=7, positions=(60,))
    decide(rollbacks, step=9, positions=(80,))

    with pytest.raises(UserError, match="allows 2 rollbacks, made at steps: 7, 9"):
        decide(rollbacks, step=11, positions=(100,))
    assert rollbacks.skipped == {60, 80}


def test_samples_that_are_skipped_already_cannot_be_the_cause() -> None:
    rollbacks = Rollbacks(NanConfig(on_nan="rollback"))
    decide(rollbacks, positions=(60, 61))

    with pytest.raises(UserError, match="skipped already"):
        decide(rollbacks, step=8, positions=(61,))


def test_without_known_samples_there_is_nothing_to_skip() -> None:
    with pytest.raises(UserError, match="the samples of this step are unknown"):
        decide(Rollbacks(NanConfig(on_nan="rollback")), positions=())


@given(st.lists(st.tuples(st.integers(1, 100), st.integers(0, 10**9)), max_size=5))
def test_what_was_decided_survives_its_json(steps: list[tuple[int, int]]) -> None:
    first = Rollbacks(NanConfig(on_nan="rollback", nan_budget=5))
    for step, position in steps:
        if position not in first.skipped:
            decide(first, step=step, positions=(position,))
    second = Rollbacks(NanConfig(on_nan="rollback", nan_budget=5))
    second.restore(json.loads(json.dumps(first.state())))

    assert second.done == first.done


def test_a_budget_below_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.nan_budget"):
        NanConfig(nan_budget=-1)
