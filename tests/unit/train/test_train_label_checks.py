"""Labels that the loss cannot learn are refused before training, and those that it can are not."""

from __future__ import annotations

import json
from typing import Any

import keras
import numpy as np
import pytest
from numpy.typing import ArrayLike

from stoker.core.errors import ConfigError
from stoker.core.multi_output import ONLY
from stoker.data.features.analysis.label_summary import (
    LabelCounter,
    LabelSummary,
    labels_as_facts,
    labels_from_facts,
)
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.label_checks import answers_one_class, findings, require_labels_that_fit


def summary(values: ArrayLike) -> LabelSummary:
    counter = LabelCounter()
    counter.add(np.asarray(values))
    return counter.summary()


def built(units: int, activation: str | None, loss: Any, kind: Any = keras.Model) -> BuiltModel:
    inputs = keras.Input((3,))
    model = kind(inputs, keras.layers.Dense(units, activation=activation)(inputs))
    model.compile(optimizer="sgd", loss=loss)
    return BuiltModel(model=model, adapt=lambda features: features)


def judged(model: BuiltModel, labels: ArrayLike, monitor: str = "val_loss") -> list[str]:
    splits = {"train": {ONLY: summary(labels)}}
    return [f"{f.severity} {f.kind}" for f in findings(model, splits, monitor=monitor)]


