"""A loss scale on the device does what Keras's LossScaleOptimizer does, and asks the host for nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.framework import kernels as registered

from stoker.core.config import build
from stoker.core.errors import ConfigError
from stoker.train.config import TrainConfig
from stoker.train.optimizer.ema import WeightAverage
from stoker.train.optimizer.fused_kernels import fuse
from stoker.train.optimizer.loss_scaling import (
    DeviceLossScale,
    prepare_loss_scale,
    scales_on_device,
)
from stoker.train.optimizer.masked_assign import assign_condition, masked_assign

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "adamw, clipped by norm": lambda: keras.optimizers.AdamW(
        0.05, weight_decay=0.1, global_clipnorm=1.0
    ),
    "rmsprop, clipped by value": lambda: keras.optimizers.RMSprop(0.05, clipvalue=0.5),
    "nadam": lambda: keras.optimizers.Nadam(0.05),
}

STEPS = 200
"""With an overflow in about one of twelve."""


def weights_of() -> list[Any]:
    """A matrix that Adam's kernel supports on a CPU too, a bias, and a table of rows."""
    rng = np.random.default_rng(0)
    shapes = (5, 3), (3,), (6, 2)
    return [keras.Variable(rng.normal(size=shape).astype("float32")) for shape in shapes]


def gradients_of(rng: np.random.Generator) -> list[Any]:
    """Of a scaled loss; some are not finite."""
    gradients = [100 * rng.normal(size=shape).astype("float32") for shape in ((5, 3), (3,), (2, 2))]
    if rng.random() < 1 / 12:
        gradients[rng.integers(3)].flat[0] = rng.choice([np.inf, -np.inf, np.nan])
    return gradients


Apply = Callable[[list[Any], list[Any]], None]


def trained(
    inner: Any, *, on_device: bool, xla: bool = False, fused: bool = False
) -> list[list[Any]]:
    """All variables after every twentieth step."""
    weights = weights_of()
    optimizer = keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=2.0**7, dynamic_growth_steps=5
    )
    optimizer.build(weights)
    fuse(optimizer, wanted=fused)
    apply: Apply = DeviceLossScale(optimizer).apply if on_device else optimizer.apply

    @tf.function(jit_compile=xla)
    def step(*gradients: tf.Tensor) -> None:
        table: Any = tf.IndexedSlices(gradients[2], tf.constant([4, 1]), tf.constant([6, 2]))
        if xla:
            table = tf.math.unsorted_segment_sum(table.values, table.indices, 6)
        apply([*gradients[:2], table], weights)

    rng, seen = np.random.default_rng(1), []
    for number in range(STEPS):
        step(*gradients_of(rng))
        if number % 20 == 19:
            seen.append([v.numpy() for v in [*weights, *optimizer.variables]])
    return seen


@pytest.mark.parametrize(
    ("name", "xla"), [*((name, False) for name in OPTIMIZERS), ("sgd", True), ("adam", True)]
)
def test_200_steps_with_overflows_lead_where_kerass_lead(name: str, xla: bool) -> None:
    ours = trained(OPTIMIZERS[name](), on_device=True, xla=xla)
    theirs = trained(OPTIMIZERS[name](), on_device=False)

    for our, their in zip(ours, theirs, strict=True):
        counters = [one for one in our if one.dtype == np.int64]
        assert counters == [one for one in their if one.dtype == np.int64]
        for one, other in zip(our, their, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)
    updates = counters[-1]
    assert 0 < updates < STEPS, "some were left out"


def test_adams_one_kernel_leaves_out_what_kerass_operations_leave_out() -> None:
    ours = trained(OPTIMIZERS["adam"](), on_device=True, fused=True)
    theirs = trained(OPTIMIZERS["adam"](), on_device=False)

    for our, their in zip(ours, theirs, strict=True):
        for one, other in zip(our, their, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-3, atol=2e-4)


