"""Divergence and a collapsing loss scale, on series and on real training."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from keras import layers

from stoker.core.errors import ConfigError, Finding
from stoker.train.health.divergence import Divergence, DivergenceConfig, LossScaleWatch

CONFIG = DivergenceConfig(factor=3.0, updates=5, window=50)


def found(losses: list[float], config: DivergenceConfig = CONFIG) -> list[tuple[int, Finding]]:
    watch = Divergence(config)
    steps = [(step, watch.update(step, loss)) for step, loss in enumerate(losses, start=1)]
    return [(step, finding) for step, finding in steps if finding]


def test_a_loss_that_runs_away_is_named_once_with_the_step_it_left_at() -> None:
    losses = [1.0 + 0.1 * np.sin(i) for i in range(40)] + [3.0 * 1.5**i for i in range(1, 30)]
    [(step, finding)] = found(losses)

    assert step == 40 + CONFIG.updates
    assert finding.kind == "divergence"
    assert "since step 41" in finding.message
    assert "learning rate" in finding.fix


@given(
    st.lists(st.floats(0.5, 1.4), min_size=5, max_size=200),
    st.lists(st.integers(0, 10_000), max_size=5),
)
def test_single_high_batches_are_not_a_divergence(losses: list[float], spikes: list[int]) -> None:
    config = DivergenceConfig(factor=3.0, updates=6, window=50)
    for spike in spikes:
        losses[spike % len(losses)] = 1e6

    assert found(losses, config) == []


def test_a_new_level_without_growth_becomes_the_median() -> None:
    level = [1.0, 1.1, 0.9] * 20 + [10.0, 9.9, 10.1, 9.8] * 40

    assert found(level) == []
    assert len(found([*level, *(20.0 * 2.0**i for i in range(1, 20))])) == 1


def test_a_loss_around_zero_is_measured_by_its_spread() -> None:
    rng = np.random.default_rng(0)
    noise = [float(x) for x in rng.normal(scale=0.1, size=300)]

    assert found(noise) == []
    assert len(found([*noise, *(2.0 * 2.0**i for i in range(20))])) == 1


@given(st.lists(st.floats(0, 100), min_size=1, max_size=80), st.integers(0, 79))
def test_a_watch_that_is_stored_and_read_goes_on_as_if_it_had_not_been(
    losses: list[float], cut: int
) -> None:
    whole, first, second = (Divergence(CONFIG) for _ in range(3))
    expected = [whole.update(step, loss) for step, loss in enumerate(losses)]
    got = [first.update(step, loss) for step, loss in enumerate(losses[:cut])]
    second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
    got += [second.update(step, loss) for step, loss in enumerate(losses[cut:], start=cut)]

    assert got == expected


def test_a_learning_rate_a_thousand_times_too_high_is_named_within_thirty_steps() -> None:
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 8)).astype("f")
    y = x @ rng.normal(size=(8, 1)).astype("f")

    def losses(rate: float) -> list[float]:
        model = keras.Sequential([keras.Input((8,)), layers.Dense(8), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(rate), "mse")
        return [float(model.train_on_batch(x, y)) for _ in range(30)]

    config = DivergenceConfig(updates=5)
    assert found(losses(0.001), config) == []
    assert len(found(losses(1.0), config)) == 1


@pytest.mark.parametrize("wrong", [{"factor": 1.0}, {"updates": 1}, {"updates": 300}])
def test_settings_that_would_find_nothing_or_everything_are_refused(
    wrong: dict[str, float],
) -> None:
    with pytest.raises(ConfigError, match=r"train\.divergence\."):
        DivergenceConfig(**wrong)  # type: ignore[arg-type]  # mypy cannot check **


def test_some_halvings_at_the_start_are_usual() -> None:
    watch = LossScaleWatch()
    scales = [2.0**15, 2.0**14, 2.0**12, 2.0**11, 2.0**12, 2.0**10, 2.0**11]

    assert [watch.update(step, scale) for step, scale in enumerate(scales)] == [None] * 7


def test_a_scale_that_falls_and_falls_is_named_once_and_again_after_a_rise() -> None:
    watch = LossScaleWatch()
    scales = [2.0**15, 2.0**10, 2.0**7, 2.0**5, 2.0**6, 0.5, 0.25]
    kinds = [bool(watch.update(step, scale)) for step, scale in enumerate(scales)]

    assert kinds == [False, False, True, False, False, True, False]


def test_a_loss_scale_watch_goes_on_from_its_state() -> None:
    first, second = LossScaleWatch(), LossScaleWatch()
    first.update(1, 2.0**15)
    second.restore(json.loads(json.dumps(first.state())))

    assert second.update(2, 2.0**7) == first.update(2, 2.0**7) is not None


def test_gradients_that_overflow_float16_at_every_step_are_named() -> None:
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        model = keras.Sequential(
            [keras.Input((4,)), layers.Dense(4), layers.Dense(1, dtype="float32")]
        )
        inner = keras.optimizers.SGD(1e-6)
        optimizer = keras.mixed_precision.LossScaleOptimizer(inner)
        model.compile(optimizer, "mse")
    finally:
        keras.mixed_precision.set_dtype_policy("float32")
    watch = LossScaleWatch()
    x, y = np.full((8, 4), 1e3, "f"), np.full((8, 1), 1e9, "f")

    said = []
    for step in range(12):
        model.train_on_batch(x, y)
        said.append(watch.update(step, float(optimizer.dynamic_scale)))

    assert sum(finding is not None for finding in said) == 1
    finding = next(finding for finding in said if finding)
    assert "mixed_bfloat16" in finding.fix