CLASSES = np.arange(5)
ONE_HOT = np.eye(5, dtype="float32")
MULTI_HOT = [[1, 1, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("units", "activation", "loss", "labels", "fix"),
    [
        (1, "sigmoid", "binary_crossentropy", [1, 2, 2], "Map 1 to 0 and 2 to 1"),
        (1, "sigmoid", "binary_crossentropy", [-1, 1], "Map -1 to 0 and 1 to 1"),
        (1, "sigmoid", keras.losses.BinaryCrossentropy(name="mine"), [0, 255], "255 to 1"),
        (1, "sigmoid", "bce", [1, 2, 3, 4], "sparse_categorical_crossentropy"),
        (1, "sigmoid", "binary_focal_crossentropy", [0.5, 7.25, 3.5], "a loss for numbers"),
        (5, "softmax", "binary_crossentropy", CLASSES, "5 outputs with softmax"),
        (5, "softmax", "sparse_categorical_crossentropy", CLASSES + 1, "Subtract 1"),
        (5, "softmax", "sparse_categorical_crossentropy", [0, 9], "Give the last layer 10 units"),
        (5, "softmax", "sparse_categorical_crossentropy", CLASSES - 1, "from 0"),
        (5, "softmax", "sparse_categorical_crossentropy", [0.5, 1.5], "whole numbers from 0"),
        (5, "softmax", "sparse_categorical_crossentropy", ONE_HOT, '"categorical_crossentropy"'),
        (1, "sigmoid", "sparse_categorical_crossentropy", [0, 1], "2 units"),
        (5, "softmax", "categorical_crossentropy", CLASSES, "sparse_categorical_crossentropy"),
        (5, "softmax", "categorical_crossentropy", ONE_HOT * 2, "add up to 1"),
        (1, "softmax", "binary_crossentropy", [0, 1], "sigmoid"),
        (1, "sigmoid", "binary_crossentropy", MULTI_HOT, "5 units"),
        (1, None, "hinge", [0, 1, 2], "-1 and 1"),
        (1, None, "poisson", [-1, 3], "can be negative"),
        (1, None, "msle", [-0.5, 3], "can be negative"),
        (5, None, "mse", [0.5, 1.5], "1 unit"),
        (1, None, "mae", np.ones((4, 3)) * [[1], [2], [3], [4]], "3 unit"),
    ],
)
def test_labels_outside_of_what_the_loss_reads_are_refused_with_the_remedy(
    units: int, activation: str | None, loss: Any, labels: ArrayLike, fix: str
) -> None:
    splits = {"train": {ONLY: summary(labels)}}

    with pytest.raises(ConfigError) as refused:
        require_labels_that_fit(
            findings(built(units, activation, loss), splits, monitor="val_loss")
        )

    assert fix in refused.value.line()


@pytest.mark.parametrize(
    ("units", "activation", "loss", "labels"),
    [
        (1, "sigmoid", "binary_crossentropy", [0, 1, 1]),
        (1, "sigmoid", "binary_crossentropy", [0.0, 0.3, 1.0]),
        (1, "sigmoid", "binary_crossentropy", [[0], [1]]),
        (1, None, keras.losses.BinaryCrossentropy(from_logits=True), [0, 1]),
        (5, "softmax", "sparse_categorical_crossentropy", CLASSES),
        (5, "softmax", "sparse_categorical_crossentropy", CLASSES[:, None].astype("float32")),
        (5, "softmax", keras.losses.SparseCategoricalCrossentropy(ignore_class=-1), [-1, 2]),
        (5, None, keras.losses.SparseCategoricalCrossentropy(from_logits=True), CLASSES),
        (5, "softmax", "categorical_crossentropy", ONE_HOT),
        (5, "sigmoid", "binary_crossentropy", MULTI_HOT),
        (5, "sigmoid", "binary_crossentropy", ONE_HOT),
        (5, None, keras.losses.BinaryFocalCrossentropy(from_logits=True), MULTI_HOT),
        (5, "softmax", "kl_divergence", np.full((3, 5), 0.2)),
        (1, None, "hinge", [-1, 1]),
        (1, None, "squared_hinge", [0, 1]),
        (1, None, "mse", [-100.0, 3e6]),
        (1, "relu", "mse", [0.0, 12.5]),
        (1, "exponential", "poisson", [0, 7]),
        (3, None, "mae", np.ones((4, 3)) * [[1], [2], [3], [4]]),
        (1, None, lambda y, p: keras.ops.mean(y - p), [7, 9]),
        (1, "sigmoid", "mse", [0, 1]),
    ],
)
def test_labels_that_the_loss_can_learn_pass_without_a_word(
    units: int, activation: str | None, loss: Any, labels: ArrayLike
) -> None:
    assert judged(built(units, activation, loss), labels) == []


@pytest.mark.parametrize(
    ("units", "activation", "loss", "labels", "kind"),
    [
        (1, None, "binary_crossentropy", [0, 1], "logits"),
        (1, "sigmoid", keras.losses.BinaryCrossentropy(from_logits=True), [0, 1], "logits"),
        (
            5,
            "softmax",
            "categorical_crossentropy",
            ONE_HOT + ONE_HOT[::-1] * (CLASSES != 2),
            "label_sum",
        ),
        (5, "softmax", "binary_crossentropy", MULTI_HOT, "several_labels"),
        (1, "sigmoid", "mse", [1, 5], "label_range"),
        (1, "tanh", "huber", [-3.0, 3.0], "label_range"),
        (1, "sigmoid", "binary_crossentropy", [1, 1, 1], "one_label"),
    ],
)
def test_what_is_most_likely_a_mistake_is_a_warning(
    units: int, activation: str | None, loss: Any, labels: ArrayLike, kind: str
) -> None:
    assert f"warning {kind}" in judged(built(units, activation, loss), labels)


class Smooth(keras.losses.CategoricalCrossentropy):  # type: ignore[misc]  # Keras has no types
    """Of the user's own."""


@pytest.mark.parametrize(
    ("activation", "loss", "one"),
    [
        ("softmax", "categorical_crossentropy", True),
        (None, keras.losses.CategoricalCrossentropy(from_logits=True, name="mine"), True),
        (None, keras.losses.categorical_crossentropy, True),
        (None, keras.losses.CategoricalFocalCrossentropy(from_logits=True), True),
        (None, Smooth(from_logits=True), True),
        ("softmax", lambda y, p: keras.ops.mean(y - p), True),
        ("sigmoid", lambda y, p: keras.ops.mean(y - p), False),
        ("sigmoid", "binary_crossentropy", False),
        ("softmax", "binary_crossentropy", False),
        (None, keras.losses.BinaryCrossentropy(from_logits=True), False),
    ],
)
def test_a_model_for_one_class_a_row_is_known_by_its_loss_or_its_softmax(
    activation: str | None, loss: Any, one: bool
) -> None:
    assert answers_one_class(built(5, activation, loss), ONLY) is one


@pytest.mark.parametrize(
    "loss", ["mse", "categorical_crossentropy", "binary_crossentropy", "poisson"]
)
def test_a_last_axis_of_unknown_length_is_not_judged(loss: str) -> None:
    inputs = keras.Input((None,))
    model = keras.Model(inputs, keras.layers.Activation("sigmoid")(inputs))
    model.compile(loss=loss)

    for labels in ([0, 1, 1], [[0, 1], [1, 0]]):
        assert judged(BuiltModel(model=model, adapt=lambda features: features), labels) == []


def test_weights_of_classes_that_rows_do_not_have_one_of_are_refused() -> None:
    model = built(5, "sigmoid", "binary_crossentropy")
    splits = {"train": {ONLY: summary(MULTI_HOT)}}

    with pytest.raises(ConfigError, match=r"needs one class per row, but rows .* have 0 to 2"):
        require_labels_that_fit(findings(model, splits, monitor="val_loss", class_weight={1: 9}))


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ({0: 1, 1: 30}, []),
        ({1: 1, 2: 30}, ["warning class_weight"]),
        ({-1: 2}, ["warning class_weight"]),
    ],
)
def test_a_weight_of_a_class_that_no_row_has_is_a_warning(
    weights: dict[int, float], said: list[str]
) -> None:
    splits = {"train": {ONLY: summary([0, 1, 1])}}
    model = built(1, "sigmoid", "binary_crossentropy")

    found = findings(model, splits, monitor="val_loss", class_weight=weights)

    assert [f"{each.severity} {each.kind}" for each in found] == said


