"""Learning rate, moving average and loss scale through complete runs, and over a resume."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tests.integration.train.small import on_one_device, unwatched

from stoker.core.errors import Preempted, UserError
from stoker.data.dataset import Dataset
from stoker.data.features.preprocessing.transform import Transform
from stoker.train.checkpoints.store import newest_good
from stoker.train.config import TrainConfig
from stoker.train.context.preemption import Preemption
from stoker.train.context.run_context import Progress, TrainResult
from stoker.train.loop.loop import fit
from stoker.train.setup.build_model import BuiltModel, build_model, prepare_process
from stoker.train.setup.strategy import one_device

STEPS = 7
"""Of an epoch: 210 rows, 32 at a time."""


class EachStep(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Looks at the model before the first step and after each."""

    def __init__(self, look: Callable[[keras.Model], None]) -> None:
        super().__init__()
        self._look = look

    def on_train_begin(self, logs: Any = None) -> None:
        self._look(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._look(self.model)


def with_optimizer(make: Callable[[], Any]) -> Callable[..., keras.Model]:
    def build(features: dict[str, Any]) -> keras.Model:
        x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
        x = layers.Dense(8, activation="tanh")(x)
        model = keras.Model(features, layers.Dense(1, activation="sigmoid", dtype="float32")(x))
        model.compile(optimizer=make(), loss="binary_crossentropy")
        return model

    return build


def train(
    data: tuple[Dataset, Transform],
    folder: Path,
    make: Callable[[], Any],
    *,
    ends_after: int | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    resolved: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[TrainResult | None, BuiltModel]:
    """Train, or resume; the result is None if the run was stopped after a step."""
    chosen = on_one_device(**{"steps_per_call": 1} | (resolved or {}))
    prepare_process(precision=chosen.precision, seed=0, deterministic=False)
    built = build_model(with_optimizer(make), data[1], what="model:build")
    preemption, result = Preemption(), None

    def end(progress: Progress) -> None:
        if progress.step == ends_after:
            preemption.request()

    try:
        with nullcontext() if ends_after is None else pytest.raises(Preempted):
            result = fit(
                built,
                data,
                config=TrainConfig(**{"epochs": 2} | settings),
                resolved=chosen,
                distribution=one_device(),
                context=unwatched(
                    folder, on_progress=end, preemption=preemption, callbacks=callbacks
                ),
            )
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    return result, built


def weights(model: keras.Model) -> list[Any]:
    return [np.array(variable.numpy()) for variable in model.trainable_variables]


def rate(model: keras.Model) -> float:
    return float(tf.convert_to_tensor(model.optimizer.learning_rate))


def decayed(base: float) -> Any:
    return keras.optimizers.schedules.ExponentialDecay(base, 5, 0.5)


@pytest.mark.parametrize(
    ("kind", "left"),
    [pytest.param(float, 1.0, marks=pytest.mark.soak), (decayed, 0.5 ** (2 * STEPS / 5))],
)
def test_a_resumed_run_scales_its_learning_rate_once(
    dataset: Dataset,
    transform: Transform,
    tmp_path: Path,
    kind: Callable[[float], Any],
    left: float,
) -> None:
    def make() -> Any:
        return keras.optimizers.SGD(kind(0.01), momentum=0.9)

    data, fourfold = (dataset, transform), {"lr_factor": 4.0}
    _, whole = train(data, tmp_path / "whole", make, resolved=fourfold)
    train(data, tmp_path / "cut", make, resolved=fourfold, ends_after=9)
    result, cut = train(data, tmp_path / "cut", make, resolved=fourfold)

    assert result is not None
    assert result.steps == 2 * STEPS
    for built in (whole, cut):
        assert rate(built.model) == pytest.approx(0.04 * left, rel=1e-5)
    for one, other in zip(weights(whole.model), weights(cut.model), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("set_in", ["stoker", "keras"])
def test_the_average_of_a_run_is_that_of_its_weights_step_by_step(
    dataset: Dataset, transform: Transform, tmp_path: Path, set_in: str
) -> None:
    """Also over a resume; and it is what is validated."""
    momentum, seen = 0.7, list[list[Any]]()
    of_keras = {"use_ema": True, "ema_momentum": momentum} if set_in == "keras" else {}
    settings: dict[str, Any] = {"ema": momentum} if set_in == "stoker" else {}
    looking = EachStep(lambda model: seen.append(weights(model)))

    def run(**changes: Any) -> tuple[TrainResult | None, BuiltModel]:
        return train(
            (dataset, transform),
            tmp_path,
            lambda: keras.optimizers.SGD(0.5, **of_keras),
            callbacks=[looking],
            epochs=1,
            **settings,
            **changes,
        )

    run(ends_after=4)
    # What it is restored to is seen again where it begins.
    again = len(seen)
    result, built = run()

    assert result is not None
    for before, restored in zip(seen[again - 1], seen[again], strict=True):
        np.testing.assert_array_equal(before, restored)
    del seen[again]
    assert len(seen) == 1 + STEPS
    average = seen[0]
    for now in seen[1:]:
        average = [momentum * a + (1 - momentum) * w for a, w in zip(average, now, strict=True)]
    found = newest_good(tmp_path)
    assert found is not None
    kept = found.arrays()
    for index, expected in enumerate(average):
        np.testing.assert_allclose(kept[f"ema/ema_{index}"], expected, rtol=1e-4, atol=1e-6)
    for variable, expected in zip(built.model.trainable_variables, average, strict=True):
        variable.assign(expected)
    table = dataset.table("eval").to_pandas()
    features = {name: tf.constant(table[name].to_numpy()) for name in ("a", "b")}
    answers = built.model(built.adapt(features), training=False)
    loss = keras.losses.binary_crossentropy(table["y"].to_numpy()[:, None], answers)
    assert result.metrics["val_loss"] == pytest.approx(float(np.mean(loss)), rel=1e-4)


@pytest.mark.parametrize("xla", [False, True], ids=["", "by xla"])
def test_a_step_that_overflows_in_float16_is_skipped_and_halves_the_scale(
    dataset: Dataset, transform: Transform, tmp_path: Path, xla: bool
) -> None:
    """Training goes on with the rest, and does not end as a run gone wrong."""
    begun, seen = 2.0**22, list[tuple[float, int, list[Any]]]()

    def make() -> Any:
        inner = keras.optimizers.Adam(0.05)
        return keras.mixed_precision.LossScaleOptimizer(inner, initial_scale=begun)

    def look(model: keras.Model) -> None:
        optimizer = model.optimizer
        scale = float(tf.convert_to_tensor(optimizer.dynamic_scale.value))
        updates = int(tf.convert_to_tensor(optimizer.inner_optimizer.iterations.value))
        seen.append((scale, updates, weights(model)))

    result, built = train(
        (dataset, transform),
        tmp_path,
        make,
        callbacks=[EachStep(look)],
        resolved={"precision": "mixed_float16", "xla": xla},
        epochs=5,
    )

    assert result is not None
    assert seen[0][0] == begun
    skipped = 0
    for (scale, updates, before), (next_scale, next_updates, after) in pairwise(seen):
        same = all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
        if next_updates == updates:
            skipped += 1
            assert next_scale == scale / 2
            assert same
        else:
            assert (next_scale, next_updates) == (scale, updates + 1)
            assert not same
    assert seen[1][1] == 0, "the first step overflows"
    assert 1 <= skipped < 20
    assert seen[-1][0] == begun / 2**skipped
    assert result.steps == 5 * STEPS
    assert all(np.isfinite(value).all() for value in weights(built.model))
    assert result.metrics["val_loss"] < 0.5
    assert result.health["rollbacks"] == []


SCALE = "optimizer/loss_scale_optimizer"

HALF: dict[str, dict[str, Any]] = {
    "plain": {},
    "by xla": {"resolved": {"xla": True}},
    "two passes, clipped, averaged": {
        "resolved": {"accumulate": 2, "batch_size": 16},
        "accumulate": 2,
        "clip_norm": 0.1,
        "ema": 0.7,
    },
}
"""Of a run in mixed_float16 whose first steps overflow."""

HALF_IN_SOAK = ("plain", "by xla")
"""Those that only `make soak` ends and goes on with."""


class OfSomebody(keras.optimizers.Adam):  # type: ignore[misc]  # Keras has no types
    """Keras's Adam under another name: its loss scale stays Keras's own, with a condition."""


def half(
    data: tuple[Dataset, Transform],
    folder: Path,
    settings: dict[str, Any],
    *,
    kind: type[Any] = keras.optimizers.Adam,
    ends_after: int | None = None,
) -> dict[str, Any]:
    """The last checkpoint of such a run."""

    def make() -> Any:
        return keras.mixed_precision.LossScaleOptimizer(
            kind(0.05), initial_scale=2.0**22, dynamic_growth_steps=4
        )

    resolved = {"precision": "mixed_float16", "steps_per_call": 3} | settings.get("resolved", {})
    result, _ = train(
        data, folder, make, ends_after=ends_after, **(settings | {"resolved": resolved})
    )
    found = newest_good(folder)
    assert found is not None
    if result is not None:
        assert result.steps == 2 * STEPS
        assert result.health["rollbacks"] == []
    return dict(found.arrays())


Whole = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def whole_run(
    dataset: Dataset, transform: Transform, tmp_path_factory: pytest.TempPathFactory
) -> Whole:
    """Name of settings -> the last checkpoint of an undisturbed run."""

    @cache
    def trained(name: str) -> dict[str, Any]:
        return half((dataset, transform), tmp_path_factory.mktemp("whole"), HALF[name])

    return trained


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.soak] * (name in HALF_IN_SOAK)) for name in HALF],
)
def test_a_run_in_float16_that_was_ended_goes_on_to_the_same_bits(
    dataset: Dataset, transform: Transform, whole_run: Whole, tmp_path: Path, name: str
) -> None:
    data, whole = (dataset, transform), whole_run(name)
    before = half(data, tmp_path / "cut", HALF[name], ends_after=3)
    cut = half(data, tmp_path / "cut", HALF[name])

    assert before[f"{SCALE}/dynamic_scale"] < 2.0**22, "its first steps have overflowed"
    assert 0 < whole["optimizer/adam/iteration"] < 2 * STEPS
    assert cut.keys() == whole.keys()
    for key, value in whole.items():
        np.testing.assert_array_equal(cut[key], value, err_msg=key)


