"""A training that times its own steps: `steps.py fit|loop STEPS`; prints one line of JSON.

It knows nothing of Stoker. What it prints are marks: [steps by now, wall clock, CPU time], seconds.
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


EVERY = 500
"""Steps between two marks."""

Marks = list[tuple[int, float, float]]

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def mark(steps: int) -> tuple[int, float, float]:
    """So many steps are done; of a clock that all processes have."""
    return steps, time.monotonic(), time.process_time()


def by_fit(steps: int) -> Marks:
    """A mark at the end of every epoch."""
    marks: Marks = []

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        """Has no hook for batches, as most scripts have none."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            del logs
            marks.append(mark((epoch + 1) * EVERY))

    net = model()
    net.compile("sgd", LOSS)
    epochs = steps // EVERY
    net.fit(dataset(), steps_per_epoch=EVERY, epochs=epochs, verbose=0, callbacks=[Clock()])
    return marks


def by_loop(steps: int) -> Marks:
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

    marks: Marks = []
    for number, (x, y) in enumerate(dataset().take(steps)):
        if number % EVERY == 0:
            marks.append(mark(number))
        train_step(x, y)
    return marks


def main() -> None:
    """Train, and print the marks."""
    kind, steps = sys.argv[1], int(sys.argv[2])
    sys.stdout.write(json.dumps({"fit": by_fit, "loop": by_loop}[kind](steps)) + "\n")


if __name__ == "__main__":
    main()
