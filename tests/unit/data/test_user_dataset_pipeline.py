"""`data.pipeline`: a user's own dataset in other batches, and its first pass from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from stoker.core.errors import ConfigError
from stoker.data.feed import options
from stoker.data.feed.calls import Calls
from stoker.data.user_dataset.config import OwnDatasetConfig, PipelineConfig
from stoker.data.user_dataset.description import SPLITS, Count
from stoker.data.user_dataset.feed import OwnFeed, element_bytes, passes_agree
from stoker.data.user_dataset.load_dataset import open_own_dataset, with_pipeline

ROWS = 23
EPOCHS = 3


def weighted(split: str) -> tf.data.Dataset[Any]:
    """Rows that know their number, with a text, a label and a weight, in batches of 5."""
    number = np.arange(ROWS)
    features = {"number": number, "name": np.array([f"row {n}" for n in number])}
    rows: Any = (features, number % 2, number / np.float32(ROWS))
    return tf.data.Dataset.from_tensor_slices(rows).batch(5)


def feed(
    dataset: Callable[[str], tf.data.Dataset[Any]],
    config: PipelineConfig,
    *,
    rows: int = ROWS,
    own_batches: int = 5,
) -> OwnFeed:
    made = open_own_dataset(dataset, OwnDatasetConfig(dataset="model:dataset", pipeline=config))
    count = Count(rows=rows, batches=-(-rows // own_batches), batch_size=own_batches)
    if config.batch_size is not None:
        count = count.rebatched(config.batch_size)
    return OwnFeed(with_pipeline(made, config, counts=dict.fromkeys(SPLITS, count)), "train")


def calls(own: OwnFeed, *, batch_size: int, first: int = 0, skipped_steps: int = 0) -> Calls:
    per_epoch = own.steps(batch_size)
    return Calls(
        rows=per_epoch * batch_size,
        batch_size=batch_size,
        steps_per_call=2,
        seed=0,
        first=first,
        last=EPOCHS * -(-per_epoch // 2),
        skipped_steps=skipped_steps,
    )


def read(own: OwnFeed, schedule: Calls, *, batches: int) -> list[Any]:
    """Elements of some batches, as NumPy."""
    with own.shuffled(schedule) as elements:
        taken = elements.take(batches).as_numpy_iterator()
        return [tf.nest.flatten(element) for element in taken]


def equal(ours: list[Any], theirs: list[Any]) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(
        np.array_equal(a, b) and a.dtype == b.dtype
        for one, other in pairs
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("size", [1, 4, 5, 7, ROWS, 100])
def test_other_batches_hold_the_same_rows_in_the_same_order(size: int) -> None:
    own = feed(weighted, PipelineConfig(batch_size=size))

    with own.in_order(batch_size=size) as elements:
        batches = list(elements.as_numpy_iterator())

    assert len(batches) == own.steps(size) == -(-ROWS // size)
    assert [len(label) for _, label, _ in batches[:-1]] == [size] * (len(batches) - 1)
    assert len(batches[-1][1]) == ROWS - size * (len(batches) - 1)
    rows = {name: np.concatenate([x[name] for x, _, _ in batches]) for name in ("number", "name")}
    assert rows["number"].tolist() == list(range(ROWS))
    assert rows["name"].tolist() == [f"row {n}".encode() for n in range(ROWS)]
    assert np.concatenate([label for _, label, _ in batches]).tolist() == [
        n % 2 for n in range(ROWS)
    ]
    weights = np.concatenate([weight for _, _, weight in batches])
    assert np.array_equal(weights, np.arange(ROWS) / np.float32(ROWS))


class Counting:
    """A dataset made by a generator that counts its passes, in batches of any size."""

    def __init__(self) -> None:
        self.passes: dict[str, int] = dict.fromkeys(SPLITS, 0)

    def __call__(self, split: str) -> tf.data.Dataset[Any]:
        def generate() -> Iterator[Any]:
            self.passes[split] += 1
            for first, last in ((0, 3), (3, 9), (9, 10)):
                yield np.full((last - first, 2), first, np.float32), np.arange(first, last)

        spec = (tf.TensorSpec([None, 2], tf.float32), tf.TensorSpec([None], tf.int64))
        return tf.data.Dataset.from_generator(generate, output_signature=spec)


@pytest.mark.parametrize(
    ("first", "skipped"), [(0, 0), (1, 0), (2, 1), (4, 0)], ids=["begin", "call", "step", "epoch"]
)
def test_from_memory_every_epoch_is_the_first_wherever_a_run_goes_on(
    first: int, skipped: int
) -> None:
    count = Count(rows=10, batches=3, batch_size=6)
    found = []
    for cache in ("none", "memory"):
        made = Counting()
        config = PipelineConfig(cache=cache)
        opened = open_own_dataset(made, OwnDatasetConfig(dataset="model:dataset", pipeline=config))
        own = OwnFeed(with_pipeline(opened, config, counts=dict.fromkeys(SPLITS, count)), "train")
        schedule = calls(own, batch_size=6, first=first, skipped_steps=skipped)
        found.append(read(own, schedule, batches=7))
        # A rollback asks again.
        assert equal(found[-1], read(own, schedule, batches=7))
        if cache == "memory":
            assert made.passes == {"train": 1, "eval": 0}
        else:
            assert made.passes["train"] > 3

    assert equal(*found)


def test_a_pass_that_is_not_as_it_was_counted_ends_before_an_epoch_is_made_of_it() -> None:
    own = feed(Counting(), PipelineConfig(cache="memory"), rows=20)

    with pytest.raises(tf.errors.OpError, match="expected to contain 4 elements"):
        read(own, calls(own, batch_size=5), batches=1)


def test_what_does_not_fit_in_memory_is_refused_with_its_size_and_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable: 4096 kB\n")
    monkeypatch.setattr(options, "MEMINFO", meminfo)
    read_batches = []

    def wide(split: str) -> tf.data.Dataset[Any]:
        def generate() -> Iterator[Any]:
            for number in range(64):
                read_batches.append(number)
                yield np.ones((4, 1 << 16), np.float32), np.arange(4)

        spec = (tf.TensorSpec([None, 1 << 16], tf.float32), tf.TensorSpec([None], tf.int64))
        return tf.data.Dataset.from_generator(generate, output_signature=spec)

    own = feed(wide, PipelineConfig(cache="memory"), rows=256, own_batches=4)

    with pytest.raises(ConfigError, match=r"of model:dataset, split 'train'") as caught:
        read(own, calls(own, batch_size=4), batches=1)
    # A batch is 1 MiB, half of 4 MiB and of the cached batches may be used.
    assert "about 64.0 MiB in total; the limit is 2.5 MiB" in str(caught.value)
    assert len(read_batches) < 64


def test_texts_take_what_they_are_long() -> None:
    assert element_bytes(tf.ones([3, 2], tf.float16)) == 12
    assert element_bytes(tf.constant(["a" * 1000, ""])) == 1000 + 2 * 24


def shuffled(*, again: bool) -> tf.data.Dataset[Any]:
    return tf.data.Dataset.range(40).shuffle(40, seed=1, reshuffle_each_iteration=again).batch(4)


def test_passes_agree_where_every_pass_is_the_same() -> None:
    assert passes_agree(weighted("train"))
    assert passes_agree(shuffled(again=False), batches=3)
    assert passes_agree(Counting()("train"))
    assert passes_agree(shuffled(again=True).cache(), batches=10)


def test_passes_do_not_agree_where_the_order_the_values_or_the_number_differ() -> None:
    assert not passes_agree(shuffled(again=True), batches=3)
    assert not passes_agree(
        tf.data.Dataset.range(8).batch(4).map(lambda x: tf.cast(x, tf.float32) + noise(x))
    )
    seen = []

    def shrinking() -> Iterator[int]:
        seen.append(0)
        yield from range(4 - len(seen))

    spec = tf.TensorSpec([], tf.int32)
    assert not passes_agree(tf.data.Dataset.from_generator(shrinking, output_signature=spec))
    assert len(seen) == 2


def noise(x: tf.Tensor) -> tf.Tensor:
    return tf.random.uniform(tf.shape(x), seed=1)


def test_a_batch_of_no_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="batch_size must be at least 1"):
        PipelineConfig(batch_size=0)
