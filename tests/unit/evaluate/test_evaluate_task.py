from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stoker.core.errors import ConfigError, DataError
from stoker.evaluate.task import Task, infer_task, pair


@pytest.mark.parametrize(
    ("labels", "shape", "expected"),
    [
        ([0, 1, 1], (3, 1), Task(kind="binary", classes=2)),
        ([0.0, 1.0, np.nan], (3,), Task(kind="binary", classes=2)),
        ([[0], [1]], (2, 1), Task(kind="binary", classes=2)),
        ([False, True], (2, 1), Task(kind="binary", classes=2)),
        ([0, 1, 1], (3, 2), Task(kind="multiclass", classes=2)),
        ([0.0, 4.0], (2, 10), Task(kind="multiclass", classes=10)),
        (np.eye(3), (3, 3), Task(kind="multiclass", classes=3)),
        ([[1, 1, 0], [0, 1, 0]], (2, 3), Task(kind="multilabel", classes=3)),
        ([[0, 0], [0, 1]], (2, 2), Task(kind="multilabel", classes=2)),
        ([[True, True], [False, True]], (2, 2), Task(kind="multilabel", classes=2)),
        ([[1, np.nan], [1, 1]], (2, 2), Task(kind="multilabel", classes=2)),
        ([0, 1, 2], (3, 1), Task(kind="regression", classes=0)),
        ([0.5, 1.0], (2, 1), Task(kind="regression", classes=0)),
        ([[0.5, 1.0], [2.0, 3.0]], (2, 2), Task(kind="regression", classes=0)),
    ],
)
def test_the_task_is_read_off_labels_and_output_shape(
    labels: Any, shape: tuple[int, ...], expected: Task
) -> None:
    assert infer_task(np.asarray(labels), shape) == expected


def test_logits_are_remembered_for_classes_and_mean_nothing_for_numbers() -> None:
    assert infer_task(np.array([0, 1]), (2, 1), from_logits=True).from_logits
    assert infer_task(np.array([0, 2]), (2, 3), from_logits=True).from_logits
    assert not infer_task(np.array([0.5, 2.0]), (2, 1), from_logits=True).from_logits


@pytest.mark.parametrize(
    ("labels", "shape", "words"),
    [
        ([0, 5], (2, 3), "class ids from 0 to 2"),
        ([0, -1], (2, 3), "class ids from 0 to 2"),
        ([0.5, 1.0], (2, 3), "class ids from 0 to 2"),
        ([[0, 1]], (1, 1), "one label per row"),
        ([[0, 1]], (1, 3), "3 labels per row"),
        ([b"cat", b"dog"], (2, 2), "must be numbers"),
    ],
)
def test_labels_that_do_not_fit_the_output_are_refused(
    labels: Any, shape: tuple[int, ...], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        infer_task(
            np.asarray(labels, dtype=object if isinstance(labels[0], bytes) else None), shape
        )


def test_rows_of_one_label_each_are_multi_label_where_others_of_the_data_are_not() -> None:
    assert infer_task(np.eye(3), (3, 3)).kind == "multiclass"
    assert infer_task(np.eye(3), (3, 3), multi_hot=True).kind == "multilabel"


@pytest.mark.parametrize("row", [[0, 0, 0], [1, 1, 0]])
def test_a_model_for_one_class_a_row_is_not_one_of_several_labels(row: list[int]) -> None:
    logits = {"from_logits": True, "one_class": True}

    # What other splits hold does not matter then.
    assert infer_task(np.eye(3), (3, 3), multi_hot=True, **logits).kind == "multiclass"
    with pytest.raises(ConfigError, match="must have exactly one class"):
        infer_task(np.vstack([np.eye(3), row]), (4, 3), **logits)
    soft = infer_task(np.vstack([np.eye(3), row]) / 4, (4, 3), **logits)
    assert soft.kind == "regression"


@pytest.mark.parametrize("shape", [(), (4, 0), (4, 2, 2)])
def test_an_output_that_is_not_a_row_of_numbers_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"\[rows, k\]"):
        infer_task(np.zeros(4), shape)


@pytest.mark.parametrize(
    ("labels", "said", "task"),
    [
        (np.zeros(3), np.zeros(2), Task(kind="binary", classes=2)),
        (np.zeros(3), np.zeros((3, 2)), Task(kind="binary", classes=2)),
        (np.zeros(3), np.zeros((3, 2)), Task(kind="regression", classes=0)),
        (np.zeros((3, 2)), np.zeros(3), Task(kind="regression", classes=0)),
        (np.zeros(3), np.zeros((3, 2)), Task(kind="multiclass", classes=3)),
        (np.zeros((3, 2)), np.zeros((3, 3)), Task(kind="multiclass", classes=3)),
        (np.zeros((3, 2, 2)), np.zeros((3, 2, 2)), Task(kind="regression", classes=0)),
        (np.full(3, 2), np.zeros(3), Task(kind="binary", classes=2)),
        (np.zeros(3), np.zeros((3, 2)), Task(kind="multilabel", classes=2)),
        (np.full((3, 2), 2), np.zeros((3, 2)), Task(kind="multilabel", classes=2)),
        (np.full(3, -1), np.zeros((3, 3)), Task(kind="multiclass", classes=3)),
    ],
)
def test_what_does_not_pair_up_is_refused(labels: np.ndarray, said: np.ndarray, task: Task) -> None:
    with pytest.raises(DataError):
        pair(labels, said, task=task)


def test_one_column_and_no_column_are_the_same() -> None:
    task = Task(kind="binary", classes=2)

    flat = pair(np.array([0, 1]), np.array([0.2, 0.9]), task=task)
    column = pair(np.array([[0], [1]]), np.array([[0.2], [0.9]]), task=task)

    assert flat.predictions.tolist() == column.predictions.tolist() == [0.2, 0.9]
    assert flat.labels.tolist() == column.labels.tolist() == [0.0, 1.0]


def test_the_logits_of_several_labels_each_have_a_sigmoid_of_their_own() -> None:
    task = Task(kind="multilabel", classes=2, from_logits=True)

    examples = pair(np.array([[1, 1]]), np.array([[0.0, 100.0]]), task=task)

    assert examples.predictions.tolist() == [[0.5, 1.0]]
    assert examples.scores.tolist() == [[0.0, 100.0]]


def test_the_softmax_of_large_logits_is_finite() -> None:
    task = Task(kind="multiclass", classes=3, from_logits=True)

    examples = pair(np.array([0]), np.array([[1000.0, 0.0, -1000.0]]), task=task)

    assert examples.predictions.tolist() == [[1.0, 0.0, 0.0]]
