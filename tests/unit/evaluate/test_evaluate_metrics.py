from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from stoker.core.errors import ConfigError
from stoker.evaluate.metrics import (
    METRICS,
    Undefined,
    better_direction,
    default_metrics,
    measure,
    metrics_of,
)
from stoker.evaluate.task import Examples, Task, pair

BINARY = Task(kind="binary", classes=2)
NUMBERS = Task(kind="regression", classes=0)

few_scores = st.integers(0, 20).map(lambda step: step / 20)
binary_rows = st.lists(st.tuples(st.integers(0, 1), few_scores), min_size=1, max_size=60)
number_rows = st.lists(
    st.tuples(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32)),
    min_size=1,
    max_size=60,
)


@st.composite
def many_class_rows(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    classes = draw(st.integers(6, 9))
    rows = draw(st.integers(1, 40))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    weights = rng.permuted(np.tile(np.arange(1.0, classes + 1), (rows, 1)), axis=1)
    return rng.integers(0, classes, rows), weights / weights.sum(axis=1, keepdims=True)


def columns(rows: list[tuple[Any, Any]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([row[0] for row in rows]), np.array([row[1] for row in rows])


def binary(labels: Any, scores: Any, *, from_logits: bool = False) -> Examples:
    task = Task(kind="binary", classes=2, from_logits=from_logits)
    return pair(np.asarray(labels), np.asarray(scores), task=task)


@given(binary_rows)
def test_auc_is_sklearns_with_ties(rows: list[tuple[int, float]]) -> None:
    labels, scores = columns(rows)
    assume(0 < labels.sum() < len(labels))

    assert measure("auc", binary(labels, scores)) == pytest.approx(sk.roc_auc_score(labels, scores))


@given(binary_rows)
def test_average_precision_is_sklearns_with_ties(rows: list[tuple[int, float]]) -> None:
    labels, scores = columns(rows)
    assume(labels.sum() > 0)
    expected = pytest.approx(sk.average_precision_score(labels, scores))

    assert measure("average_precision", binary(labels, scores)) == expected
    assert measure("auc_pr", binary(labels, scores)) == expected


@given(binary_rows)
def test_threshold_metrics_are_sklearns(rows: list[tuple[int, float]]) -> None:
    labels, scores = columns(rows)
    said = (scores > 0.5).astype(int)
    assume(said.any() and labels.any())

    examples = binary(labels, scores)

    assert measure("accuracy", examples) == pytest.approx(sk.accuracy_score(labels, said))
    assert measure("precision", examples) == pytest.approx(sk.precision_score(labels, said))
    assert measure("recall", examples) == pytest.approx(sk.recall_score(labels, said))
    assert measure("f1", examples) == pytest.approx(sk.f1_score(labels, said))


@given(binary_rows)
def test_log_loss_is_sklearns_with_probabilities_kept_off_0_and_1(
    rows: list[tuple[int, float]],
) -> None:
    labels, scores = columns(rows)
    clipped = np.clip(scores, 1e-7, 1 - 1e-7)

    expected = sk.log_loss(labels, clipped, labels=[0, 1])

    assert measure("log_loss", binary(labels, scores)) == pytest.approx(expected)


@given(many_class_rows())
def test_many_class_metrics_are_sklearns(rows: tuple[np.ndarray, np.ndarray]) -> None:
    labels, probabilities = rows
    classes = probabilities.shape[1]
    said = probabilities.argmax(axis=1)
    every = list(range(classes))

    examples = pair(labels, probabilities, task=Task(kind="multiclass", classes=classes))

    assert measure("accuracy", examples) == pytest.approx(sk.accuracy_score(labels, said))
    assert measure("macro_f1", examples) == pytest.approx(
        sk.f1_score(labels, said, average="macro", labels=np.union1d(labels, said))
    )
    assert measure("log_loss", examples) == pytest.approx(
        sk.log_loss(labels, probabilities, labels=every)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        top_5 = sk.top_k_accuracy_score(labels, probabilities, k=5, labels=every)
    assert measure("top_5_accuracy", examples) == pytest.approx(top_5)


@given(
    st.integers(2, 5).flatmap(
        lambda labels: st.lists(
            st.tuples(
                st.lists(st.integers(0, 1), min_size=labels, max_size=labels),
                st.lists(few_scores, min_size=labels, max_size=labels),
            ),
            min_size=1,
            max_size=30,
        )
    )
)
@settings(max_examples=25)
def test_metrics_of_several_labels_are_sklearns(rows: list[tuple[list[int], list[float]]]) -> None:
    labels, scores = columns(rows)
    said = (scores > 0.5).astype(int)
    examples = pair(labels, scores, task=Task(kind="multilabel", classes=labels.shape[1]))

    assert measure("subset_accuracy", examples) == sk.accuracy_score(labels, said)
    assert measure("hamming_loss", examples) == pytest.approx(sk.hamming_loss(labels, said))
    for name in ("precision", "recall", "f1"):
        theirs = getattr(sk, f"{name}_score")
        for average in ("micro", "macro"):
            value = measure(f"{average}_{name}", examples)
            expected = theirs(labels, said, average=average, zero_division=np.nan)
            assert np.isnan(expected) == isinstance(value, Undefined)
            assert np.isnan(expected) or value == pytest.approx(expected)
    both = [label for label in range(labels.shape[1]) if len(set(labels[:, label])) == 2]
    if both:
        known, of_known = labels[:, both], scores[:, both]
        macro = sk.roc_auc_score(known, of_known, average="macro")
        micro = sk.roc_auc_score(labels, scores, average="micro")
        assert measure("macro_auc", examples) == pytest.approx(macro)
        assert measure("micro_auc", examples) == pytest.approx(micro)


def test_the_log_loss_of_several_labels_is_what_keras_trains_on() -> None:
    labels, said = np.array([[1, 0], [1, 1]]), np.array([[0.9, 0.2], [0.4, 1.0]])
    examples = pair(labels, said, task=Task(kind="multilabel", classes=2))

    expected = -np.log([0.9, 0.8, 0.4, 1 - 1e-7]).mean()

    assert measure("log_loss", examples) == pytest.approx(expected)


def test_a_metric_that_several_labels_do_not_have_names_those_they_have() -> None:
    examples = pair(np.eye(2), np.eye(2), task=Task(kind="multilabel", classes=2))

    for name, fix in (("accuracy", "subset_accuracy"), ("auc", "macro_auc or micro_auc")):
        value = measure(name, examples)
        assert isinstance(value, Undefined)
        assert value.reason.endswith(f"this model is multilabel, 2 labels (use {fix})")
    logits = pair(np.eye(2), 5 * np.eye(2), task=Task(kind="multilabel", classes=2))
    assert isinstance(measure("micro_f1", logits), Undefined)


@given(number_rows)
def test_regression_metrics_are_sklearns(rows: list[tuple[float, float]]) -> None:
    labels, said = columns(rows)

    examples = pair(labels, said, task=NUMBERS)

    assert measure("mae", examples) == pytest.approx(sk.mean_absolute_error(labels, said))
    assert measure("mse", examples) == pytest.approx(sk.mean_squared_error(labels, said))
    assert measure("rmse", examples) == pytest.approx(sk.root_mean_squared_error(labels, said))
    if labels.std() > 1e-3 * (1 + np.abs(labels).max()):
        assert measure("r2", examples) == pytest.approx(sk.r2_score(labels, said), rel=1e-6)


def test_a_regression_with_two_outputs_is_measured_over_both() -> None:
    labels = np.array([[0.0, 1.0], [2.0, 5.0], [4.0, 3.0]])
    said = labels + np.array([[1.0, 0.0], [-1.0, 2.0], [0.0, 0.0]])

    examples = pair(labels, said, task=NUMBERS)

    assert measure("mse", examples) == pytest.approx(sk.mean_squared_error(labels, said))
    assert measure("r2", examples) == pytest.approx(sk.r2_score(labels, said))


@given(st.lists(st.integers(0, 1), min_size=1, max_size=30), few_scores)
def test_calibration_is_the_mean_prediction_by_the_mean_label(
    labels: list[int], score: float
) -> None:
    examples = binary(labels, [score] * len(labels))
    mean = sum(labels) / len(labels)

    assert measure("mean_label", examples) == pytest.approx(mean)
    assert measure("mean_prediction", examples) == pytest.approx(score)
    if mean:
        assert measure("calibration", examples) == pytest.approx(score / mean)
    else:
        assert measure("calibration", examples) == Undefined(reason="the mean label is 0")


@given(binary_rows)
def test_two_columns_give_what_one_column_gives(rows: list[tuple[int, float]]) -> None:
    labels, scores = columns(rows)
    assume(not (scores == 0.5).any())
    one = binary(labels, scores)
    two = pair(
        labels, np.stack([1 - scores, scores], axis=1), task=Task(kind="multiclass", classes=2)
    )

    for name in default_metrics(BINARY):
        assert measure(name, one) == pytest.approx(measure(name, two))


@given(binary_rows)
def test_logits_give_what_their_probabilities_give(rows: list[tuple[int, float]]) -> None:
    labels, scores = columns(rows)
    scores = np.clip(scores, 0.01, 0.99)
    assume(not (scores == 0.5).any())
    logits = np.log(scores / (1 - scores))
    both = np.stack([np.zeros_like(logits), logits], axis=1)
    two_columns = Task(kind="multiclass", classes=2, from_logits=True)

    for name in default_metrics(BINARY):
        expected = measure(name, binary(labels, scores))
        assert measure(name, binary(labels, logits, from_logits=True)) == pytest.approx(expected)
        assert measure(name, pair(labels, both, task=two_columns)) == pytest.approx(expected)


def test_large_logits_are_ranked_though_their_probabilities_are_all_1() -> None:
    assert measure("auc", binary([0, 1], [80.0, 90.0], from_logits=True)) == 1.0


def test_a_model_with_one_answer_for_all_has_no_perfect_top_5() -> None:
    same = np.full((10, 10), 0.1)

    examples = pair(np.arange(10), same, task=Task(kind="multiclass", classes=10))

    assert measure("top_5_accuracy", examples) == pytest.approx(0.5)


def test_one_hot_labels_are_class_ids() -> None:
    probabilities = np.array([[0.7, 0.2, 0.1], [0.1, 0.2, 0.7]])

    examples = pair(np.eye(3)[[0, 1]], probabilities, task=Task(kind="multiclass", classes=3))

    assert measure("accuracy", examples) == 0.5


@pytest.mark.parametrize(
    ("name", "labels", "scores", "reason"),
    [
        ("auc", [1, 1], [0.1, 0.2], "all 2 rows have the label 1"),
        ("auc", [0, 0], [0.1, 0.2], "all 2 rows have the label 0"),
        ("auc_pr", [0, 0], [0.1, 0.2], "none of the 2 rows has the label 1"),
        ("precision", [1, 0], [0.1, 0.2], "no row is predicted as class 1"),
        ("recall", [0, 0], [0.1, 0.9], "no row has the label 1"),
        ("f1", [0, 0], [0.1, 0.2], "no row has the label 1 and none is predicted"),
        ("accuracy", [1, 0], [-3.0, 4.0], "are not probabilities"),
        ("log_loss", [1, 0], [-3.0, 4.0], "are not probabilities"),
        ("rmse", [1, 0], [0.1, 0.9], "rmse is for regression models"),
        ("top_5_accuracy", [1, 0], [0.1, 0.9], "top_5_accuracy is for multiclass models"),
    ],
)
def test_what_the_rows_do_not_define_is_undefined_with_its_reason(
    name: str, labels: list[int], scores: list[float], reason: str
) -> None:
    value = measure(name, binary(labels, scores))

    assert isinstance(value, Undefined)
    assert reason in value.reason


@pytest.mark.parametrize("name", sorted(METRICS))
@pytest.mark.parametrize("task", [BINARY, NUMBERS], ids=["binary", "regression"])
def test_every_metric_is_undefined_over_no_rows(name: str, task: Task) -> None:
    value = measure(name, pair(np.empty(0), np.empty(0), task=task))

    assert isinstance(value, Undefined)


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", sorted(METRICS))
@pytest.mark.parametrize("where", ["label", "prediction"])
def test_no_metric_is_a_number_once_one_row_is_broken(name: str, broken: float, where: str) -> None:
    labels, said = np.array([0.0, 1.0, 1.0]), np.array([0.2, 0.7, 0.6])
    (labels if where == "label" else said)[1] = broken

    for task in (BINARY, NUMBERS):
        value = measure(name, pair(labels, said, task=task))
        assert isinstance(value, Undefined)


def test_an_error_too_large_for_a_number_is_undefined() -> None:
    value = measure("mse", pair(np.array([0.0, 1.0]), np.array([1e300, 1.0]), task=NUMBERS))

    assert value == Undefined(reason="the result is too large for a number")


def test_r2_of_equal_labels_is_undefined() -> None:
    value = measure("r2", pair(np.array([2.0, 2.0]), np.array([1.0, 2.0]), task=NUMBERS))

    assert value == Undefined(reason="all 2 labels are equal")


@pytest.mark.parametrize(
    "task",
    [BINARY, NUMBERS, *(Task(kind="multiclass", classes=classes) for classes in (2, 3, 5, 6, 10))],
)
def test_every_default_metric_is_defined_on_ordinary_rows(task: Task) -> None:
    rng = np.random.default_rng(0)
    columns = task.classes if task.kind == "multiclass" else 1
    raw = rng.uniform(0.05, 1.0, (200, columns))
    said = raw / raw.sum(axis=1, keepdims=True) if columns > 1 else raw
    labels = rng.normal(size=200) if task == NUMBERS else rng.integers(0, task.classes, 200)

    examples = pair(labels, said, task=task)

    for name in default_metrics(task):
        assert isinstance(measure(name, examples), float), name


def test_metrics_whose_names_end_alike_are_better_in_the_same_direction() -> None:
    alike = [(a, b) for a in METRICS for b in METRICS if a.endswith(f"_{b}")]

    assert ("macro_f1", "f1") in alike
    assert all(METRICS[a].direction == METRICS[b].direction for a, b in alike)
    assert better_direction("price_rmse") == "lower"
    assert better_direction("a_top_5_accuracy") == better_direction("accuracy") == "higher"
    assert better_direction("price_rmsee") is None


def test_a_name_that_would_be_of_two_outputs_is_refused() -> None:
    assert metrics_of(["a", "b"])["b_macro_f1"] == ("b", "macro_f1")
    with pytest.raises(ConfigError, match=r"the name a_macro_\w+.*'a' and 'a_macro'"):
        metrics_of(["a", "a_macro"])
