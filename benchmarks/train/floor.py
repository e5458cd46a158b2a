"""What is left where nothing is done but arithmetic: the `mlp` of models.py, with Adam, in a loop of XLA's.

python benchmarks/train/floor.py

No input, no metric, no check, no word to anybody: no loop that trains can be quicker in XLA.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import models
import tensorflow as tf

STEPS = 16
CALLS = 200
WARM = 20


def main() -> None:
    """Measure and say."""
    task = models.TASKS["mlp"]
    model = models.compiled(task, models.keras_inputs(task))
    model.optimizer.build(model.trainable_variables)
    x, y = next(iter(models.make_batches(task)))
    loss_of = model.loss

    @tf.function(jit_compile=True)
    def steps(features: dict[str, tf.Tensor], labels: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        done = tf.constant(0)
        while done < count:
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(features, training=True))
            weights = model.trainable_weights
            model.optimizer.apply(tape.gradient(loss, weights), weights)
            done += 1
        return done

    taken_ms = []
    for _ in range(WARM + CALLS):
        begun_s = time.perf_counter()
        steps(x, y, tf.constant(STEPS)).numpy()
        taken_ms.append((time.perf_counter() - begun_s) / STEPS * 1e3)
    found = taken_ms[WARM:]
    sys.stdout.write(f"{statistics.median(found):.3f} ms a step, at best {min(found):.3f}\n")


if __name__ == "__main__":
    main()
