"""Experiments that are killed while they train, and what is compared of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from stoker.train.checkpoints.store import STATE, VerifiedCheckpoint, best, newest_good, places

CHILD = Path(__file__).parent / "kill_child.py"

TIMEOUT_S = 600.0
"""Longest wait: it ends what hangs, and no slow machine's run."""

TESTS_OWN = "$STEP_S\n$SLOWER\n$MARK\n$OUT\n"
"""Variables with which a test slows a run down or observes it; not inputs of the run."""

TABLE_YAML = """\
name: small
data: {source: data.csv}
model: model:build
label: y
train:
  epochs: 3
  batch_size: 8
  steps_per_call: 20
  precision: float32
  deterministic: true
  ema: 0.9
  callbacks: model:callbacks
  checkpoint: {every_steps: 30, keep_last: 2}
"""

WITHOUT_TENSORBOARD = """\
  tensorboard: {histograms_every_steps: 0, gradients: false, graph: false}
"""

TABLE_PY = """\
import os
import time
from pathlib import Path

import keras
import tensorflow as tf
from keras import layers


def wait(values):
    # A step as long as the test says, so that it can be met in its middle.
    slower = os.environ.get("SLOWER", "")
    time.sleep(0.5 if slower and Path(slower).exists() else float(os.environ.get("STEP_S", "0")))
    return values


class Slow(layers.Layer):
    def call(self, inputs):
        waited = tf.ensure_shape(tf.numpy_function(wait, [inputs], inputs.dtype), inputs.shape)
        return inputs + 0.0 * tf.stop_gradient(waited)


class Noise(layers.Layer):
    def call(self, inputs, training=False):
        if not training:
            return inputs
        return inputs + 0.1 * keras.random.normal(keras.ops.shape(inputs))


class Mark(keras.callbacks.Callback):
    def on_test_begin(self, logs=None):
        if "MARK" in os.environ:
            Path(os.environ["MARK"]).touch()


def build(features):
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = layers.Dropout(0.3)(Noise()(layers.Dense(4, activation="relu")(Slow()(x))))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "binary_crossentropy")
    return model


def callbacks():
    return [
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5),
        Mark(),
    ]
"""

IMAGES_YAML = """\
name: small
data: {source: data, images: {size: [16, 16]}}
model: model:build
label: label
train:
  epochs: 4
  batch_size: 8
  steps_per_call: 2
  precision: float32
  deterministic: true
  ema: 0.9
  callbacks: model:callbacks
  augment: {flip: 0.5, random_resized_crop: {scale: [0.5, 1.0]}, color_jitter: {brightness: 0.3}}
  checkpoint: {every_steps: 4, keep_last: 2}
"""

IMAGES_PY = """\
import keras
from keras import layers


def build(features):
    x = layers.Rescaling(1 / 255)(features["image"])
    x = layers.BatchNormalization()(layers.Conv2D(4, 3, strides=2, activation="relu")(x))
    x = layers.Dropout(0.3)(layers.GlobalAveragePooling2D()(x))
    model = keras.Model(features, layers.Dense(2, activation="softmax")(x))
    model.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy",
                  metrics=["accuracy"])
    return model


def callbacks():
    return [
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=1, factor=0.5),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True),
    ]
"""


def write_table(folder: Path, *, tensorboard: bool = True) -> None:
    """Two numbers, and whether their sum is above 0.

    Args:
        folder: A folder that is created.
        tensorboard: Also write histograms and the graph: a third function to trace in each process.
    """
    folder.mkdir(parents=True)
    rows = np.random.default_rng(0).normal(size=(400, 2))
    lines = [f"{a:.4f},{b:.4f},{int(a + b > 0)}\n" for a, b in rows]
    (folder / "data.csv").write_text("a,b,y\n" + "".join(lines))
    (folder / "stoker.yaml").write_text(TABLE_YAML + ("" if tensorboard else WITHOUT_TENSORBOARD))
    (folder / ".stokerignore").write_text(TESTS_OWN)
    (folder / "model.py").write_text(TABLE_PY)


