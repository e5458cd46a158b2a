"""The code path of a TPU, run by the replicas of a mirrored strategy, because no TPU is available.

What differs from `mirrored`: batches are made whole on the host and handed out by the strategy, all
of one size; an epoch leaves out what fills no step, and validation leaves out nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tests.integration.train.killed import Trainer
from tests.integration.train.small import on_one_device, small_dataset, unwatched
from tests.integration.train.strategy_scenarios import normed, plain
from tests.integration.train.test_train_strategies import run_scenarios

from stoker.core.errors import ConfigError
from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.build import build_transform
from stoker.data.features.preprocessing.transform import Transform
from stoker.data.feed.calls import Calls
from stoker.data.feed.pipeline import Feed, as_it_is
from stoker.data.feed.tables.rows import TableRows
from stoker.train.config import TrainConfig
from stoker.train.loop.loop import fit
from stoker.train.setup.build_model import build_model, prepare_process
from stoker.train.setup.feeds import open_feeds
from stoker.train.setup.strategy import Distribution
from stoker.train.setup.whole_batches import WholeFeed

pytestmark = [pytest.mark.timeout(1800), pytest.mark.soak]

# 210 rows are 6 steps of 32, and 18 rows that are left out; or 7 steps of 30. Of 91 rows to validate
# two replicas cannot have equally many.
ROWS = {"train": 210, "eval": 91}
BATCH = 32

TPU: dict[str, Any] = {"as_tpu": True, "replicas": 2}
SCENARIOS: dict[str, dict[str, Any]] = {
    "plain": TPU | {"model": "plain"},
    "plain, 4 passes": TPU | {"model": "plain", "settings": {"accumulate": 4}},
    "normed": TPU | {"model": "normed", "steps_per_call": 2},
    "normed, ended and gone on, streamed": TPU
    | {"model": "normed", "steps_per_call": 2, "ends_after": [4, 8], "memory_bytes": 0},
    "normed, all rows": TPU | {"model": "normed", "global_batch": 30},
    "normed, all rows, mirrored": {"model": "normed", "global_batch": 30, "replicas": 2},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Transform]:
    """As in the neighboring tests, with one more row to validate."""
    dataset = small_dataset(tmp_path_factory.mktemp("dataset"), rows_of=ROWS)
    return dataset, build_transform(
        dataset, None, tmp_path_factory.mktemp("t") / "transform", label="y"
    )


@pytest.fixture(scope="module")
def trained(
    trainer: Trainer, data: tuple[Dataset, Transform], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], list[Any]]]:
    """Scenario -> its facts and weights."""
    return run_scenarios(trainer, SCENARIOS, tmp_path_factory.mktemp("tpu"), data)


@pytest.fixture(scope="module")
def by_keras(data: tuple[Dataset, Transform]) -> tuple[dict[str, Any], list[Any]]:
    """The metrics and weights of Keras's own step, on one device, over the same whole batches."""
    dataset, transform = data
    feed, _ = open_feeds(dataset, transform, config=TrainConfig(), memory_bytes=0)
    prepare_process(precision="float32", seed=0, deterministic=False)
    model = build_model(plain, transform, what="model:build").model
    columns = {split: _columns(dataset, split) for split in ROWS}
    features, label = columns["train"]
    metrics: list[dict[str, float]] = []
    for epoch in range(2):
        rows = np.array(feed.rows_at(epoch, 0, ROWS["train"] // BATCH * BATCH, seed=0))
        for batch in rows.reshape(-1, BATCH):
            model.train_on_batch({n: f[batch] for n, f in features.items()}, label[batch])
        metrics.append(model.evaluate(*columns["eval"], verbose=0, return_dict=True))
    best = min(metrics, key=lambda found: found["loss"])
    return {f"val_{name}": v for name, v in best.items()}, [v.numpy() for v in model.variables]


def _columns(dataset: Dataset, split: str) -> tuple[dict[str, Any], Any]:
    table = dataset.table(split, columns=["a", "b", "y"])
    columns = {name: table[name].to_numpy() for name in table.column_names}
    return {name: columns[name] for name in "ab"}, columns["y"]


@pytest.mark.parametrize("name", ["plain", "plain, 4 passes"])
def test_whole_steps_train_and_validate_as_keras_does_on_one_device(
    trained: dict[str, Any], by_keras: tuple[dict[str, Any], list[Any]], name: str
) -> None:
    facts, weights = trained[name]

    assert facts["steps"] == 2 * (ROWS["train"] // BATCH)
    # The weights first: the optimizer's and the metrics' variables follow in the reference.
    for ours, theirs in zip(weights, by_keras[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-6)
    for metric, value in by_keras[0].items():
        assert facts["metrics"][metric] == pytest.approx(value, rel=1e-4, abs=1e-5)


def test_a_run_that_ends_in_the_middle_of_an_epoch_goes_on_to_the_same_weights(
    trained: dict[str, Any],
) -> None:
    """And so does one whose rows are read again instead of kept."""
    whole, gone_on = trained["normed"], trained["normed, ended and gone on, streamed"]

    for ours, theirs in zip(whole[1], gone_on[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    for name in ("val_loss", "val_accuracy"):
        assert whole[0]["metrics"][name] == gone_on[0]["metrics"][name]


def test_where_no_row_is_left_out_it_is_as_mirrored(trained: dict[str, Any]) -> None:
    """BatchNorm and Dropout inside: each replica sees the same rows."""
    ours, theirs = trained["normed, all rows"], trained["normed, all rows, mirrored"]

    for one, other in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)
    for name, value in theirs[0]["metrics"].items():
        assert ours[0]["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", SCENARIOS)
def test_all_replicas_end_with_equal_weights(trained: dict[str, Any], name: str) -> None:
    assert trained[name][0]["apart"] == []


def test_a_feature_of_no_fixed_shape_is_refused(data: tuple[Dataset, Transform]) -> None:
    def twice(raw: dict[str, Any]) -> Any:
        both = tf.numpy_function(lambda a: np.stack([a, a], axis=1), [raw["a"]], tf.float32)
        return {"both": tf.ensure_shape(both, [None, None])}, raw["y"]

    rows = TableRows(data[0], "train", columns=data[0].columns)
    feed = WholeFeed(Feed(rows, prepare=twice, finish=as_it_is, memory_bytes=0))
    calls = Calls(rows=192, batch_size=BATCH, steps_per_call=3, seed=0, first=0, last=2)

    with (
        pytest.raises(ConfigError, match="needs features and labels of fixed shapes"),
        feed.shuffled(calls),
    ):
        pass


class Compiled(tf.distribute.OneDeviceStrategy):  # type: ignore[misc]  # TensorFlow has no types
    """Everything that a replica runs is one program of XLA, as on a TPU, or fails."""

    def __init__(self) -> None:
        super().__init__("CPU:0")
        self.compiled = 0

    def run(self, fn: Any, args: Any = (), kwargs: Any = None, options: Any = None) -> Any:
        if tf.executing_eagerly():
            raise NotImplementedError("TPUStrategy.run does not support pure eager execution")
        self.compiled += 1
        return super().run(tf.function(fn, jit_compile=True), args, kwargs, options)


class Sizes(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Records the number of rows that it gets before it runs."""

    seen: ClassVar[set[int | None]] = set()

    def call(self, inputs: Any) -> Any:
        self.seen.add(inputs.shape[0])
        return inputs


def sized(features: dict[str, Any]) -> keras.Model:
    inner = normed(features)
    model = keras.Model(features, Sizes(dtype="float32")(inner.output))
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy", "auc"])
    return model


def test_xla_compiles_all_that_a_replica_runs_and_knows_every_shape(
    data: tuple[Dataset, Transform], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Forward, backward, update, average and metrics, in passes; and validation."""
    dataset, transform = data
    strategy = Compiled()
    prepare_process(precision="mixed_bfloat16", seed=0, deterministic=False)
    try:
        with strategy.scope():
            built = build_model(sized, transform, what="model:build")
            Sizes.seen.clear()
            result = fit(
                built,
                (dataset, transform),
                config=TrainConfig(epochs=1, ema=0.9, clip_norm=1.0),
                resolved=on_one_device(batch_size=16, accumulate=2, strategy="tpu"),
                distribution=Distribution(name="tpu", strategy=strategy),
                context=unwatched(tmp_path / "checkpoints"),
            )
    finally:
        keras.mixed_precision.set_dtype_policy("float32")

    assert strategy.compiled > 0
    # A first batch, a pass, and to validate 64 rows and the 27 that are left.
    assert Sizes.seen == {32, 16, 64, 27}
    assert result.steps == 6
    assert 0 < result.metrics["val_loss"] < 10
    assert "an epoch drops 18 of 210 rows" in caplog.text