def test_the_ids_of_three_texts_are_not_numbers_and_those_of_two_are() -> None:
    def kinds_of(labels: list[int], texts: list[str]) -> list[str]:
        splits = {"train": {ONLY: summary(labels)}}
        model = built(1, None, "mse")
        return [each.kind for each in findings(model, splits, monitor="val_loss", texts=texts)]

    assert kinds_of([0, 1, 2], [ONLY]) == ["classes_as_numbers"]
    assert kinds_of([0, 1, 1], [ONLY]) == []
    assert kinds_of([0, 1, 2], []) == []


def test_a_ratio_to_a_label_of_0_and_rows_that_evaluate_refuses_are_warnings() -> None:
    [ratio] = findings(
        built(1, None, "mape"), {"train": {ONLY: summary([0, 0, 7.5])}}, monitor="val_loss"
    )
    [several] = findings(
        built(5, "softmax", "categorical_crossentropy"),
        {"train": {ONLY: summary(MULTI_HOT)}},
        monitor="val_loss",
    )

    assert "divides by the label, but the label of train is 0 in 2 rows" in ratio.message
    assert (several.kind, "`stoker evaluate` refuses them" in several.message) == (
        "label_sum",
        True,
    )


def test_labels_that_are_never_set_and_mostly_zeros_are_warnings() -> None:
    labels = np.zeros((50, 5))
    labels[:4, 1:3] = 1
    model = built(5, "sigmoid", "binary_crossentropy")

    assert judged(model, labels, monitor="val_binary_accuracy") == [
        "warning never_set",
        "warning imbalanced",
    ]


def test_an_eval_split_of_one_class_is_a_warning_if_it_is_large_enough() -> None:
    model = built(1, "sigmoid", "binary_crossentropy")
    train = {"train": {ONLY: summary([0, 1, 1])}}

    small = findings(model, train | {"eval": {ONLY: summary([0] * 9)}}, monitor="val_auc")
    large = findings(model, train | {"eval": {ONLY: summary([0] * 40)}}, monitor="val_auc")

    assert list(small) == []
    assert [each.kind for each in large] == ["one_label"]


def test_an_answer_that_evaluation_refuses_is_a_warning() -> None:
    inputs = keras.Input((4, 3))
    model = keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(inputs))
    model.compile(loss="sparse_categorical_crossentropy")
    labels = [[0, 1, 1, 0], [1, 1, 0, 1]]

    found = judged(BuiltModel(model=model, adapt=lambda features: features), labels)

    assert found == ["warning not_evaluated"]


def test_a_rare_class_is_a_warning_only_where_accuracy_chooses_the_best_epoch() -> None:
    model, labels = built(1, "sigmoid", "binary_crossentropy"), [1] * 3 + [0] * 97

    assert judged(model, labels) == []
    assert judged(model, labels, monitor="val_accuracy") == ["warning imbalanced"]


