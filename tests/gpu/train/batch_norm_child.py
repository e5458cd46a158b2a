"""Trains a small network of convolutions in a precision, and prints the names of the device's kernels.

`python batch_norm_child.py POLICY FOLDER`; it runs on a CPU too, which has no kernels to name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stoker.app.import_tensorflow import import_tensorflow

STEPS, TRACED = 12, 3


def main(policy: str, folder: Path) -> None:
    """Train, trace the last steps, and print."""
    import_tensorflow()
    import keras
    import numpy as np
    import tensorflow as tf

    from stoker.train.optimizer.fused_kernels import fuse_batch_norms

    keras.utils.set_random_seed(0)
    keras.mixed_precision.set_dtype_policy(policy)
    model = keras.Sequential([keras.Input((32, 32, 16))])
    for _ in range(2):
        model.add(keras.layers.Conv2D(32, 3, padding="same", use_bias=False))
        model.add(keras.layers.BatchNormalization())
        model.add(keras.layers.ReLU())
    model.add(keras.layers.GlobalAveragePooling2D())
    model.add(keras.layers.Dense(4, dtype="float32"))
    fuse_batch_norms(model, wanted=True)
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=128.0)
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 32)
    images = rng.normal(size=(32, 32, 32, 16)) + labels[:, None, None, None]
    x, y = tf.constant(images, tf.float32), tf.constant(labels)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        values = [each.value for each in model.trainable_variables]
        optimizer.apply(tape.gradient(scaled, values), model.trainable_variables)
        return loss

    losses = [float(step()) for _ in range(STEPS - TRACED)]
    tf.profiler.experimental.start(str(folder))
    losses += [float(step()) for _ in range(TRACED)]
    tf.profiler.experimental.stop()
    print(json.dumps({"losses": losses, "kernels": kernels_in(folder)}))


def kernels_in(folder: Path) -> list[str]:
    """Names of all that ran on the streams of GPUs."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    names: dict[str, None] = {}
    for path in folder.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace()
        space.ParseFromString(path.read_bytes())
        for plane in space.planes:
            if not plane.name.startswith("/device:GPU"):
                continue
            for line in plane.lines:
                for event in line.events:
                    names[plane.event_metadata[event.metadata_id].name] = None
    return list(names)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
