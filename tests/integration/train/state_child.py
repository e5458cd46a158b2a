"""Trains on two replicas, goes back to a captured state with a new model, and says what came out.

`state_child.py mirrored` holds both replicas on two logical devices; with `TF_CONFIG` in the
environment, `state_child.py workers` is one of two processes.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from stoker.train.checkpoints.seeds import host_seeds, restore_host_seeds, use_keras_seeds
from stoker.train.checkpoints.state import ROWS, TrainingState

BATCH = 6
Arrays = Mapping[str, np.ndarray]


class Noise(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Draws without a seed, so from Keras's own generator."""

    def call(self, inputs: Any) -> Any:
        return inputs + 0.1 * keras.random.normal(keras.ops.shape(inputs))


class Run:
    """A model, its state and a step on whatever strategy there is."""

    def __init__(self, strategy: tf.distribute.Strategy, *, seed: int) -> None:
        keras.backend.clear_session()
        keras.utils.set_random_seed(seed)
        self.strategy = strategy
        with strategy.scope():
            inputs = keras.Input((4,))
            hidden = keras.layers.BatchNormalization()(keras.layers.Dense(7)(inputs))
            hidden = Noise()(keras.layers.Dropout(0.3)(hidden))
            self.model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))
            self.model.compile(optimizer, "mse", metrics=["mae"])
            self.model.optimizer.build(self.model.trainable_variables)
            self.model.compute_metrics(None, tf.zeros((2, 1)), tf.zeros((2, 1)), None)
            self.loss_sum = tf.Variable(
                tf.constant(0.0),
                name="loss_sum",
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )
        self.state = TrainingState(self.model, extras={"loop": [self.loss_sum]})
        self._step = tf.function(self._on_all)

    def steps(self, begin: int, end: int) -> None:
        for number in range(begin, end):
            self._step(tf.constant(number, tf.int32))

    def _on_all(self, number: tf.Tensor) -> None:
        self.strategy.run(self._on_one, (number,))

    def _on_one(self, number: tf.Tensor) -> None:
        use_keras_seeds(self.state.seeds)
        context = tf.distribute.get_replica_context()
        replica = tf.cast(tf.identity(context.replica_id_in_sync_group), tf.int32)
        x = tf.random.stateless_normal((BATCH, 4), tf.stack([number, replica]))
        y = tf.reduce_sum(x, axis=1, keepdims=True)
        with tf.GradientTape() as tape:
            answers = self.model(x, training=True)
            loss = self.model.compute_loss(x, y, answers)
            scaled = self.model.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, [v.value for v in self.model.trainable_variables])
        gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        self.model.optimizer.apply(gradients, self.model.trainable_variables)
        self.model.compute_metrics(x, y, answers, None)
        self.loss_sum.assign_add(loss)


def digest(arrays: Arrays) -> str:
    """One hash over all names and bits."""
    made = hashlib.sha256()
    for name in sorted(arrays):
        made.update(name.encode() + b"\0" + arrays[name].tobytes())
    return made.hexdigest()


def again(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """What an uninterrupted run and one that was put back into a new model end with."""
    run = Run(strategy, seed=1)
    run.steps(0, 3)
    captured, seeds = run.state.capture(), host_seeds()
    sums = float(run.loss_sum.read_value())
    run.steps(3, 6)
    drawn = random.random()
    straight = run.state.capture()

    other = Run(strategy, seed=2)
    other.steps(0, 1)
    other.state.restore(captured)
    restore_host_seeds(seeds)
    sums_again = float(other.loss_sum.read_value())
    other.steps(3, 6)
    return {
        "straight": digest(straight),
        "again": digest(other.state.capture()),
        "sums": [sums, sums_again],
        "drawn": [drawn, random.random()],
        "differ": sorted(name for name in captured if name.endswith(ROWS)),
        "rows": {name: len(rows) for name, rows in captured.items() if name.endswith(ROWS)},
        "changed": digest(captured) != digest(straight),
        "total": float(sum(captured["loop/loss_sum" + ROWS])),
    }


def main() -> None:
    if sys.argv[1] == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * 2
        )
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    else:
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    print("RESULT", json.dumps(again(strategy)), flush=True)


if __name__ == "__main__":
    main()