@pytest.mark.parametrize(
    ("metrics", "weighted", "monitor", "weights", "sample_weight", "expected"),
    [
        ([], ["accuracy"], "val_accuracy", {0: 1, 1: 30}, False, []),
        ([], ["accuracy"], "val_accuracy", {0: 1, 1: 1.1}, False, ["imbalanced"]),
        ([], ["accuracy"], "val_accuracy", {}, True, []),
        (["accuracy"], [], "val_accuracy", {0: 1, 1: 30}, False, ["imbalanced"]),
        (["accuracy"], ["accuracy"], "val_accuracy", {0: 1, 1: 30}, False, ["imbalanced"]),
        (["accuracy"], ["accuracy"], "val_weighted_accuracy", {0: 1, 1: 30}, False, []),
        ([], [keras.metrics.BinaryAccuracy()], "val_binary_accuracy", {1: 30}, False, []),
    ],
)
def test_a_rare_class_with_a_weight_is_not_a_warning_where_the_metric_counts_weights(
    metrics: list[Any],
    weighted: list[Any],
    monitor: str,
    weights: dict[int, float],
    sample_weight: bool,
    expected: list[str],
) -> None:
    model = built(1, "sigmoid", "binary_crossentropy")
    model.model.compile(loss="binary_crossentropy", metrics=metrics, weighted_metrics=weighted)
    splits = {"train": {ONLY: summary([1] * 3 + [0] * 97)}}

    found = findings(
        model,
        splits,
        monitor=monitor,
        class_weight=weights,
        has_sample_weight=sample_weight,
    )

    assert [each.kind for each in found] == expected


class OwnTestStep(keras.Model):  # type: ignore[misc]  # Keras has no types
    def test_step(self, data: Any) -> Any:
        return {"loss": keras.ops.mean(data[1])}


def test_class_weights_do_not_reach_a_user_defined_test_step() -> None:
    model = built(1, "sigmoid", "binary_crossentropy", OwnTestStep)
    model.model.compile(loss="binary_crossentropy", weighted_metrics=["accuracy"])
    splits = {"train": {ONLY: summary([1] * 3 + [0] * 97)}}

    found = findings(model, splits, monitor="val_accuracy", class_weight={0: 1, 1: 30})

    assert [each.kind for each in found] == ["imbalanced"]


def test_a_label_only_the_eval_split_has_is_refused_too() -> None:
    splits = {"train": {ONLY: summary([0, 4])}, "eval": {ONLY: summary([0, 5])}}
    model = built(5, "softmax", "sparse_categorical_crossentropy")

    with pytest.raises(ConfigError, match="the label of eval goes from 0 to 5"):
        require_labels_that_fit(findings(model, splits, monitor="val_loss"))


def test_each_output_is_judged_by_its_own_loss() -> None:
    inputs = keras.Input((3,))
    outputs = {
        "sold": keras.layers.Dense(1, activation="sigmoid", name="sold")(inputs),
        "price": keras.layers.Dense(1, name="price")(inputs),
    }
    model = keras.Model(inputs, outputs)
    model.compile(loss={"sold": "binary_crossentropy", "price": "mse"})
    splits = {"train": {"sold": summary([1, 2]), "price": summary([1.5, 200.0])}}
    both = BuiltModel(model=model, adapt=lambda features: features)

    with pytest.raises(ConfigError, match="the label of output 'sold' in train goes from 1 to 2"):
        require_labels_that_fit(findings(both, splits, monitor="val_loss"))


class OwnLoss(keras.Model):  # type: ignore[misc]  # Keras has no types
    def compute_loss(self, x: Any = None, y: Any = None, **rest: Any) -> Any:
        return keras.ops.mean(y)


def test_a_model_that_computes_its_own_loss_is_not_judged() -> None:
    model = built(1, "sigmoid", "binary_crossentropy", OwnLoss)

    assert judged(model, [-5, 17]) == []


def reread(summary: LabelSummary) -> LabelSummary:
    facts = json.loads(json.dumps(labels_as_facts({"train": {"": summary}})))
    return labels_from_facts(facts)["train"][""]


def test_a_summary_is_the_same_in_whatever_batches_labels_come_and_as_json() -> None:
    labels = np.array([0, 3, 3, 1, 2, 3])
    counter = LabelCounter()
    for part in np.split(labels, [1, 4]):
        counter.add(part)

    assert counter.summary() == summary(labels)
    assert counter.summary().counts == {"0": 1, "1": 1, "2": 1, "3": 3}
    assert reread(counter.summary()) == counter.summary()
    several = summary(MULTI_HOT)
    assert several.ones == (1, 1, 0, 1, 0)
    assert reread(several) == several
    # As an earlier version recorded it.
    facts = labels_as_facts({"train": {"": several}})
    del facts["train"][""]["ones"]
    assert labels_from_facts(facts)["train"][""].multi_hot
