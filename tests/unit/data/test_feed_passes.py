"""What is handed to an iterator: TensorFlow's autotuner may hold up the end of one it watches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray

from stoker.data.feed.calls import Calls, RowOrder
from stoker.data.feed.pipeline import Feed, as_it_is
from stoker.data.feed.stages import StageWork
from stoker.data.user_dataset.config import OwnDatasetConfig
from stoker.data.user_dataset.description import SPLITS, Count
from stoker.data.user_dataset.feed import OwnFeed
from stoker.data.user_dataset.load_dataset import open_own_dataset

ROWS = 8
CALLS = Calls(rows=ROWS, batch_size=2, steps_per_call=2, seed=0, first=0, last=2)


class Numbers:
    """A split whose row n holds n."""

    rows = ROWS
    whole_calls = False
    changes = False

    def order(self, *, seed: int) -> RowOrder:
        def rows(epoch: int, first: int, last: int) -> NDArray[np.int64]:
            return (np.arange(first, last) + seed + epoch) % ROWS

        return rows

    @contextmanager
    def shuffled(self, calls: Calls) -> Iterator[tf.data.Dataset[Any]]:
        yield calls.steps(self.order(seed=calls.seed)).map(lambda rows, _: {"n": rows})

    @contextmanager
    def in_order(self, *, batch_size: int) -> Iterator[tf.data.Dataset[Any]]:
        yield tf.data.Dataset.range(ROWS).batch(batch_size).map(lambda rows: {"n": rows})

    def stages(self, *, batch_size: int, samples: int, seed: int) -> Iterator[StageWork]:
        return iter(())


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_no_pass_of_a_feed_is_autotuned(memory_bytes: int) -> None:
    feed = Feed(Numbers(), prepare=as_it_is, finish=as_it_is, memory_bytes=memory_bytes)

    assert feed.keeps_features == (memory_bytes > 0)
    with feed.shuffled(CALLS) as shuffled, feed.in_order(batch_size=4) as ordered:
        for batches in (shuffled, ordered):
            assert batches.options().autotune.enabled is False
            rows = np.concatenate([feed.load(element)["n"] for element in batches])
            assert sorted(rows) == list(range(ROWS))


@pytest.mark.parametrize("autotuned", [None, False])
def test_what_a_user_turned_off_in_a_dataset_stays_off(autotuned: bool | None) -> None:
    def dataset(split: str) -> tf.data.Dataset[Any]:
        options = tf.data.Options()
        if autotuned is not None:
            options.autotune.enabled = autotuned
        rows = len(split) * tf.ones([8, 2])
        batches = tf.data.Dataset.from_tensor_slices((rows, rows[:, 0])).batch(4)
        return batches.with_options(options)

    made = open_own_dataset(dataset, OwnDatasetConfig(dataset="model:dataset"))
    counted = {split: Count(rows=8, batches=2, batch_size=4) for split in SPLITS}
    feed = OwnFeed(replace(made, counts=counted), "train")

    with feed.shuffled(CALLS) as shuffled, feed.in_order(batch_size=4) as ordered:
        for batches in (shuffled, ordered):
            assert batches.options().autotune.enabled is (autotuned is not False)
