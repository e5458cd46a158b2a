"""A process of its own for elastic trainings: replicas are the workers, logical devices of one CPU.

Usage: elastic_scenarios.py DATASET TRANSFORM OUT, scenarios as JSON on stdin: a list of
{"model": "normed", "virtual": 4, "legs": [[4, 14], [2, null]], "settings": {...}}; a leg is its replicas and the step
after which it gets a request to end. OUT gets results.json: for each scenario the loss of each step, the metrics and, where a leg
is refused, its line.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from tests.integration.train.small import on_one_device, unwatched
from tests.integration.train.strategy_scenarios import MODELS, Seen, spread

from stoker.core.errors import ConfigError, Preempted
from stoker.data.dataset import load_dataset
from stoker.data.features.preprocessing.transform import load_transform
from stoker.train.config import TrainConfig
from stoker.train.context import utilization
from stoker.train.context.preemption import Preemption
from stoker.train.context.run_context import Progress
from stoker.train.elastic import ElasticConfig
from stoker.train.loop.loop import fit
from stoker.train.setup.build_model import build_model, prepare_process


def on_top(layer: Any, features: dict[str, Any], *, metrics: Any = ()) -> keras.Model:
    """A small model with a layer in its middle."""
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = layer(layers.Dense(8, activation="tanh")(x))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=list(metrics))
    return model


class ReplicaNumber(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Depends on which replica runs it."""

    def call(self, x: Any) -> Any:
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        return x * (1.0 + keras.ops.cast(number, "float32"))


class ReplicaCount(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Depends on how many replicas there are."""

    def call(self, x: Any) -> Any:
        return x / tf.distribute.get_strategy().num_replicas_in_sync


class WithStrategy(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Depends on whether there are several replicas."""

    def call(self, x: Any) -> Any:
        return x * 2.0 if tf.distribute.has_strategy() else x


class ReplicaMean(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Waits for the other replicas."""

    def call(self, x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        return x - context.all_reduce(tf.distribute.ReduceOp.MEAN, tf.reduce_mean(x))


class StatefulNoise(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Draws from TensorFlow's own generator, which no checkpoint holds."""

    def call(self, x: Any) -> Any:
        return x + tf.random.normal(tf.shape(x))


class Unknown(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Writes to a variable that Keras does not know."""

    def build(self, shape: Any) -> None:
        self.hidden = [tf.Variable(tf.constant(0.0), trainable=False)]

    def call(self, x: Any) -> Any:
        self.hidden[0].assign_add(1.0)
        return x * (1.0 + 0.0 * self.hidden[0])


class Largest(keras.metrics.Metric):  # type: ignore[misc]  # Keras has no types
    """No sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.seen = self.add_variable((), "zeros", name="seen")

    def update_state(self, y: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign(keras.ops.maximum(self.seen, keras.ops.max(y_pred)))

    def result(self) -> Any:
        return self.seen


class Kept(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Keeps which units of its first row were not dropped: each 0 or 1, and so a mean over virtual workers."""

    def build(self, shape: Any) -> None:
        self.units = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False, name="units"
        )

    def call(self, x: Any, training: bool | None = None) -> Any:
        if training:
            self.units.assign(keras.ops.cast(x[0] != 0, "float32"))
        return x


def masks(features: dict[str, Any]) -> keras.Model:
    """Dropout of units that are never 0 by themselves."""
    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    x = Kept(name="kept")(layers.Dropout(0.5)(layers.Dense(64, activation="sigmoid")(x)))
    model = keras.Model(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    return model


def own_step(features: dict[str, Any]) -> keras.Model:
    """`train_step` overridden."""

    class Own(keras.Model):  # type: ignore[misc]  # Keras has no types
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    x = layers.Concatenate()([keras.ops.expand_dims(f, -1) for f in features.values()])
    model = Own(features, layers.Dense(1, activation="sigmoid")(x))
    model.compile(keras.optimizers.SGD(0.1), "binary_crossentropy")
    return model


ALL = MODELS | {
    "number": lambda features: on_top(ReplicaNumber(name="by_number"), features),
    "count": lambda features: on_top(ReplicaCount(name="by_count"), features),
    "strategy": lambda features: on_top(WithStrategy(name="if_several"), features),
    "mean": lambda features: on_top(ReplicaMean(name="by_mean"), features),
    "noise": lambda features: on_top(StatefulNoise(name="noisy"), features),
    "unknown": lambda features: on_top(Unknown(name="hiding"), features),
    "seen": lambda features: on_top(Seen(name="looking"), features),
    "spectral": lambda features: on_top(
        layers.SpectralNormalization(layers.Dense(8), name="spectral"), features
    ),
    "metric": lambda features: on_top(layers.Dropout(0.2), features, metrics=[Largest()]),
    "own_step": own_step,
    "masks": masks,
}


def train(scenario: dict[str, Any], data: Any, transform: Any, out: Path) -> dict[str, Any]:
    """The legs of one training, one after the other."""
    virtual = scenario.get("virtual", 4)
    settings = {"epochs": 2, "elastic": ElasticConfig(max=virtual)} | scenario.get("settings", {})
    config = TrainConfig(**settings)
    losses: dict[int, float] = {}
    metrics: dict[str, float] = {}
    for replicas, ends_after in scenario["legs"]:
        resolved = on_one_device(
            batch_size=scenario.get("batch_size", 8),
            replicas=replicas,
            virtual_workers=virtual,
            strategy="mirrored" if replicas > 1 else "one_device",
            steps_per_call=scenario.get("steps_per_call", 1),
            precision=settings.get("precision", "float32"),
            xla=settings.get("xla", False) is True,
        )
        distribution = spread(resolved.strategy, replicas)
        prepare_process(precision=resolved.precision, seed=0, deterministic=False)
        with distribution.strategy.scope():
            built = build_model(ALL[scenario["model"]], transform, what="model:build")
        preemption = Preemption()

        def end(
            progress: Progress, preemption: Preemption = preemption, after: int | None = ends_after
        ) -> None:
            if progress.step == after:
                preemption.request()

        class Losses:
            def write(self, step: int, scalars: dict[str, float]) -> None:
                if "val_loss" not in scalars and "loss" in scalars:
                    losses[step] = float(scalars["loss"])

            def rewind(self, step: int, *, validated: bool = True) -> None:
                pass

            def close(self) -> None:
                pass

        context = unwatched(
            out / "checkpoints", writer=Losses(), on_progress=end, preemption=preemption
        )
        with suppress(Preempted):
            metrics = fit(
                built,
                (data, transform),
                config=config,
                resolved=resolved,
                distribution=distribution,
                context=context,
            ).metrics
    keras.mixed_precision.set_dtype_policy("float32")
    local = distribution.strategy.experimental_local_results
    weights = {v.path.replace("/", "."): local(v.value)[0].numpy() for v in built.model.variables}
    np.savez(out / "weights.npz", **weights)
    return {"losses": [losses[step] for step in sorted(losses)], "metrics": metrics}


def main() -> None:
    """Run every scenario of stdin in this one process."""
    data, transform = load_dataset(Path(sys.argv[1])), load_transform(Path(sys.argv[2]))
    out, results = Path(sys.argv[3]), []
    utilization.CEILING_S = 0.02
    scenarios = json.load(sys.stdin)
    most = max(replicas for scenario in scenarios for replicas, _ in scenario["legs"])
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * most
    )
    for index, scenario in enumerate(scenarios):
        folder = out / str(index)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            results.append(train(scenario, data, transform, folder))
        except ConfigError as error:
            results.append({"refused": error.line()})
    (out / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
