from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.evaluate.config import EvaluateConfig, Gate, SliceGate
from stoker.evaluate.gates import BaselineMetrics, SliceResult, Verdict, check_gates
from stoker.evaluate.metrics import MetricValue, Undefined

shares = st.floats(0.0, 1.0)


def judge(
    gate: Gate,
    value: MetricValue | None,
    *,
    name: str = "auc",
    rows: int = 100,
    baseline: BaselineMetrics | None = None,
) -> list[Verdict]:
    metrics = {} if value is None else {name: value}
    config = EvaluateConfig(gates={name: gate})
    return check_gates(config, rows=rows, metrics=metrics, baseline=baseline)


def old(value: MetricValue, name: str = "auc", **changes: Any) -> BaselineMetrics:
    plain: dict[str, Any] = {"version": "version 3", "rows": 100, "metrics": {name: value}}
    return BaselineMetrics(**(plain | changes))


def judge_slices(gate: SliceGate, *pieces: tuple[str, int, MetricValue]) -> list[Verdict]:
    slices = [
        SliceResult(column="day", value=value, rows=rows, metrics={"auc": metric})
        for value, rows, metric in pieces
    ]
    config = EvaluateConfig(slice_gates={"auc": gate})
    return check_gates(config, rows=1000, metrics={"auc": 0.9}, slices=slices)


@given(shares, shares)
def test_min_passes_exactly_from_its_value_up(value: float, limit: float) -> None:
    (verdict,) = judge(Gate(min=limit), value)

    assert verdict.passed == (value >= limit)
    assert verdict.key == "evaluate.gates.auc.min"


@given(shares, shares)
def test_max_passes_exactly_up_to_its_value(value: float, limit: float) -> None:
    (verdict,) = judge(Gate(max=limit), value)

    assert verdict.passed == (value <= limit)
    assert verdict.key == "evaluate.gates.auc.max"


@given(shares, shares, shares)
def test_max_drop_counts_the_fall_of_a_metric_that_should_be_high(
    new: float, before: float, limit: float
) -> None:
    (verdict,) = judge(Gate(max_drop=limit), new, baseline=old(before))

    if abs(before - new - limit) > 1e-12:
        assert verdict.passed == (before - new <= limit)


@given(shares, shares, shares)
def test_max_drop_counts_the_rise_of_a_metric_that_should_be_low(
    new: float, before: float, limit: float
) -> None:
    (verdict,) = judge(Gate(max_drop=limit), new, name="log_loss", baseline=old(before, "log_loss"))

    if abs(new - before - limit) > 1e-12:
        assert verdict.passed == (new - before <= limit)


def test_a_drop_of_just_max_drop_passes_in_spite_of_binary_rounding() -> None:
    (verdict,) = judge(Gate(max_drop=0.005), 0.945, baseline=old(0.95))

    assert 0.95 - 0.945 > 0.005
    assert verdict.passed


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, Undefined(reason="one class only"), None],
    ids=["NaN", "inf", "-inf", "undefined", "missing"],
)
@pytest.mark.parametrize("gate", [Gate(min=-10.0), Gate(max=1e9), Gate(max_drop=1e9)])
@pytest.mark.parametrize("baseline", [None, old(0.5)], ids=["no baseline", "baseline"])
def test_a_metric_that_is_not_a_number_fails_every_gate_that_names_it(
    gate: Gate, value: MetricValue | None, baseline: BaselineMetrics | None
) -> None:
    (verdict,) = judge(gate, value, baseline=baseline)

    assert not verdict.passed
    assert verdict.reason.startswith("undefined: ")


def test_an_empty_split_fails_though_a_metric_were_given() -> None:
    verdicts = judge(Gate(min=0.5, max_drop=0.1), 0.9, rows=0)

    assert [verdict.passed for verdict in verdicts] == [False, False]
    assert "empty" in verdicts[0].reason


def test_without_a_baseline_max_drop_says_so_and_only_the_other_limits_speak() -> None:
    low, drop = judge(Gate(min=0.95, max_drop=0.01), 0.9)

    assert drop.passed
    assert "no baseline yet" in drop.reason
    assert not low.passed


@pytest.mark.parametrize(
    ("baseline", "words"),
    [
        (old(0.9, error="its signature is gone"), "could not be evaluated: its signature is gone"),
        (old(math.nan), "undefined for version 3: it is nan"),
        (old(Undefined(reason="one class only")), "undefined for version 3: one class only"),
        (old(0.9, metrics={}), "undefined for version 3: it was not computed"),
        (old(0.9, rows=90), "measured on 90 rows, this model on 100"),
    ],
)
def test_a_baseline_that_cannot_be_compared_with_fails(
    baseline: BaselineMetrics, words: str
) -> None:
    (verdict,) = judge(Gate(max_drop=1.0), 0.99, baseline=baseline)

    assert not verdict.passed
    assert words in verdict.reason


def test_a_near_miss_shows_the_digits_that_decided() -> None:
    (verdict,) = judge(Gate(min=0.93), 0.9299999)

    assert verdict.reason == "0.9299999"


def test_every_slice_is_held_to_the_limit() -> None:
    verdicts = judge_slices(
        SliceGate(slices=("day",), min=0.6, min_rows=10), ("mon", 20, 0.7), ("tue", 20, 0.5)
    )

    assert [(verdict.subject, verdict.passed) for verdict in verdicts] == [
        ("auc where day is mon", True),
        ("auc where day is tue", False),
    ]


def test_a_slice_under_min_rows_fails_however_good_it_looks() -> None:
    (verdict,) = judge_slices(SliceGate(slices=("day",), min=0.6, min_rows=10), ("mon", 9, 1.0))

    assert not verdict.passed
    assert verdict.key == "evaluate.slice_gates.auc.min_rows"


def test_a_slice_that_does_not_define_the_metric_fails_its_gate() -> None:
    (verdict,) = judge_slices(
        SliceGate(slices=("day",), min=0.6, min_rows=10),
        ("mon", 20, Undefined(reason="all 20 rows have the label 1")),
    )

    assert not verdict.passed
    assert "all 20 rows" in verdict.reason


def test_chosen_values_are_judged_alone_and_one_that_is_not_there_fails() -> None:
    gate = SliceGate(slices=("day",), values=("mon", "sun"), min=0.6, min_rows=10)

    verdicts = judge_slices(gate, ("mon", 20, 0.7), ("tue", 3, 0.1))

    assert [(verdict.subject, verdict.passed) for verdict in verdicts] == [
        ("auc where day is mon", True),
        ("auc where day is sun", False),
    ]


def test_a_slice_gate_without_any_slice_fails() -> None:
    (verdict,) = judge_slices(SliceGate(slices=("day",), min=0.6))

    assert not verdict.passed
