"""The slices of the virtual workers: each row of a step counts once, in the slice of one of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from stoker.train.setup.strategy import one_device
from stoker.train.step.virtual_workers import PassSums, VirtualWorkers

COUNT, SIZE = 4, 5


def sums_of(
    values: list[float], *, worker_rows_only: bool = False
) -> tuple[PassSums, list[list[float]]]:
    """Sums over the passes of one replica that runs all virtual workers, and the rows of each pass that count."""
    slices: list[list[float]] = []

    def note(batch: Any, own: Any) -> np.float32:
        slices.append(batch[:own].tolist())
        return np.float32(len(batch))

    def one_pass(batch: tf.Tensor, own: tf.Tensor) -> tuple[tf.Tensor, list[Any]]:
        length = tf.ensure_shape(tf.numpy_function(note, [batch, own], tf.float32), [])
        return tf.reduce_sum(batch) / length, []

    virtual_workers = VirtualWorkers(
        load=lambda element: element,
        one_pass=one_pass,
        weights=[],
        statistics=[],
        seeds=[],
        distribution=one_device(),
        count=COUNT,
        batch_size=SIZE,
        worker_rows_only=worker_rows_only,
    )
    run = tf.function(virtual_workers, autograph=False)
    return run(tf.constant(values, tf.float32)), slices


@pytest.mark.parametrize("rows", [1, 4, 5, 6, 13, 19, 20])
@pytest.mark.parametrize("worker_rows_only", [False, True])
def test_slices_fill_up_one_after_the_other(rows: int, worker_rows_only: bool) -> None:
    values = [float(row) for row in range(1, rows + 1)]

    sums, slices = sums_of(values, worker_rows_only=worker_rows_only)

    assert slices == [values[start : start + SIZE] for start in range(0, COUNT * SIZE, SIZE)]
    assert float(sums.rows) == rows
    assert float(sums.loss_sum) == pytest.approx(sum(values)), "each pass is the mean of its rows"


@pytest.mark.parametrize("rows", [21, 24, 39])
def test_a_larger_batch_of_a_users_own_dataset_loses_no_row(rows: int) -> None:
    values = [float(row) for row in range(1, rows + 1)]

    sums, slices = sums_of(values)

    assert [row for part in slices for row in part] == values
    assert len(slices) == COUNT
    assert float(sums.loss_sum) == pytest.approx(sum(values))


def test_rows_of_others_count_nothing() -> None:
    """A worker without rows gets one more than its share."""
    sums, slices = sums_of([3.0] * (COUNT * SIZE + 1), worker_rows_only=True)

    assert slices == [[]] * COUNT, "as many passes, so that all draw equally many numbers"
    assert (float(sums.rows), float(sums.loss_sum)) == (0.0, 0.0)
