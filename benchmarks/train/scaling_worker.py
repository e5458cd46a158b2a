"""One worker: `scaling_worker.py FOLDER CASE...`, alone or as one of several by `TF_CONFIG`.

The first worker writes FOLDER/results.json: case -> seconds a step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from namespaces import enter_namespace

if __name__ == "__main__":
    # Before TensorFlow reads TF_CONFIG.
    enter_namespace()

import keras
import models
import ours
import tensorflow as tf
from scaling_cases import CALLS, CASES, Case
from turns import AfterSteps, StoppedError

from stoker.core.files import write_json
from stoker.train.context.heartbeat import process_heartbeat
from stoker.train.context.run_context import Progress
from stoker.train.setup.build_model import prepare_process
from stoker.train.setup.strategy import Distribution, make_distribution, one_device

BATCHES = 3
"""Different batches: the largest have 15 MB each."""


class Timed:
    """Seconds a step over the timed calls."""

    def __init__(self, case: Case) -> None:
        self._first, self._last = case.steps_per_call, (1 + CALLS) * case.steps_per_call
        self._begun_s = 0.0
        self.step_s = 0.0

    def after(self, steps: int) -> None:
        """So many steps are done.

        Raises:
            StoppedError: these were all.
        """
        if steps == self._first:
            self._begun_s = time.monotonic()
        if steps == self._last:
            self.step_s = (time.monotonic() - self._begun_s) / (self._last - self._first)
            raise StoppedError


def task_of(case: Case) -> models.Task:
    """Its model."""
    body = models.dense(*case.widths)
    return models.Task(body=body, shape=(case.inputs,), batch_size=case.batch_size)


def by_stoker(case: Case, distribution: Distribution, folder: Path, after: AfterSteps) -> None:
    """`stoker.train.loop.loop.fit`."""
    task = task_of(case)
    batches = models.make_batches(task, rows=case.rows * distribution.replicas, count=BATCHES)
    settings = ours.Settings(
        batch_size=case.batch_size,
        accumulate=case.accumulate,
        reduction_dtype=case.reduction_dtype,
        steps_per_call=case.steps_per_call,
        distribution=distribution,
    )

    def make(features: dict[str, Any]) -> keras.Model:
        return models.compiled(task, features)

    def tell(progress: Progress) -> None:
        after(progress.step)

    built = ours.build(make, batches, settings)
    ours.train(built, batches, settings, folder=folder, on_progress=tell)


def by_stock(case: Case, distribution: Distribution, after: AfterSteps) -> None:
    """The distributed custom loop of TensorFlow's guide.

    Source: tensorflow.org/tutorials/distribute/multi_worker_with_ctl.
    """
    task, strategy = task_of(case), distribution.strategy
    global_rows = case.rows * distribution.replicas
    with strategy.scope():
        model = models.compiled(task, models.keras_inputs(task))
        model.optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def replica(element: Any) -> tf.Tensor:
        x, y = element
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / global_rows
        variables = model.trainable_variables
        model.optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    @tf.function
    def step(element: Any) -> tf.Tensor:
        losses = strategy.run(replica, args=(element,))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    fed = strategy.distribute_datasets_from_function(
        lambda _: models.make_batches(task, count=BATCHES).repeat().prefetch(tf.data.AUTOTUNE)
    )
    for number, element in enumerate(fed, start=1):
        float(step(element))
        after(number)


def step_s(case: Case, distribution: Distribution, folder: Path) -> float:
    """Train it for a while; seconds a step."""
    keras.utils.set_random_seed(0)
    timed = Timed(case)
    try:
        if case.loop == "stock":
            by_stock(case, distribution, timed.after)
        else:
            by_stoker(case, distribution, folder, timed.after)
    except StoppedError:
        return timed.step_s
    raise RuntimeError("a loop must go on until it is stopped")


def main(folder: Path, names: list[str]) -> None:
    """All cases, one after the other."""
    heartbeat = process_heartbeat()
    alone = "TF_CONFIG" not in os.environ
    distribution = one_device() if alone else make_distribution("multi_worker", replicas=1)
    prepare_process(precision="float32", seed=0, deterministic=False)
    cases = {case.name: case for case in CASES}
    found = {}
    for index, name in enumerate(names):
        found[name] = step_s(cases[name], distribution, folder / str(index))
        heartbeat.enter("start")
    if distribution.is_chief:
        write_json(folder / "results.json", found)
    if not alone:
        heartbeat.finish()


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.flush()
    # TensorFlow's own end waits for workers that may be gone.
    os._exit(0)
