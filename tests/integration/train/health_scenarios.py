"""A process of its own: two logical devices, memory that is measured, and memory that runs out.

Prints one JSON: what each scenario saw. Those in which XLA compiles run with `--all` alone.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from stoker.core.errors import ConfigError
from stoker.internals.tensorflow_internals import collected_nodes
from stoker.train.health.degradation import check_idle_devices, check_scope
from stoker.train.health.layers import first_bad_values
from stoker.train.health.step_operations import check_placement
from stoker.train.model.remat import rematerialize
from stoker.train.setup.device_settings import _before_tensorflow_begins
from stoker.train.step.oom import Split, is_out_of_memory, reduce_batch

WIDTH = 128
KINDS = ("remat", "plain")


class Block(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Holds all that a second run could spoil: BatchNorm, Dropout, a loss of its own."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.norm = layers.BatchNormalization()
        self.up = layers.Dense(4 * WIDTH, activation="gelu", kernel_regularizer="l2")
        self.down = layers.Dense(WIDTH, activity_regularizer=keras.regularizers.L2(1e-3))
        self.drop = layers.Dropout(0.3, seed=3)

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.up.build(shape)
        self.down.build((*shape[:-1], 4 * WIDTH))

    def call(self, x: Any) -> Any:
        return x + self.drop(self.down(self.up(self.norm(x))))


def stacked(*, remat: bool, blocks: int = 4) -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((WIDTH,))
    for index in range(blocks):
        x = Block(name=f"block{index}")(x)
    model = keras.Model(inputs, layers.Dense(1)(x))
    model.compile("sgd", "mse")
    if remat:
        rematerialize(model, ["block*"])
    return model


def forward_backward(model: keras.Model) -> Any:
    def run(x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(x=x, y=y, y_pred=model(x, training=True))
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    return run


def status_mb(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def peak_mb(*, xla: bool, remat: bool) -> float:
    """What a first step takes at its peak, in a process that has done none before.

    Later ones would take what this one has left: TensorFlow does not give all of it back.
    """
    rows = 16384
    x = tf.constant(np.random.default_rng(0).normal(size=(rows, WIDTH)), tf.float32)
    y = tf.ones((rows, 1))
    model = stacked(remat=remat)
    model.compute_loss(x=x[:8], y=y[:8], y_pred=model(x[:8]))
    step = tf.function(forward_backward(model), jit_compile=xla)
    before = status_mb("VmRSS")
    step(x, y)
    return status_mb("VmHWM") - before


def remat_memory(modes: tuple[str, ...]) -> dict[str, Any]:
    """Each in a fork of this process, which has imported TensorFlow and run nothing."""
    return {
        mode: {kind: in_a_fork(xla=mode == "xla", remat=kind == "remat") for kind in KINDS}
        for mode in modes
    }


def in_a_fork(**how: bool) -> float:
    """What `peak_mb` gives there."""
    from_child, to_parent = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(to_parent, json.dumps(peak_mb(**how)).encode())
        os._exit(0)
    os.close(to_parent)
    with os.fdopen(from_child) as answer:
        said = answer.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return float(said)


def remat_on_two() -> dict[str, Any]:
    """Gradients and state on both replicas, with and without."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    x = tf.constant(np.random.default_rng(0).normal(size=(32, WIDTH)), tf.float32)
    y = tf.ones((32, 1))
    runs = []
    for remat in (False, True):
        with strategy.scope():
            model = stacked(remat=remat, blocks=2)
            model.compute_loss(x=x, y=y, y_pred=model(x))
        inner = tf.function(forward_backward(model), jit_compile=True)

        @tf.function
        def step(x: tf.Tensor, y: tf.Tensor, inner: Any = inner) -> Any:
            def one(x: tf.Tensor, y: tf.Tensor) -> Any:
                return tf.distribute.get_replica_context().all_reduce("SUM", inner(x, y))

            return strategy.run(one, (x, y))

        gradients = [part.numpy() for g in step(x, y) for part in g.values]
        state = [part.numpy() for v in model.non_trainable_variables for part in v.value.values]
        runs.append([*gradients, *state])
    return {"equal": all(np.array_equal(a, b) for a, b in zip(*runs, strict=True))}


def devices() -> dict[str, Any]:
    one = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    names = [device.name for device in tf.config.list_logical_devices("CPU")]
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        both = keras.Sequential([keras.Input((4,)), layers.Dense(2)])
    idle = check_idle_devices(one.variables, names)
    outside = check_scope([*both.variables, *one.variables], strategy)
    return {
        "idle": idle.message if idle else None,
        "used": check_idle_devices(both.variables, names) is None,
        "outside": outside.message if outside else None,
        "inside": check_scope(both.variables, strategy) is None,
    }


