"""The time of the arithmetic alone, compared with `model.fit`; writes benchmarks/results/train-floor.json.

python benchmarks/train/floor.py [--models mlp table_mlp] [--rounds N]

A loop of XLA's over one batch that lies there: forward pass, gradients, Adam; no input, no metric, no
check, no word to anybody. No loop that trains this model by XLA can be quicker, so that what this is to
`fit` is the most that any loop can be to it. Ours is measured in the same turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import contestants
import models
import tensorflow as tf
from contest import WINDOW_S
from figures import RESULTS, Figure, figure, spread, write
from turns import AfterSteps, Contestant

from stoker.train.setup.strategy import one_device

BEST = contestants.Levers(steps_per_call=200, xla=True)
"""As many steps a call as the quickest have in the contest of the best settings. In bfloat16 the same was slower, or as quick."""


def bare(contest: contestants.Contest) -> Callable[[AfterSteps], None]:
    """The loop that does nothing else."""
    model = models.compiled(contest.task, models.keras_inputs(contest.task))
    model.optimizer.build(model.trainable_variables)
    x, y = next(iter(contest.batches))

    @tf.function(jit_compile=True)
    def call(features: dict[str, tf.Tensor], labels: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        done = tf.constant(0)
        while done < count:
            tf.autograph.experimental.set_loop_options(parallel_iterations=1)
            with tf.GradientTape() as tape:
                loss = model.loss(labels, model(features, training=True))
            weights = model.trainable_weights
            model.optimizer.apply(tape.gradient(loss, weights), weights)
            done += 1
        return done

    def loop(after: AfterSteps) -> None:
        done = 0
        while True:
            done += int(call(x, y, tf.constant(BEST.steps_per_call)))
            after(done)

    return loop


def measured(name: str, rounds: int) -> list[Figure]:
    """What the bare loop, and ours, are to `fit`.

    Args:
        name: The model.
        rounds: Turns of each.
    """
    task = models.TASKS[name]
    with tempfile.TemporaryDirectory() as folder:
        contest = contestants.Contest(
            task=task,
            batches=models.make_batches(task),
            distribution=one_device(),
            folder=Path(folder),
        )
        loops = {
            "fit": contestants.keras_fit(contest, BEST)[1],
            "ours": contestants.stoker(contest, BEST)[1],
            "bare": bare(contest),
        }
        made = {each: Contestant(loop) for each, loop in loops.items()}
        most = BEST.steps_per_call
        for each in made.values():
            each.advance(2 * most)
        step_s = min(each.advance(most).wall_s for each in made.values()) / most
        steps = max(1, round(WINDOW_S / step_s / most)) * most
        wall_s: dict[str, list[float]] = {each: [] for each in made}
        for number in range(rounds):
            # The order changes, so that none always follows the same one.
            for each in made if number % 2 else reversed(made):
                wall_s[each].append(made[each].advance(steps).wall_s / steps)
        for contestant in made.values():
            contestant.stop()

    def ratio(of: str) -> Figure:
        ratios = [fit_s / s for fit_s, s in zip(wall_s["fit"], wall_s[of], strict=True)]
        who = {"bare": "a loop of nothing but arithmetic", "ours": "ours"}[of]
        shown = "; ".join(f"{e}: {1e3 * statistics.median(s):.3g} ms" for e, s in wall_s.items())
        how = (
            f"{rounds} turns of {steps} steps in alternation, one process, {BEST} ({spread(ratios)}); "
            f"{shown} a step"
        )
        return figure(
            f"{name}: {who} against model.fit", statistics.median(ratios), "x", peer="fit", how=how
        )

    return [ratio("bare"), ratio("ours")]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=models.TASKS, default=["mlp", "table_mlp"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULTS / "train-floor.json")
    options = parser.parse_args()
    write(options.out, [each for name in options.models for each in measured(name, options.rounds)])
    sys.stdout.flush()


if __name__ == "__main__":
    main()
