"""A process of its own for strategies: logical devices are made before TensorFlow is used.

Usage: strategy_scenarios.py DATASET TRANSFORM OUT, scenarios as JSON on stdin: a list of
{"replicas": 2, "model": "plain", "settings": {...}, "ends_after": [4]}, the steps after which it is
stopped by a signal, and resumed; OUT gets the weights of each as npz and a JSON.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from stoker.core.errors import Preempted
from stoker.data.dataset import load_dataset
from stoker.data.features.preprocessing.transform import load_transform
from stoker.telemetry.writers import Everywhere
from stoker.train.config import ResolvedTraining, StrategyName, TrainConfig
from stoker.train.context import utilization
from stoker.train.context.heartbeat import process_heartbeat
from stoker.train.context.preemption import Preemption
from stoker.train.context.run_context import Progress, RunContext
from stoker.train.loop.loop import fit
from stoker.train.setup.build_model import BuiltModel, build_model, prepare_process
from stoker.train.setup.strategy import Distribution, make_distribution


def plain(features: dict[str, Any]) -> keras.Model:
    """No layer whose answer depends on how a batch is cut."""
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))(x)
    model = keras.Model(features, layers.Dense(1, activation="sigmoid", dtype="float32")(x))
    model.compile(
        optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy", metrics=["accuracy"]
    )
    return model


def embedded(features: dict[str, Any]) -> keras.Model:
    """Gradients that are IndexedSlices."""
    ids = keras.ops.cast(features["a"] > 0, "int32")
    x = layers.Embedding(4, 3)(ids)
    x = layers.Concatenate()([x, keras.ops.expand_dims(features["b"], -1)])
    model = keras.Model(features, layers.Dense(1, activation="sigmoid", dtype="float32")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model


def normed(features: dict[str, Any]) -> keras.Model:
    """BatchNorm and Dropout, in which replicas differ."""
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = layers.BatchNormalization()(layers.Dense(8, activation="relu")(x))
    x = layers.Dropout(0.2)(x)
    model = keras.Model(features, layers.Dense(1, activation="sigmoid", dtype="float32")(x))
    model.compile(
        optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy", metrics=["accuracy"]
    )
    return model


def synced(features: dict[str, Any]) -> keras.Model:
    """BatchNorm over the rows of all replicas: one waits for the other in the forward pass."""
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = layers.BatchNormalization(synchronized=True)(layers.Dense(8, activation="tanh")(x))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid", dtype="float32")(x))
    model.compile(
        optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy", metrics=["accuracy"]
    )
    return model


@keras.saving.register_keras_serializable()
class Seen(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Keeps which units of its first row were not dropped, on each replica separately."""

    def build(self, shape: Any) -> None:
        self.units = self.add_weight(
            shape=(shape[-1],), dtype="int32", initializer="zeros", trainable=False, name="units"
        )

    def call(self, x: Any, training: bool | None = None) -> Any:
        if training:
            self.units.assign(keras.ops.cast(x[0] != 0, "int32"))
        return x


def dropped(features: dict[str, Any]) -> keras.Model:
    """Dropout of units that are never 0 by themselves."""
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = Seen()(layers.Dropout(0.5)(layers.Dense(64, activation="sigmoid")(x)))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid", dtype="float32")(x))
    model.compile(optimizer=keras.optimizers.Adam(0.02), loss="binary_crossentropy")
    return model


def own_loss(features: dict[str, Any]) -> keras.Model:
    """`compute_loss` overridden: a mean that Keras does not divide by the number of replicas."""

    class Own(keras.Model):  # type: ignore[misc]  # Keras has no types
        def compute_loss(
            self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True
        ) -> Any:
            wrong = keras.ops.cast(y, "float32") - keras.ops.squeeze(y_pred, -1)
            return keras.ops.mean(keras.ops.square(wrong))

    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    model = Own(features, layers.Dense(1, activation="sigmoid", dtype="float32")(x))
    model.compile(optimizer=keras.optimizers.SGD(0.5))
    return model


MODELS = {f.__name__: f for f in (plain, embedded, normed, synced, dropped, own_loss)}