def write_images(folder: Path) -> None:
    """Bright and dark pictures."""
    rng = np.random.default_rng(0)
    for name, level in (("bright", 150), ("dark", 100)):
        (folder / "data" / name).mkdir(parents=True)
        for number in range(30):
            pixels = np.clip(rng.normal(level, 40, (20, 20, 3)), 0, 255).astype(np.uint8)
            cv2.imwrite(str(folder / "data" / name / f"{number}.png"), pixels)
    (folder / "stoker.yaml").write_text(IMAGES_YAML)
    (folder / ".stokerignore").write_text(TESTS_OWN)
    (folder / "model.py").write_text(IMAGES_PY)


class Trainer:
    """Starts commands of `stoker`, each a process of its own, one at a time."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._server = subprocess.Popen(
            [sys.executable, str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(
        self,
        folder: Path,
        runs: Path,
        *more: str,
        verb: str = "train",
        kill: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> int:
        """Start one; its process id."""
        return self._order(
            arguments=[verb, str(folder), "--set", f"runs={runs}", *more],
            environment=dict(environment or {}),
            kill=kill,
        )

    def end(self) -> int:
        """Wait for it; its exit code, or the negative number of the signal that ended it."""
        return self._answer()

    def run(self, folder: Path, runs: Path, *more: str, **options: Any) -> int:
        """Start one and wait for it."""
        self.start(folder, runs, *more, **options)
        return self.end()

    def script(self, path: Path, *arguments: object, stdin: str = "") -> str:
        """Run a script of the tests in a process of its own; all that it printed."""
        self._order(script=str(path), arguments=list(map(str, arguments)), stdin=stdin)
        code, printed = self.end(), self._log.read_text()
        assert code == 0, printed[-3000:]
        return printed

    def said(self) -> str:
        """All that the last one printed, as one line."""
        return " ".join(self._log.read_text().split())

    def close(self) -> None:
        """End the server of processes."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.stdout.close()
        self._server.wait()

    def _order(self, **order: Any) -> int:
        """Start a process; its id."""
        self._log.write_text("")
        plain: dict[str, Any] = {"script": None, "stdin": "", "environment": {}, "kill": None}
        assert self._server.stdin is not None
        self._server.stdin.write(json.dumps(plain | order | {"log": str(self._log)}) + "\n")
        self._server.stdin.flush()
        return self._answer()

    def _answer(self) -> int:
        assert self._server.stdout is not None
        return int(self._server.stdout.readline())


def until(happened: Callable[[], object]) -> None:
    """Wait for something that another process does."""
    give_up_s = time.monotonic() + TIMEOUT_S
    while not happened():
        assert time.monotonic() < give_up_s
        time.sleep(0.002)


def runs_of(runs: Path) -> list[Path]:
    """The runs' folders, the oldest first."""
    return sorted(path for path in (runs / "small").glob("[!.]*") if path.is_dir())


def checkpoints(runs: Path) -> Path:
    """Where the checkpoints of the only run lie."""
    (run,) = runs_of(runs)
    return run / "train" / "checkpoints"


def newest(runs: Path) -> VerifiedCheckpoint:
    """The newest checkpoint, of which no newer one is damaged."""
    found = newest_good(checkpoints(runs))
    assert found is not None
    assert found.refused == ()
    return found


def published(runs: Path) -> list[str]:
    """Names of the checkpoints that are there."""
    return [path.name for run in runs_of(runs) for path in places(run / "train" / "checkpoints")]


def weights(runs: Path) -> tuple[str, str]:
    """The hash of every variable at the end of training, and of those that are exported."""
    return newest(runs).manifest.hashes[STATE], best(checkpoints(runs)).manifest.hashes[STATE]


def outcome(runs: Path) -> dict[str, Any]:
    """What must be the same, however often it was killed: every byte of state, every metric."""
    facts = newest(runs).facts
    lines = (checkpoints(runs).parent / "metrics.jsonl").read_text().splitlines()
    return {
        "weights": weights(runs),
        "position": facts["position"] | {"timing": None},
        "callbacks": facts["callbacks"],
        # The last line of a process that comes to the end holds measured times only.
        "metrics": [line for line in map(_without_time, map(json.loads, lines)) if len(line) > 1],
    }


def _without_time(line: dict[str, Any]) -> dict[str, Any]:
    measured = ("step_time", "per_s", "wait", "busy", "goodput")
    return {name: value for name, value in line.items() if not any(m in name for m in measured)}
