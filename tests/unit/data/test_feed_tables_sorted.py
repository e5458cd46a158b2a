"""Data sorted by its label trains to the same loss as data permuted whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.feed.tables.windows import Block, TableStream

CutTable = Callable[[pa.Table, Sequence[Column], Sequence[Sequence[int]]], Dataset]
Batches = Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]

COLUMNS = (Column(name="x", dtype="float32", length=4), Column(name="y", dtype="int64"))
BATCH = 128
GROUP_ROWS = 64
POSITIVE = 0.37


def sorted_by_label(rows: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    rng = np.random.default_rng(3)
    labels = np.sort((rng.random(rows) < POSITIVE).astype(np.int64))
    centres = np.array([0.5, -0.3, 0.2, 0.0])
    points = rng.normal(size=(rows, 4)) + np.outer(2 * labels - 1, centres)
    return points.astype(np.float32), labels


def stream_of(cut_table: CutTable, groups: int) -> TableStream:
    points, labels = sorted_by_label(groups * GROUP_ROWS)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(points.reshape(-1)), 4)
    table = pa.table([vectors, pa.array(labels)], names=["x", "y"])
    dataset = cut_table(table, COLUMNS, [[GROUP_ROWS] * groups])
    # The smallest window: 16 row groups, however little memory there is.
    return TableStream(dataset, "train", columns=COLUMNS, window_bytes=1)


def batches(blocks: Iterator[Block]) -> Batches:
    for block in blocks:
        for batch in block.batches():
            x, y = batch["x"], batch["y"]
            assert isinstance(x, np.ndarray)
            assert isinstance(y, np.ndarray)
            yield x, y


def loss_after(training: Batches, held_out: tuple[NDArray[np.float32], NDArray[np.int64]]) -> float:
    """Logistic regression by gradient descent with momentum; the loss over `held_out`."""
    weights, speed = np.zeros(5), np.zeros(5)
    for x, y in training:
        inputs = np.c_[x, np.ones(len(x))]
        probability = 1 / (1 + np.exp(-inputs @ weights))
        speed = 0.9 * speed - 0.1 * inputs.T @ (probability - y) / len(y)
        weights += speed
    x, y = held_out
    signed = (2 * y - 1) * (np.c_[x, np.ones(len(x))] @ weights)
    return float(np.mean(np.logaddexp(0, -signed)))


def permuted_whole(
    data: tuple[NDArray[np.float32], NDArray[np.int64]], seed: int, epochs: int
) -> Batches:
    x, y = data
    for epoch in range(epochs):
        order = np.random.default_rng([seed, epoch]).permutation(len(y))
        for start in range(0, len(y), BATCH):
            rows = order[start : start + BATCH]
            yield x[rows], y[rows]


@pytest.mark.parametrize("groups", [64, 400])
def test_sorted_data_trains_to_the_loss_of_data_permuted_whole(
    cut_table: CutTable, groups: int
) -> None:
    stream, data, seeds = stream_of(cut_table, groups), sorted_by_label(groups * GROUP_ROWS), 5

    streamed = [
        loss_after(batches(stream.shuffled(batch_size=BATCH, seed=s, epochs=range(2))), data)
        for s in range(seeds)
    ]
    permuted = [loss_after(permuted_whole(data, s, 2), data) for s in range(seeds)]
    unshuffled = loss_after(batches(stream.in_order(batch_size=BATCH)), data)

    spread = np.hypot(np.std(streamed), np.std(permuted)) / np.sqrt(seeds - 1)
    assert abs(np.mean(streamed) - np.mean(permuted)) < 3 * spread
    assert abs(np.mean(streamed) - np.mean(permuted)) < 0.01 * np.mean(permuted)
    assert unshuffled > 1.15 * np.mean(permuted)


@pytest.mark.parametrize("groups", [64, 400])
def test_labels_of_a_batch_vary_as_in_data_permuted_whole(cut_table: CutTable, groups: int) -> None:
    stream, data = stream_of(cut_table, groups), sorted_by_label(groups * GROUP_ROWS)
    blocks = stream.shuffled(batch_size=BATCH, seed=1, epochs=range(4))

    streamed = np.var([y.mean() for _, y in batches(blocks) if len(y) == BATCH])
    permuted = np.var([y.mean() for _, y in permuted_whole(data, 1, 4) if len(y) == BATCH])

    # 128 labels of a coin vary by 0.0018. A window of 16 groups that were drawn freely would add
    # 0.0146, and 16 neighbors 0.23.
    assert streamed < 1.35 * permuted