@functools.cache
def spread(name: StrategyName, replicas: int) -> Distribution:
    """A process has one strategy: the keys of its collectives start again with each."""
    return make_distribution(name, replicas=replicas)


def train(scenario: dict[str, Any], data: Any, transform: Any, out: Path) -> dict[str, Any]:
    """One training run; the weights go to a file."""
    replicas, on_tpu = scenario.get("replicas", 1), scenario.get("as_tpu", False)
    settings = {"epochs": 2} | scenario.get("settings", {})
    precision = settings.get("precision", "float32")
    accumulate = settings.get("accumulate", 1)
    config = TrainConfig(**settings)
    resolved = ResolvedTraining(
        batch_size=scenario.get("global_batch", 32) // replicas // accumulate,
        accumulate=accumulate,
        replicas=replicas,
        workers=1,
        steps_per_call=scenario.get("steps_per_call", 4),
        precision=precision,
        xla=settings.get("xla", False) is True,
        strategy="tpu" if on_tpu else "mirrored" if replicas > 1 else "one_device",
        lr_factor=1.0,
        why={},
    )
    found_apart: set[str] = set()
    # No TPU is available: the replicas of a mirrored strategy run its code path.
    distribution = spread("mirrored" if on_tpu else resolved.strategy, replicas)
    if on_tpu:
        distribution = replace(distribution, name="tpu")
    for ends_after in [*scenario.get("ends_after", []), None]:
        # A new model each time: what is gone on with comes from the checkpoint.
        prepare_process(precision=precision, seed=0, deterministic=False)
        with distribution.strategy.scope():
            built = build_model(MODELS[scenario["model"]], transform, what="model:build")
        preemption = Preemption()

        def end(
            progress: Progress,
            built: BuiltModel = built,
            preemption: Preemption = preemption,
            after: int | None = ends_after,
        ) -> None:
            found_apart.update(apart(built, distribution))
            if progress.step == after:
                preemption.request()

        with nullcontext() if ends_after is None else raises_preempted(after=ends_after + 1):
            result = fit(
                built,
                (data, transform),
                config=config,
                resolved=resolved,
                distribution=distribution,
                context=RunContext(
                    memory_bytes=scenario.get("memory_bytes", 1 << 34),
                    checkpoints=out / "checkpoints",
                    writer=Everywhere([]),
                    on_progress=end,
                    preemption=preemption,
                    heartbeat=process_heartbeat(),
                ),
            )
    local = distribution.strategy.experimental_local_results
    values = [np.asarray(local(v.value)[0]) for v in built.model.variables]
    np.savez(out / "weights.npz", *values)
    found_apart |= apart(built, distribution)
    keras.mixed_precision.set_dtype_policy("float32")
    return {"metrics": result.metrics, "apart": sorted(found_apart), "steps": result.steps}


def apart(built: BuiltModel, distribution: Distribution) -> set[str]:
    """Paths of the variables of which replicas do not have the same value."""
    local = distribution.strategy.experimental_local_results
    of_replicas = {
        v.path: [np.asarray(part) for part in local(v.value)] for v in built.model.variables
    }
    return {
        path
        for path, (first, *others) in of_replicas.items()
        if not all((other == first).all() for other in others)
    }


@contextmanager
def raises_preempted(*, after: int) -> Iterator[None]:
    """The run ends at the step of the request."""
    try:
        yield
    except Preempted as ended:
        if f"after step {after} of" not in ended.line():
            raise
    else:
        raise AssertionError("it went on")


def main() -> None:
    """Run every scenario of stdin in this one process."""
    data, transform = load_dataset(Path(sys.argv[1])), load_transform(Path(sys.argv[2]))
    out, results = Path(sys.argv[3]), []
    # Utilization does not matter here.
    utilization.CEILING_S = 0.02
    # Keras asks for collections of garbage, of which what was imported is none.
    gc.freeze()
    scenarios = json.load(sys.stdin)
    most = max(scenario.get("replicas", 1) for scenario in scenarios)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * most
    )
    for index, scenario in enumerate(scenarios):
        folder = out / str(index)
        folder.mkdir(parents=True)
        results.append(train(scenario, data, transform, folder))
    (out / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
