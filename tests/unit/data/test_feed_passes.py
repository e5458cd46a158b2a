"""What an iterator gets: TensorFlow's autotuner may delay the end of one that it watches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.feed.calls import Calls
from stoker.data.feed.pipeline import Feed, as_it_is
from stoker.data.feed.tables.rows import TableRows
from stoker.data.user_dataset.config import OwnDatasetConfig
from stoker.data.user_dataset.description import SPLITS, Count
from stoker.data.user_dataset.feed import OwnFeed
from stoker.data.user_dataset.load_dataset import open_own_dataset

ROWS = 8
CALLS = Calls(rows=ROWS, batch_size=2, steps_per_call=2, seed=0, first=0, last=2)


CutTable = Callable[[pa.Table, Sequence[Column], Sequence[Sequence[int]]], Dataset]
COLUMNS = (Column(name="n", dtype="int64"),)


@pytest.mark.parametrize("memory_bytes", [0, 1 << 20])
def test_no_pass_of_a_feed_is_autotuned(cut_table: CutTable, memory_bytes: int) -> None:
    dataset = cut_table(pa.table({"n": np.arange(ROWS)}), COLUMNS, [[ROWS]])
    rows = TableRows(dataset, "train", columns=COLUMNS)
    feed = Feed(rows, prepare=as_it_is, finish=as_it_is, memory_bytes=memory_bytes)

    assert feed.keeps_features == (memory_bytes > 0)
    for opened in (feed.shuffled(CALLS), feed.in_order(batch_size=4)):
        with opened as batches:
            assert batches.options().autotune.enabled is False
            found = np.concatenate([feed.load(element)["n"] for element in batches])
            assert sorted(found) == list(range(ROWS))


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
