"""Adam in one kernel computes the same as Keras's operations, and replaces only them."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from stoker.train.optimizer.fused_kernels import fuse

SCHEDULE = {"initial_learning_rate": 0.1, "decay_steps": 3, "decay_rate": 0.5}

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.05),
    "adamw, clipped": lambda: keras.optimizers.AdamW(0.05, weight_decay=0.1, global_clipnorm=1.0),
    "adam, another form": lambda: keras.optimizers.Adam(
        keras.optimizers.schedules.ExponentialDecay(**SCHEDULE), beta_1=0.5, epsilon=1e-2
    ),
    "adam, scaled loss": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05), initial_scale=8.0
    ),
    "adam, amsgrad": lambda: keras.optimizers.Adam(0.05, amsgrad=True),
}


def trained(make: Any, *, wanted: bool, spoilt: float = 0.0) -> tuple[list[Any], set[str]]:
    """Weights and slots after some steps, and the kernels that made them."""
    rng = np.random.default_rng(0)
    weights = [keras.Variable(rng.normal(size=shape).astype("float32")) for shape in ((5, 3), (3,))]
    table = keras.Variable(rng.normal(size=(6, 2)).astype("float32"))
    optimizer = make()
    optimizer.build([*weights, table])
    fuse(optimizer, wanted=wanted)

    @tf.function
    def step(*gradients: tf.Tensor) -> None:
        rows = tf.IndexedSlices(gradients[2], tf.constant([4, 1]), tf.constant([6, 2]))
        optimizer.apply([*gradients[:2], rows], [*weights, table])

    for number in range(5):
        gradients = [rng.normal(size=shape).astype("float32") for shape in ((5, 3), (3,), (2, 2))]
        gradients[0] += spoilt if number == 2 else 0.0
        step(*gradients)
    graph = step.get_concrete_function(*map(tf.constant, gradients)).graph
    kernels = {o.type for g in (graph, *functions_of(graph)) for o in g.get_operations()}
    return [v.numpy() for v in [*weights, table, *optimizer.variables]], kernels


def functions_of(graph: Any) -> list[Any]:
    """Bodies of the conditions in it."""
    return [definition.graph for definition in graph._functions.values()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_it_leads_where_kerass_operations_lead(name: str) -> None:
    ours, kernels = trained(OPTIMIZERS[name], wanted=True)
    theirs, plain = trained(OPTIMIZERS[name], wanted=False)

    assert "ResourceApplyAdam" not in plain
    if name != "adam, scaled loss":  # inside of a condition, whose body is a function of its own
        assert ("ResourceApplyAdam" in kernels) == ("amsgrad" not in name)
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=2e-5)


def test_what_is_not_finite_stays_to_be_seen() -> None:
    ours, _ = trained(OPTIMIZERS["adam"], wanted=True, spoilt=np.nan)

    assert np.isnan(ours[0]).all()


@pytest.mark.parametrize("form", ["twice in a step", "weight by weight"])
def test_what_weights_share_is_that_of_their_update(form: str) -> None:
    def end(*, wanted: bool) -> tuple[list[Any], int]:
        weights = [keras.Variable(np.zeros(size, "float32")) for size in (3, 600, 5, 700)]
        optimizer = keras.optimizers.Adam(0.05, beta_1=0.5)
        optimizer.build(weights)
        fuse(optimizer, wanted=wanted)

        @tf.function
        def step(by: tf.Tensor) -> None:
            for sign in (1.0, -0.3):
                gradients = [tf.fill(weight.shape, sign * by) for weight in weights]
                if form == "twice in a step":
                    optimizer.apply(gradients, weights)
                    continue
                for gradient, weight in zip(gradients, weights, strict=True):
                    optimizer.update_step(gradient, weight.value, optimizer.learning_rate)
                optimizer.iterations.assign_add(1)

        for number in range(4):
            step(tf.constant(number + 1.0))
        graph = step.get_concrete_function(tf.constant(1.0)).graph
        powers = [each for each in graph.get_operations() if each.type == "Pow"]
        return [each.numpy() for each in [*weights, *optimizer.variables]], len(powers)

    ours, few = end(wanted=True)
    theirs, many = end(wanted=False)

    assert many == 2 * 2 * 4
    assert few == (2 * 2 if form == "twice in a step" else many)
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=2e-5)


def test_apart_it_rounds_as_keras_does() -> None:
    def end(*, wanted: bool) -> list[Any]:
        weight = keras.Variable(np.linspace(-1, 1, 600).astype("float32"))
        optimizer = keras.optimizers.AdamW(0.05)
        optimizer.build([weight])
        fuse(optimizer, wanted=wanted)
        rng = np.random.default_rng(0)
        for _ in range(20):
            optimizer.apply([tf.constant(rng.normal(size=600).astype("float32"))], [weight])
        return [each.numpy() for each in [weight, *optimizer.variables]]

    for our, their in zip(end(wanted=True), end(wanted=False), strict=True):
        np.testing.assert_array_equal(our, their)


def test_it_can_be_taken_back() -> None:
    optimizer = keras.optimizers.Adam()
    before = optimizer.update_step

    fuse(optimizer, wanted=True)
    assert optimizer.update_step != before
    fuse(optimizer, wanted=False)
    assert optimizer.update_step == before


def test_somebodys_own_adam_is_left_alone() -> None:
    class Own(keras.optimizers.Adam):  # type: ignore[misc]  # Keras has no types
        pass

    optimizer = Own()
    before = optimizer.update_step

    fuse(optimizer, wanted=True)

    assert optimizer.update_step == before


@pytest.mark.parametrize("gpus", [[], ["GPU:0"]])
def test_on_a_cpu_weights_of_middling_size_keep_kerass_operations(
    gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel parts them among threads, and waits for those."""
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: gpus)
    shapes: list[tuple[int, ...]] = [(511,), (64, 8), (200, 199), (200, 200)]
    weights = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    optimizer = keras.optimizers.Adam(0.05)
    optimizer.build(weights)
    fuse(optimizer, wanted=True)

    @tf.function
    def step() -> None:
        optimizer.apply([tf.ones(shape) for shape in shapes], weights)

    step()
    graph = step.get_concrete_function().graph
    kernels = [o for o in graph.get_operations() if o.type == "ResourceApplyAdam"]
    fused_shapes = [tuple(kernel.inputs[-1].shape) for kernel in kernels]
    assert fused_shapes == (shapes if gpus else [(511,), (200, 200)])
    for weight in weights:
        np.testing.assert_allclose(weight.numpy(), -0.05, rtol=1e-4)