def bad_on_two() -> dict[str, Any]:
    """The first bad values of a mirrored model, read outside of any replica."""
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        x = layers.BatchNormalization()(layers.Dense(4, name="first")(inputs))
        model = keras.Model(inputs, layers.Dense(1)(layers.ReLU(name="root")(x)))
        model.get_layer("root").call = lambda x: ops.sqrt(ops.relu(x))
        model.compile("sgd", "mse")
        batch = (tf.random.stateless_normal((8, 4), seed=(1, 2)), tf.ones((8, 1)))
        model.compute_loss(x=batch[0], y=batch[1], y_pred=model(batch[0]))
    found = first_bad_values(model, batch, adapt=lambda given: given)
    return {"place": found.place, "name": found.name} if found else {}


class OnHost(layers.Layer):  # type: ignore[misc]  # Keras has no types
    def call(self, x: Any) -> Any:
        with tf.device("/CPU:0"):
            return ops.sin(x)


def placed(inner: layers.Layer) -> str | None:
    """The second logical CPU plays the accelerator: a loop of steps on it, as ours is."""
    with tf.device("/CPU:1"):
        model = keras.Sequential([keras.Input((4,)), layers.Dense(4), inner, layers.Dense(1)])

    @tf.function
    def run(x: tf.Tensor, steps: tf.Tensor) -> tf.Tensor:
        total = tf.constant(0.0)
        for _ in tf.range(steps):  # type: ignore[attr-defined]  # AutoGraph iterates over the tensor
            with tf.device("/CPU:1"):
                total += tf.reduce_sum(model(x, training=True))
        return total

    with collected_nodes() as nodes:
        run(tf.ones((8, 4)), tf.constant(1))
    found = check_placement(nodes, accelerator="CPU:1")
    return found.message if found else None


def too_late() -> str:
    # This machine has no GPU, and the refusal is the same for every device.
    cpus = tf.config.list_physical_devices("CPU")
    try:
        _before_tensorflow_begins(tf.config.set_visible_devices, [], "CPU")
    except ConfigError as error:
        assert tf.config.get_visible_devices("CPU") == cpus
        return error.line()
    return "nothing was refused"


def out_of_memory(*, xla: bool, rows: int, room_mb: int) -> dict[str, Any]:
    """Under a limit on address space, the step is halved until it fits, as the loop does.

    `room_mb` must leave room for more than the tensors: if other allocations fail, C++ ends the
    process.
    """
    weights = tf.Variable(tf.random.stateless_normal((4, 8192), seed=(1, 2)))

    @tf.function(jit_compile=xla, reduce_retracing=True)
    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(tf.matmul(x, weights)))
        return tape.gradient(loss, weights)

    def summed(passes: int) -> Any:
        return sum(gradient(part).numpy() for part in tf.split(x, passes))

    x = tf.random.stateless_normal((rows, 4), seed=(3, 4))
    reference: Any = None if xla else summed(32)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (room_mb << 20), limit[1]))
    split, said, close = Split(batch_size=rows, accumulate=1), [], None
    try:
        while close is None:
            try:
                close = bool(np.allclose(summed(split.accumulate), reference, rtol=1e-3, atol=1.0))
            except (tf.errors.OpError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reduction = reduce_batch(split, error)
                split = reduction.after
                said.append(reduction.message)
                if xla:
                    # Compiling again for each smaller size would take long and show no more.
                    break
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    return {"said": said, "rows": split.batch_size * split.accumulate, "close": close}


def main() -> None:
    with_xla = "--all" in sys.argv
    # First: TensorFlow has not begun its threads, which no fork has.
    remat = remat_memory(("graph", "xla") if with_xla else ("graph",))
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    seen = {
        "devices": devices(),
        "bad on two": bad_on_two(),
        "on host": placed(OnHost(name="on_host")),
        "all on it": placed(layers.Activation("tanh")),
        "too late": too_late(),
        "remat": remat,
        "oom": out_of_memory(xla=False, rows=2**15, room_mb=1024 + 384),
    }
    if with_xla:
        seen["remat on two"] = remat_on_two()
        seen["oom xla"] = out_of_memory(xla=True, rows=2**20, room_mb=8192)
    json.dump(seen, sys.stdout)


if __name__ == "__main__":
    main()