def scaled_by(
    inner: Any, *, scale: float = 8.0, growth: int = 2000, average: bool = False
) -> tuple[Callable[..., None], list[Any], Any]:
    """A traced update by Adam's kernel or the optimizer, its variables, and the optimizer."""
    weights = weights_of()
    optimizer = keras.optimizers.LossScaleOptimizer(
        inner, initial_scale=scale, dynamic_growth_steps=growth
    )
    optimizer.build(weights)
    fuse(optimizer, wanted=True)
    kept = WeightAverage(weights, momentum=0.5) if average else None
    apply = DeviceLossScale(optimizer).apply

    @tf.function
    def step(*gradients: tf.Tensor) -> None:
        table: Any = tf.IndexedSlices(gradients[2], tf.constant([4, 1]), tf.constant([6, 2]))
        apply([*gradients[:2], table], weights, kept)

    held = [*weights, *optimizer.inner_optimizer.variables]
    return step, [*held, *(kept.variables if kept else ())], optimizer


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", [0, 1, 2], ids=["matrix", "bias", "rows"])
@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_an_overflow_changes_no_bit_but_the_scale(name: str, where: int, bad: float) -> None:
    step, held, optimizer = scaled_by(OPTIMIZERS[name](), average=True)
    good = [np.ones(shape, "float32") for shape in ((5, 3), (3,), (2, 2))]
    step(*good)
    before = [each.numpy() for each in held]
    good[where].flat[-1] = bad
    step(*good)

    for one, other in zip(before, [each.numpy() for each in held], strict=True):
        np.testing.assert_array_equal(one, other)
    assert float(optimizer.dynamic_scale.numpy()) == 4.0
    assert int(optimizer.step_counter.numpy()) == 0


def ones() -> list[Any]:
    return [np.ones(shape, "float32") for shape in ((5, 3), (3,), (2, 2))]


def test_a_scale_does_not_grow_to_infinity() -> None:
    step, held, optimizer = scaled_by(OPTIMIZERS["sgd"](), scale=2.0**127, growth=1)
    step(*ones())

    assert float(optimizer.dynamic_scale.numpy()) == 2.0**127
    assert all(np.isfinite(each.numpy()).all() for each in held)


def test_a_scale_that_has_become_zero_makes_no_update() -> None:
    step, held, optimizer = scaled_by(OPTIMIZERS["adam"]())
    optimizer.dynamic_scale.assign(0.0)
    before = [each.numpy() for each in held]
    step(*(0 * one for one in ones()))

    for one, other in zip(before, [each.numpy() for each in held], strict=True):
        np.testing.assert_array_equal(one, other)


HOST_READS = {
    "If",
    "StatelessIf",
    "While",
    "StatelessWhile",
    "Switch",
    "Case",
    "PyFunc",
    "EagerPyFunc",
}
"""Operations for which the host waits for a number that the device has computed, or that are the host's."""


def kernel_on_gpu(operation: tf.Operation) -> Any:
    """The kernel that TensorFlow would run on a GPU; None if it has none."""
    table: Any = registered
    for kernel in table.get_registered_kernels_for_op(operation.type).kernel:
        fits = all(
            tf.as_dtype(operation.get_attr(each.name)).as_datatype_enum
            in each.allowed_values.list.type
            for each in kernel.constraint
        )
        if fits and kernel.device_type in ("GPU", "DEFAULT"):
            return kernel
    return None


def runs_on_gpu(operation: tf.Operation, computed: set[int]) -> bool:
    """Whether it runs there, and reads nothing from the host that the device has computed.

    Args:
        operation: Of a traced graph.
        computed: Ids of the tensors that the device computes.
    """
    kernel = kernel_on_gpu(operation)
    if kernel is None:
        return False
    names = [each.name for each in operation.op_def.input_arg]
    return not any(
        id(each) in computed and name in kernel.host_memory_arg and each.dtype != tf.resource
        # The inputs of AddN are one argument.
        for name, each in zip(names * len(operation.inputs), operation.inputs, strict=False)
    )


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_update_asks_the_host_for_nothing(name: str) -> None:
    """Not run on a GPU: TensorFlow's kernel registry shows where each operation would run."""
    step, _, _ = scaled_by(OPTIMIZERS[name]())
    traced: Any = step
    graph = traced.get_concrete_function(*map(tf.constant, ones())).graph
    operations = graph.get_operations()
    computed = {id(each) for each in graph.inputs[:3]}
    slow = set()
    for operation in operations:
        reads = any(id(each) in computed for each in operation.inputs)
        if reads or operation.type == "ReadVariableOp":
            computed.update(id(each) for each in operation.outputs)
            if not runs_on_gpu(operation, computed):
                slow.add(operation.type)

    assert not HOST_READS & {each.type for each in operations}
    assert len(computed) > 20
    assert slow <= {"Identity"}, slow


def test_kerass_own_update_does_ask_the_host() -> None:
    weights = weights_of()
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    optimizer.build(weights)
    update = tf.function(lambda: optimizer.apply([tf.ones(v.shape) for v in weights], weights))
    graph = update.get_concrete_function().graph

    assert HOST_READS & {each.type for each in graph.get_operations()}


