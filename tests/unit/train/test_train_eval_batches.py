"""The eval split's batches, the first of which may be made before they are needed."""

from __future__ import annotations

import threading
from typing import Any

import tensorflow as tf

from stoker.train.loop.validation import EvalBatches


def batches(made: threading.Event) -> tf.data.Dataset[Any]:
    def note(value: Any) -> Any:
        made.set()
        return value

    def mapped(value: tf.Tensor) -> tf.Tensor:
        return tf.ensure_shape(tf.numpy_function(note, [value], tf.int64), [])

    return tf.data.Dataset.range(5).map(mapped).prefetch(2)


def values(found: EvalBatches) -> list[int]:
    return [int(value) for value in found]


def test_batches_that_are_begun_are_made_ahead_and_are_the_same() -> None:
    made = threading.Event()
    found = EvalBatches(batches(made), begins_early=True)

    found.begin()
    found.begin()

    assert made.wait(60)
    assert values(found) == values(found) == [0, 1, 2, 3, 4]
    assert found.element_spec == tf.TensorSpec([], tf.int64)


def test_a_users_own_dataset_does_nothing_before_it_is_read() -> None:
    made = threading.Event()
    found = EvalBatches(batches(made), begins_early=False)

    found.begin()

    assert not made.wait(0.2)
    assert values(found) == [0, 1, 2, 3, 4]
