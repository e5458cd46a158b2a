"""One training run of a 20 M-parameter model: `checkpoint_run.py FOLDER STEPS`, with checkpoints at the default rate.

Writes a JSON line when TensorFlow is there, one a call, and one for each checkpoint that was due,
all with the machine's monotonic clock, by which another process can go.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import models
import ours

from stoker.train.config import CheckpointConfig
from stoker.train.context.preemption import Preemption
from stoker.train.context.run_context import Progress
from stoker.train.setup.build_model import prepare_process

TASK = models.Task(body=models.dense(4096, 4096), shape=(784,), batch_size=64)
"""20 M parameters: 240 MB with Adam's moments."""

STEPS_PER_CALL = 5


def say(event: str, **more: float) -> None:
    """One line."""
    facts = {"event": event, "at_s": time.monotonic(), "cpu_s": sum(os.times()[:2]), **more}
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


class Watched(Preemption):
    """Tells when a call begins, and whether a checkpoint follows it."""

    def save_after_call(self, wanted: bool) -> None:
        """A call begins: what came before it is over."""
        say("call", due=float(wanted))
        super().save_after_call(wanted)


def main(folder: Path, steps: int) -> None:
    """Train."""
    say("imported")
    prepare_process(precision="float32", seed=0, deterministic=False)
    settings = ours.Settings(
        batch_size=TASK.batch_size,
        steps_per_call=STEPS_PER_CALL,
        steps=steps,
        checkpoint=CheckpointConfig(),
    )

    def make(features: dict[str, Any]) -> keras.Model:
        return models.compiled(TASK, features)

    def tell(progress: Progress) -> None:
        # The last word of an epoch is about its validation.
        if "val_loss" not in progress.scalars:
            say("steps", step=float(progress.step))

    batches = models.make_batches(TASK)
    built = ours.build(make, batches, settings)
    say("built", parameters=float(built.model.count_params()))
    ours.train(built, batches, settings, folder=folder, on_progress=tell, preemption=Watched())


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
