"""The small experiment that the GPU tests train: bright and dark pictures, a network with BatchNormalization."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from children import Child, Children

TIMEOUT_S = 400.0 if os.environ.get("STOKER_GPU_TESTS_ON_CPU") == "1" else 80.0
"""Longest time for one command, seconds: on a card the file of tests is ended after 90, and a CPU is shared
with other tests."""

YAML = """\
name: pictures
data: {source: data, images: {size: [16, 16]}, splits: {train: 0.8, eval: 0.2}}
model: model:build
label: label
train:
  epochs: 4
  batch_size: 32
  callbacks: model:callbacks
  augment: {flip: 0.5}
"""

PY = '''\
import json
import os
import time

import keras
import tensorflow as tf
from keras import layers

# With 16 rows and more the loss needs a tensor of ROWS_OF * COLUMNS numbers for each 16 rows.
HUNGRY, ROWS_OF, COLUMNS = os.environ.get("HUNGRY") == "1", {rows}, {columns}


class Model(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        if not HUNGRY or not training:
            return loss
        taken = tf.random.uniform(tf.stack([tf.shape(y)[0] // 16, ROWS_OF, COLUMNS]))
        return loss + 0.0 * tf.cast(tf.reduce_sum(taken), loss.dtype)


def build(features):
    x = layers.Rescaling(1 / 255)(features["image"])
    x = layers.Conv2D(16, 3, strides=2, use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization()(x))
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling2D()(x))
    model = Model(features, layers.Dense(2, dtype="float32")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.02), loss, metrics=["accuracy"])
    return model


class Facts(keras.callbacks.Callback):
    """Writes what the user's code can observe during training; slow if the run is to be killed."""

    def on_epoch_end(self, epoch, logs=None):
        time.sleep(float(os.environ.get("SLOW_S", "0")))

    def on_train_end(self, logs=None):
        if "FACTS" not in os.environ:
            return
        gpus = tf.config.list_physical_devices("GPU")
        optimizer = self.model.optimizer
        facts = {{
            "gpus": len(gpus),
            "logical": len(tf.config.list_logical_devices("GPU")),
            "growth": [tf.config.experimental.get_memory_growth(gpu) for gpu in gpus if not limited(gpu)],
            "limits_mb": [limit for gpu in gpus for limit in limited(gpu)],
            "peak_bytes": [tf.config.experimental.get_memory_info(f"GPU:{{n}}")["peak"] for n in range(len(gpus))],
            "device": self.model.trainable_variables[0].value.device,
            "compute": self.model.layers[2].compute_dtype,
            "variables": self.model.trainable_variables[0].dtype,
            "scale": float(optimizer.dynamic_scale) if hasattr(optimizer, "dynamic_scale") else None,
        }}
        with open(os.environ["FACTS"], "w") as stream:
            json.dump(facts, stream)


def limited(gpu):
    found = tf.config.get_logical_device_configuration(gpu) or []
    return [each.memory_limit for each in found if each.memory_limit]


def callbacks():
    return [Facts()]
'''


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One training that has ended."""

    result: dict[str, Any]
    """What `--json` printed."""

    facts: dict[str, Any]
    """Observations of the callback in the process."""

    said: str
    """The standard error output."""


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """The experiment's folder, and what starts its commands."""

    folder: Path
    children: Children

    def ingest(self) -> None:
        """Run the stages before training, once for all tests."""
        self.children.stoker("transform", self.folder).done(TIMEOUT_S)
        shutil.copytree(self.folder / "runs", self.ingested)

    @property
    def ingested(self) -> Path:
        """A folder of runs with the stages before training, and no training."""
        return self.folder / "ingested"

    def start(
        self, *settings: str, more: tuple[str, ...] = (), env: Mapping[str, str] = {}
    ) -> Child:
        """Start `stoker train` with these settings."""
        sets = [part for setting in settings for part in ("--set", setting)]
        return self.children.stoker("train", self.folder, *sets, *more, "--json", env=env)

    def train(self, *settings: str, env: Mapping[str, str] = {}) -> Trained:
        """Train to the end."""
        facts = self.children.folder / f"facts-{len(self.children.started)}.json"
        child = self.start(*settings, more=("--again",), env={"FACTS": str(facts), **env})
        result = json.loads(child.done(TIMEOUT_S))
        return Trained(
            result=result, facts=json.loads(facts.read_text()), said=child.err.read_text()
        )


def write(folder: Path, *, children: Children, on_gpu: bool) -> Pictures:
    """Write it.

    Args:
        folder: Where.
        children: Starts its commands.
        on_gpu: The hungry loss asks for 1.5 GiB for each 16 rows, more than the test's limit; the CPU
            has no limit, and gets a request for 4 TiB.
    """
    draw = np.random.default_rng(0)
    for name, level in (("bright", 160), ("dark", 90)):
        (folder / "data" / name).mkdir(parents=True)
        for number in range(100):
            pixels = np.clip(draw.normal(level, 40, (20, 20, 3)), 0, 255).astype(np.uint8)
            cv2.imwrite(str(folder / "data" / name / f"{number:03d}.png"), pixels)
    (folder / "stoker.yaml").write_text(YAML)
    rows = 1 << 20
    code = PY.format(rows=rows, columns=(3 << 7) if on_gpu else 1 << 20)
    (folder / "model.py").write_text(code)
    return Pictures(folder=folder, children=children)
