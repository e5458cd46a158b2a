"""What the settings ask of the compiled optimizer: its learning rate, and a moving average."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from stoker.cluster.devices import Devices
from stoker.train.config import AutoInputs, ResolvedTraining, TrainConfig, resolve
from stoker.train.optimizer.settings import prepare_optimizer

CPU = Devices(cpu_cores=2, memory_bytes=2**34, gpus=())
SCHEDULES = keras.optimizers.schedules

BASE = 0.1


def halving(step: int) -> float:
    return BASE * 0.5 ** (step / 10)


RATES: dict[str, tuple[Callable[[], Any], Callable[[int], float]]] = {
    "number": (lambda: BASE, lambda _: BASE),
    "function": (lambda: lambda: BASE, lambda _: BASE),
    "schedule": (lambda: SCHEDULES.ExponentialDecay(BASE, 10, 0.5), halving),
}
"""What a user gives, and the rate of a step by it."""


def compiled(optimizer: keras.optimizers.Optimizer) -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1, use_bias=False)])
    model.compile(optimizer=optimizer, loss="mse")
    return model


def scaled_by(rule: Literal["none", "linear", "sqrt"]) -> tuple[TrainConfig, ResolvedTraining]:
    """The settings of a global batch of 16 times `batch_size`."""
    config = TrainConfig(batch_size=8, accumulate=4, replicas=4, scale_lr=rule)
    return config, resolve(config, AutoInputs(devices=CPU, rows=1000, string_features=False))


def rate_after(optimizer: Any, steps: int) -> float:
    optimizer.iterations.assign(steps)
    return float(tf.convert_to_tensor(optimizer.learning_rate))


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 16.0), ("sqrt", 4.0)])
@pytest.mark.parametrize("kind", RATES)
def test_the_rate_of_every_step_is_the_users_times_the_factor(
    kind: str, rule: Literal["none", "linear", "sqrt"], factor: float
) -> None:
    given, expected = RATES[kind]
    model = compiled(keras.optimizers.SGD(given()))

    prepare_optimizer(model, *scaled_by(rule))

    for step in (0, 1, 10, 25):
        assert rate_after(model.optimizer, step) == pytest.approx(factor * expected(step))


@pytest.mark.parametrize("kind", RATES)
def test_an_update_goes_as_far_as_the_scaled_rate_says(kind: str) -> None:
    model = compiled(keras.optimizers.SGD(RATES[kind][0]()))
    prepare_optimizer(model, *scaled_by("linear"))
    [kernel] = model.trainable_variables
    before = kernel.numpy()

    model.optimizer.apply([tf.ones((2, 1))], [kernel])

    np.testing.assert_allclose(before - kernel.numpy(), 16 * BASE, rtol=1e-5)


@pytest.mark.parametrize("kind", RATES)
def test_the_rate_inside_a_loss_scale_optimizer_is_scaled_too(kind: str) -> None:
    inner = keras.optimizers.SGD(RATES[kind][0]())
    model = compiled(keras.mixed_precision.LossScaleOptimizer(inner))

    prepare_optimizer(model, *scaled_by("sqrt"))

    assert float(tf.convert_to_tensor(inner.learning_rate)) == pytest.approx(4 * BASE)


def test_a_scaled_schedule_that_keras_saved_is_the_same_again() -> None:
    """As if a callback saved the complete model."""
    model = compiled(keras.optimizers.SGD(RATES["schedule"][0]()))
    prepare_optimizer(model, *scaled_by("linear"))

    saved = keras.optimizers.serialize(model.optimizer)
    again = keras.optimizers.deserialize(saved)

    assert rate_after(again, 10) == pytest.approx(16 * halving(10))


@pytest.mark.parametrize("set_in", ["stoker", "keras"])
def test_an_average_is_momentum_times_it_and_the_rest_of_the_weight(set_in: str) -> None:
    momentum, gradient = 0.75, tf.constant([[1.0], [-2.0]])
    of_keras = {"use_ema": True, "ema_momentum": momentum} if set_in == "keras" else {}
    model = compiled(keras.optimizers.SGD(BASE, **of_keras))
    config = TrainConfig(batch_size=8, ema=momentum if set_in == "stoker" else None)
    resolved = resolve(config, AutoInputs(devices=CPU, rows=1000, string_features=False))
    average = prepare_optimizer(model, config, resolved)
    assert average is not None
    [kernel] = model.trainable_variables
    expected = kernel.numpy()

    for _ in range(5):
        model.optimizer.apply([gradient], [kernel])
        average.update()
        expected = momentum * expected + (1 - momentum) * kernel.numpy()

    np.testing.assert_allclose(average.variables[0].numpy(), expected, rtol=1e-5)
    weights = kernel.numpy()
    with average.in_place():
        np.testing.assert_allclose(kernel.numpy(), expected, rtol=1e-5)
    np.testing.assert_array_equal(kernel.numpy(), weights)


def test_an_average_is_that_of_kerass_use_ema_but_for_where_it_begins() -> None:
    """Keras's begins at the weights after the first step, ours at those before it."""
    momentum, steps = 0.9, 6
    theirs = compiled(keras.optimizers.Adam(BASE, use_ema=True, ema_momentum=momentum))
    ours = compiled(keras.optimizers.Adam(BASE))
    ours.set_weights(theirs.get_weights())
    config = TrainConfig(batch_size=8, ema=momentum)
    resolved = resolve(config, AutoInputs(devices=CPU, rows=1000, string_features=False))
    average = prepare_optimizer(ours, config, resolved)
    assert average is not None
    weights = ours.get_weights()

    for step in range(steps):
        gradient = tf.constant([[1.0 + step], [3.0 - step]])
        theirs.optimizer.apply([gradient], theirs.trainable_variables)
        ours.optimizer.apply([gradient], ours.trainable_variables)
        average.update()
        weights += ours.get_weights()

    theirs.optimizer.finalize_variable_values(theirs.trainable_variables)
    [of_keras] = theirs.get_weights()
    begun_apart = momentum**steps * (weights[0] - weights[1])
    np.testing.assert_allclose(average.variables[0].numpy(), of_keras + begun_apart, rtol=1e-5)
