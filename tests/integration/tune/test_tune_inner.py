"""What a loop inside of a tf.function is given, and what is kept of its dataset."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from stoker.scriptprofile.watcher.stoker_watch.loop_ceiling import Sample, before_pass, dataset_of
from stoker.scriptprofile.watcher.stoker_watch.loops import Loop

ROWS = np.arange(14, dtype=np.float32).reshape(7, 2)

NUMBERS = tf.data.Dataset.from_tensor_slices(ROWS).batch(3)
NAMES = tf.constant([f"row {n}" for n in range(7)])
NAMED = tf.data.Dataset.zip(
    (
        tf.data.Dataset.zip(
            {
                "x": tf.data.Dataset.from_tensor_slices(ROWS),
                "name": tf.data.Dataset.from_tensor_slices(NAMES),
            }
        ),
        tf.data.Dataset.range(7),
    )
).batch(2)
RAGGED = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1.0], [2.0, 3.0]])).batch(1)


@pytest.mark.parametrize(
    ("dataset", "count"),
    [(NUMBERS, 3), (NAMED, 4), (NUMBERS.repeat().take(5), 5), (NUMBERS.filter(lambda x: True), 3)],
)
def test_a_dataset_that_is_watched_gives_what_it_gave_and_is_counted(
    dataset: Any, count: int
) -> None:
    sample = Sample(tf, dataset)

    watched = sample.watched(tf, dataset)

    # Nothing is traced again for it.
    assert watched.element_spec == dataset.element_spec
    pairs = list(zip(dataset.as_numpy_iterator(), watched.as_numpy_iterator(), strict=True))
    for plain, seen in pairs:
        tf.nest.map_structure(np.testing.assert_array_equal, plain, seen)
    assert sample.count == len(pairs) == count
    kept = tf.nest.map_structure(lambda part: part.numpy(), sample.batch())
    tf.nest.map_structure(np.testing.assert_array_equal, kept, pairs[0][0])
    assert sample.is_of(dataset)
    assert not sample.is_of(watched)


@pytest.mark.parametrize(
    ("args", "kwargs", "why"),
    [
        ((NUMBERS, 1.0), {}, ""),
        ((), {"batches": NAMED}, ""),
        ((NUMBERS,), {"other": NAMED}, "several datasets"),
        ((RAGGED,), {}, "ragged or sparse"),
        ((iter(NUMBERS),), {}, "that gets an iterator"),
        ((1.0, None), {}, "is not an argument"),
    ],
)
def test_one_dataset_of_plain_tensors_is_needed(
    args: tuple[Any, ...], kwargs: dict[str, Any], why: str
) -> None:
    _, said = dataset_of(tf, (args, kwargs))

    assert (said == "") == (why == "")
    assert why in said


def test_one_call_alone_is_given_another_dataset_and_never_the_first() -> None:
    loop = Loop(("train.py", 1), "inside")
    assert before_pass(loop, ((NUMBERS, 2.0), {})) == ((NUMBERS, 2.0), {})

    loop.steps = 1
    (watched, number), named = before_pass(loop, ((NUMBERS, 2.0), {}))

    assert watched is not NUMBERS
    assert (number, named) == (2.0, {})
    assert loop.no_ceiling == ""
    assert before_pass(loop, ((NUMBERS, 2.0), {})) == ((NUMBERS, 2.0), {})


def test_what_cannot_be_repeated_is_reported_once_and_left_alone() -> None:
    loop = Loop(("train.py", 1), "inside")
    loop.steps = 1

    assert before_pass(loop, ((3.0,), {})) == ((3.0,), {})
    assert "is not an argument" in loop.no_ceiling
    assert before_pass(loop, ((NUMBERS,), {})) == ((NUMBERS,), {})
