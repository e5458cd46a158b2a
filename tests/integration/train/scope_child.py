"""A process of its own: two logical devices are made before TensorFlow is used.

Usage: scope_child.py DATASET TRANSFORM OUT. Prints what a run says of
a model that was made outside of the strategy's scope, and the findings of one made inside of it, a
line each.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
from keras import layers
from tests.integration.train.small import on_one_device, unwatched

from stoker.core.errors import CheckFailed
from stoker.data.dataset import load_dataset
from stoker.data.features.preprocessing.transform import load_transform
from stoker.train.config import TrainConfig
from stoker.train.context import utilization
from stoker.train.loop.loop import fit
from stoker.train.setup.build_model import build_model, prepare_process
from stoker.train.setup.strategy import make_distribution


def build(features: dict[str, Any]) -> keras.Model:
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = layers.Dense(8, activation="tanh", name="hidden")(x)
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(optimizer="adam", loss="binary_crossentropy")
    return model


def main() -> None:
    """Train both on two replicas."""
    data, transform = load_dataset(Path(sys.argv[1])), load_transform(Path(sys.argv[2]))
    # Utilization does not matter here.
    utilization.CEILING_S = 0.02
    distribution = make_distribution("mirrored", replicas=2)
    for place in ("outside", "inside"):
        prepare_process(precision="float32", seed=0, deterministic=False)
        scope = distribution.strategy.scope() if place == "inside" else nullcontext()
        with scope:
            built = build_model(build, transform, what="model:build")
        try:
            result = fit(
                built,
                (data, transform),
                config=TrainConfig(epochs=1),
                resolved=on_one_device(batch_size=16, replicas=2, strategy="mirrored"),
                distribution=distribution,
                context=unwatched(Path(sys.argv[3]) / place),
            )
        except CheckFailed as error:
            print(error.line())
        else:
            print(result.health["findings"])


if __name__ == "__main__":
    main()
