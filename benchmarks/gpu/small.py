"""The small models of benchmarks/train, each side with its best settings: `small.py MODEL ROUNDS`; JSON."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))

import contest as contests
import models
import tensorflow as tf
from contestants import Contest, Levers

from stoker.train.setup.strategy import one_device


def candidates(*, quick: bool) -> list[Levers]:
    """Settings from which the best of each side is selected."""
    choices = itertools.product((False, True), ("float32", "mixed_bfloat16"))
    made = [Levers(steps_per_call=50, xla=xla, precision=precision) for xla, precision in choices]
    return made[:1] if quick else made


def main() -> None:
    """One contest between ours and `model.fit`, in turns within this process."""
    name, rounds = sys.argv[1], int(sys.argv[2])
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, enable=True)
    if not gpus:
        # The CPU only shows that it runs.
        contests.WINDOW_S = 0.1
    task = models.TASKS[name]
    wanted = dict.fromkeys(("stoker", "fit"), candidates(quick=not gpus))
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(
            task=task,
            batches=models.make_batches(task),
            distribution=one_device(),
            folder=Path(folder),
        )
        found = contests.run(contest, wanted, rounds)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