def test_a_run_in_float16_leads_where_kerass_condition_leads(
    dataset: Dataset, transform: Transform, whole_run: Whole, tmp_path: Path
) -> None:
    name = "two passes, clipped, averaged"
    ours = whole_run(name)
    theirs = half((dataset, transform), tmp_path, HALF[name], kind=OfSomebody)

    theirs = {key.replace("of_somebody", "adam"): value for key, value in theirs.items()}
    # Keras's condition does not affect Stoker's average, which also changes in skipped steps.
    compared = {key for key in ours if not key.startswith(("ema/", "metrics/"))}
    assert compared == {key for key in theirs if not key.startswith(("ema/", "metrics/"))}
    for key in compared:
        np.testing.assert_allclose(ours[key], theirs[key], rtol=2e-2, atol=2e-3, err_msg=key)


def test_a_fixed_scale_trains_in_float16_and_an_overflow_is_a_bad_step(
    dataset: Dataset, transform: Transform, tmp_path: Path
) -> None:
    def run(scale: float) -> tuple[TrainResult | None, BuiltModel]:
        return train(
            (dataset, transform),
            tmp_path / str(scale),
            lambda: keras.optimizers.Adam(0.05),
            resolved={"precision": "mixed_float16"},
            loss_scale=scale,
            epochs=3,
        )

    result, built = run(128.0)
    assert result is not None
    assert not isinstance(built.model.optimizer, keras.optimizers.LossScaleOptimizer)
    assert result.metrics["val_loss"] < 0.6
    with pytest.raises(UserError, match="gradient") as raised:
        run(2.0**24)
    assert "train.loss_scale: dynamic" in raised.value.fix