def compiled(optimizer: Any) -> keras.Model:
    model = keras.Sequential(
        [
            keras.Input((2,), dtype="int32"),
            keras.layers.Embedding(5, 3),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
    )
    model.compile(optimizer=optimizer, loss="mse")
    return model


def three_steps(model: keras.Model) -> list[Any]:
    model.optimizer.build(model.trainable_variables)
    x, y = tf.constant([[0, 1], [4, 4]]), tf.constant([[1.0], [0.0]])

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            scaled = model.optimizer.scale_loss(model.compute_loss(x, y, model(x)))
        values = [each.value for each in model.trainable_variables]
        model.optimizer.apply(tape.gradient(scaled, values), model.trainable_variables)

    for _ in range(3):
        step()
    return [each.numpy() for each in model.trainable_variables]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_fixed_scale_changes_nothing_but_the_range(wrapped: bool) -> None:
    def trained_by(scale: float | None) -> list[Any]:
        keras.utils.set_random_seed(1)
        optimizer = keras.optimizers.SGD(0.1)
        model = compiled(keras.optimizers.LossScaleOptimizer(optimizer) if wrapped else optimizer)
        if scale is not None:
            prepare_loss_scale(model, TrainConfig(loss_scale=scale))
            assert model.optimizer is optimizer
            assert float(model.optimizer.scale_loss(tf.constant(1.0))) == scale
        return three_steps(model)

    for one, other in zip(trained_by(128.0), trained_by(None), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_dynamic_wraps_what_was_compiled_and_auto_leaves_it() -> None:
    model = compiled(keras.optimizers.SGD())
    prepare_loss_scale(model, TrainConfig())
    assert not scales_on_device(model, replicas=1)
    prepare_loss_scale(model, TrainConfig(loss_scale="dynamic"))
    wrapped = model.optimizer
    prepare_loss_scale(model, TrainConfig(loss_scale="dynamic"))

    assert model.optimizer is wrapped
    assert scales_on_device(model, replicas=1)
    assert not scales_on_device(model, replicas=2)


class Own(keras.optimizers.SGD):  # type: ignore[misc]  # Keras has no types
    """A user-defined optimizer, which may write to variables that Stoker does not see."""


def test_an_optimizer_of_somebodys_own_keeps_kerass_condition() -> None:
    model = compiled(keras.optimizers.LossScaleOptimizer(Own()))

    assert not scales_on_device(model, replicas=1)


@pytest.mark.parametrize("wrong", [0.5, 0.0, -128.0, 2.0**25, float("nan"), float("inf")])
def test_a_scale_that_cannot_be_is_refused(wrong: float) -> None:
    with pytest.raises(ConfigError, match=r"train\.loss_scale must be from 1"):
        TrainConfig(loss_scale=wrong)


@pytest.mark.parametrize("given", ["auto", "dynamic", 128, 1024.0])
def test_it_is_read_from_a_file(given: Any) -> None:
    assert build(TrainConfig, {"loss_scale": given}).loss_scale == given


def test_one_condition_inside_of_another_needs_both() -> None:
    variable, table = tf.Variable(tf.constant(0.0)), tf.Variable(tf.zeros([3, 1]))
    rows = tf.IndexedSlices(tf.ones([2, 1]), tf.constant([0, 2]))

    @tf.function
    def write(outer: tf.Tensor, inner: tf.Tensor) -> None:
        with masked_assign(outer, [variable, table]):
            with masked_assign(inner, [variable, table]):
                variable.assign_add(1.0)
                table.scatter_update(rows)
            variable.assign_add(10.0)
            table.scatter_sub(rows)

    for outer, inner, expected in (
        (False, False, 0.0),
        (False, True, 0.0),
        (True, False, 10.0),
        (True, True, 11.0),
    ):
        variable.assign(0.0)
        table.assign(tf.ones([3, 1]))
        write(tf.constant(outer), tf.constant(inner))
        assert float(variable.numpy()) == expected
        row = 0.0 if outer else 1.0
        np.testing.assert_array_equal(table.numpy(), [[row], [1.0], [row]])
    assert assign_condition() is None
    assert not {"assign", "scatter_add"} & set(vars(variable))


def test_the_only_replica_of_a_strategy_is_held_back_too() -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        weights = weights_of()
        optimizer = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(0.05), initial_scale=8.0
        )
        optimizer.build(weights)
    apply = partial(DeviceLossScale(optimizer).apply, variables=weights)

    @tf.function
    def step(bad: tf.Tensor) -> None:
        strategy.run(lambda: apply([v.value * bad for v in weights]))

    before = [v.numpy() for v in [*weights, *optimizer.inner_optimizer.variables]]
    step(tf.constant(np.inf, tf.float32))
    after = [v.numpy() for v in [*weights, *optimizer.inner_optimizer.variables]]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    assert float(optimizer.dynamic_scale.numpy()) == 4.0
    step(tf.constant(1.0))
    assert int(optimizer.iterations.numpy()) == 1
