"""A training that times its own steps, by turns with and without the watcher that was put around it.

`stoker profile -- python steps.py fit|loop TURNS STEPS`; prints a line of JSON for each turn: whether it was
watched, and seconds of wall clock and of CPU time.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

ROWS, COLUMNS = 64, 128

WIDTH = 256
"""Of the hidden layers: a step of about a millisecond, for which a watcher is dear."""

WARM_STEPS = 4_000
"""Watched, and not printed: in them the profile takes its own windows."""

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

Times = tuple[float, float]
"""Wall clock and CPU time, seconds."""


def model() -> Any:
    """A small perceptron."""
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((COLUMNS,)), *layers, keras.layers.Dense(10)])


def dataset() -> tf.data.Dataset[Any]:
    """Batches that are there already."""
    random = np.random.default_rng(0)
    x = random.random((ROWS, COLUMNS), dtype="float32")
    y = random.integers(0, 10, ROWS)
    return tf.data.Dataset.from_tensors((x, y)).repeat().prefetch(2)


class Watcher:
    """What stands around names of TensorFlow and Keras, which can be taken away and put back."""

    def __init__(self) -> None:
        """Find it.

        Raises:
            RuntimeError: nothing is watched.
        """
        names = {
            tf.data.Dataset: ["__iter__"],
            type(iter(dataset())): ["__next__", "get_next"],
            type(tf.function(lambda: None)): ["__call__"],
            keras.Model: ["fit"],
        }
        self._places = [
            (owner, name, vars(owner)[name])
            for kind, wanted in names.items()
            for name in wanted
            for owner in kind.__mro__
            if hasattr(vars(owner).get(name), "stoker_original")
        ]
        if len(self._places) < len(names):
            raise RuntimeError(f"not all is watched: {self._places}")

    def put(self, *, back: bool) -> None:
        """Put it back, or what it stands around."""
        for owner, name, watched in self._places:
            setattr(owner, name, watched if back else watched.stoker_original)


def now() -> Times:
    """Of this process."""
    return time.perf_counter(), time.process_time()


def since(begun: Times) -> Times:
    """What has passed."""
    wall_s, cpu_s = now()
    return wall_s - begun[0], cpu_s - begun[1]


class Turns:
    """Turns of so many steps: warm ones, and then each with the watcher or without."""

    def __init__(self, turns: int, steps: int) -> None:
        self.steps = steps
        self.warm = -(-WARM_STEPS // steps)
        self._orders, self._turns, self._begun = order(turns), turns, 0
        self._watcher = Watcher()
        self._watched = True

    def __len__(self) -> int:
        return self.warm + self._turns

    def begin(self) -> bool:
        """Whether the next one is watched; the names are set to it."""
        self._begun += 1
        if self._begun > self.warm:
            self._watched = next(self._orders)
            self._watcher.put(back=self._watched)
        return self._watched

    def end(self, taken: Times) -> None:
        """Print what it took."""
        if self._begun > self.warm:
            sys.stdout.write(json.dumps([self._watched, *taken]) + "\n")
        if self._begun == len(self):
            self._watcher.put(back=True)


def by_fit(turns: Turns) -> None:
    """A turn is an epoch."""
    net, batches = model(), dataset()
    net.compile("sgd", LOSS)

    class Clock(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        """Has no hook for batches, as most scripts have none."""

        def on_train_begin(self, logs: Any = None) -> None:
            del logs
            self.plain, self.watched = self.model.train_function, None
            self.begun = now()

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            del epoch, logs
            # The watcher is installed since all callbacks got the beginning of the training.
            self.watched = self.watched or self.model.train_function
            self.model.train_function = self.watched if turns.begin() else self.plain
            self.begun = now()

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            del epoch, logs
            turns.end(since(self.begun))

        def on_train_end(self, logs: Any = None) -> None:
            del logs
            if self.watched is self.plain:
                raise RuntimeError("the train function is not watched")

    net.fit(batches, steps_per_epoch=turns.steps, epochs=len(turns), verbose=0, callbacks=[Clock()])


def by_loop(turns: Turns) -> None:
    """A turn is a pass of a loop with a tf.function for the step, but for its first step."""
    net, optimizer, batches = model(), keras.optimizers.SGD(), dataset()
    optimizer.build(net.trainable_variables)

    @tf.function
    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = LOSS(y, net(x, training=True))
        gradients = tape.gradient(loss, net.trainable_variables)
        optimizer.apply(gradients, net.trainable_variables)
        return loss

    for _ in range(len(turns)):
        turns.begin()
        begun = now()
        for number, (x, y) in enumerate(batches.take(turns.steps + 1)):
            if number == 1:
                begun = now()
            train_step(x, y)
        turns.end(since(begun))


def order(turns: int) -> Iterator[bool]:
    """Whether each is watched: on, off, off, on, so that what drifts is in both."""
    for number in range(turns):
        yield number % 4 in (0, 3)


def main() -> None:
    """Train, and print each turn."""
    kind, turns, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    {"fit": by_fit, "loop": by_loop}[kind](Turns(turns, steps))


if __name__ == "__main__":
    main()
