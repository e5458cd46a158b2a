"""The loops that are compared: Stoker's, `model.fit`, and one written by hand after TensorFlow's guide.

Each is a function that builds the model from the same seed and returns it with its loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import models
import ours
import tensorflow as tf
from turns import AfterSteps

from stoker.train.setup.strategy import Distribution

Loop = Callable[[AfterSteps], None]
Loaded = tuple[keras.Model, Loop]


@dataclass(frozen=True, kw_only=True)
class Levers:
    """What a contestant may set."""

    steps_per_call: int = 1
    xla: bool = False
    precision: str = "float32"

    def __str__(self) -> str:
        """As a person writes it."""
        xla = ", XLA" if self.xla else ""
        return f"{self.steps_per_call} steps a call, {self.precision}{xla}"


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What all contestants are given."""

    task: models.Task
    batches: tf.data.Dataset[Any]
    distribution: Distribution
    folder: Path


def _seeded(levers: Levers) -> None:
    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_dtype_policy(levers.precision)


def stoker(contest: Contest, levers: Levers) -> Loaded:
    """`stoker.train.loop.loop.fit`."""
    _seeded(levers)
    settings = ours.Settings(
        steps_per_call=levers.steps_per_call,
        xla=levers.xla,
        batch_size=contest.task.batch_size // contest.distribution.replicas,
        distribution=contest.distribution,
    )

    def make(features: dict[str, Any]) -> keras.Model:
        return models.compiled(contest.task, features)

    built = ours.build(make, contest.batches, settings)

    def loop(after: AfterSteps) -> None:
        ours.train(
            built,
            contest.batches,
            settings,
            folder=contest.folder / str(id(built)),
            on_progress=lambda progress: after(progress.step),
        )

    return built.model, loop


def keras_fit(contest: Contest, levers: Levers) -> Loaded:
    """`keras.Model.fit`."""
    _seeded(levers)
    with contest.distribution.strategy.scope():
        model = models.compiled(
            contest.task,
            models.keras_inputs(contest.task),
            jit_compile=levers.xla,
            steps_per_execution=levers.steps_per_call,
        )

    def loop(after: AfterSteps) -> None:
        clock = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: after(batch + 1)  # noqa: ARG005 - Keras's names
        )
        batches = contest.batches.repeat().prefetch(tf.data.AUTOTUNE)
        model.fit(
            batches, steps_per_epoch=ours.ENDLESS, shuffle=False, verbose=0, callbacks=[clock]
        )

    return model, loop


def by_hand(contest: Contest, levers: Levers) -> Loaded:
    """The custom loop of TensorFlow's guide, or where a call has several steps, its best form.

    Source: tensorflow.org/guide/keras/writing_a_training_loop_from_scratch.
    """
    if contest.distribution.replicas > 1:
        return _by_hand_mirrored(contest, levers)
    _seeded(levers)
    model = models.compiled(contest.task, models.keras_inputs(contest.task))
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    model.optimizer.build(model.trainable_variables)
    accuracy.update_state([[0]], [[1.0] * models.CLASSES])
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function(jit_compile=levers.xla)
    def step(x: Any, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            answers = model(x, training=True)
            loss = loss_of(y, answers)
        variables = model.trainable_weights
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        accuracy.update_state(y, answers)
        return loss

    @tf.function
    def call(iterator: Any, steps: tf.Tensor) -> tf.Tensor:
        total = tf.constant(0.0)
        for _ in tf.range(steps):  # type: ignore[attr-defined]  # AutoGraph makes a loop of it
            x, y = next(iterator)
            total += step(x, y)
        return total / tf.cast(steps, tf.float32)

    batches = contest.batches.repeat().prefetch(tf.data.AUTOTUNE)
    many = levers.steps_per_call > 1
    return model, partial(_calls, call, batches, levers) if many else partial(_steps, step, batches)


def _by_hand_mirrored(contest: Contest, levers: Levers) -> Loaded:
    """The custom loop of TensorFlow's guide to distributed training; several steps a call in its best form.

    Source: tensorflow.org/tutorials/distribute/custom_training.
    """
    _seeded(levers)
    strategy = contest.distribution.strategy
    rows = contest.task.batch_size
    with strategy.scope():
        model = models.compiled(contest.task, models.keras_inputs(contest.task))
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        model.optimizer.build(model.trainable_variables)
        accuracy.update_state([[0]], [[1.0] * models.CLASSES])
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def replica(x: Any, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            answers = model(x, training=True)
            loss = tf.reduce_sum(loss_of(y, answers)) / rows
        variables = model.trainable_weights
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        accuracy.update_state(y, answers)
        return loss

    def step(x: Any, y: tf.Tensor) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(replica, args=(x, y)), axis=None)

    @tf.function
    def call(iterator: Any, steps: tf.Tensor) -> tf.Tensor:
        total = tf.constant(0.0)
        for _ in tf.range(steps):  # type: ignore[attr-defined]  # AutoGraph makes a loop of it
            total += step(*next(iterator))
        return total / tf.cast(steps, tf.float32)

    batches = contest.batches.repeat().prefetch(tf.data.AUTOTUNE)
    spread = strategy.experimental_distribute_dataset(batches)
    if levers.steps_per_call > 1:
        return model, partial(_calls, call, spread, levers)
    return model, partial(_steps, tf.function(step), spread)


def _steps(step: Callable[..., tf.Tensor], batches: Iterable[Any], after: AfterSteps) -> None:
    for number, (x, y) in enumerate(batches, start=1):
        float(step(x, y))
        after(number)


def _calls(
    call: Callable[..., tf.Tensor],
    batches: Iterable[Any],
    levers: Levers,
    after: AfterSteps,
) -> None:
    iterator, done = iter(batches), 0
    while True:
        float(call(iterator, tf.constant(levers.steps_per_call)))
        done += levers.steps_per_call
        after(done)


CONTESTANTS: dict[str, Callable[[Contest, Levers], Loaded]] = {
    "stoker": stoker,
    "fit": keras_fit,
    "by_hand": by_hand,
}
