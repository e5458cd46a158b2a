"""A training that times its own steps: `steps.py fit|loop STEPS`; prints one line of JSON.

It knows nothing of Stoker. The first half of its steps is left out: they hold tracing, and under a
profile also the windows on a resident batch, which the profile books by itself.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

ROWS, COLUMNS = 64, 128

WIDTH = 256
"""Of the hidden layers: a step of about a millisecond, for which a watcher is dear."""


def model() -> Any:
    """A small perceptron."""
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((COLUMNS,)), *layers, keras.layers.Dense(10)])


def dataset() -> tf.data.Dataset:
    """Batches that are there already."""
    random = np.random.default_rng(0)
    x = random.random((ROWS, COLUMNS), dtype="float32")
    y = random.integers(0, 10, ROWS)
    return tf.data.Dataset.from_tensors((x, y)).repeat().prefetch(2)


LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def now() -> tuple[float, float]:
    """Wall clock and CPU time, seconds."""
    return time.perf_counter(), time.process_time()


def by_fit(steps: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """Two epochs; the second one is timed from its begin to its end."""
    times = []

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        """Has no hook for batches, as most scripts have none."""

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            del epoch, logs
            times.append(now())

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            del epoch, logs
            times.append(now())

    net = model()
    net.compile("sgd", LOSS)
    net.fit(dataset(), steps_per_epoch=steps // 2, epochs=2, verbose=0, callbacks=[Clock()])
    return times[2], times[3]


def by_loop(steps: int) -> tuple[tuple[float, float], tuple[float, float]]:
    """A loop with a tf.function for the step."""
    net, optimizer = model(), keras.optimizers.SGD()
    optimizer.build(net.trainable_variables)

    @tf.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = LOSS(y, net(x, training=True))
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply(gradients, net.trainable_variables)
        return loss

    begun = now()
    for number, (x, y) in enumerate(dataset().take(steps)):
        if number == steps // 2:
            begun = now()
        loss = train_step(x, y)
    loss.numpy()
    return begun, now()


def main() -> None:
    """Train, and print seconds a step."""
    kind, steps = sys.argv[1], int(sys.argv[2])
    begun, ended = {"fit": by_fit, "loop": by_loop}[kind](steps)
    timed = steps - steps // 2 if kind == "loop" else steps // 2
    wall_s, cpu_s = ((after - before) / timed for before, after in zip(begun, ended, strict=True))
    sys.stdout.write(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s}) + "\n")


if __name__ == "__main__":
    main()
