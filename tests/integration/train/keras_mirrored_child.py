"""A process of its own: two logical devices are made before TensorFlow is used. Prints JSON."""

import json
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from stoker.data.feed.pipeline import as_it_is
from stoker.train.callbacks.callbacks import Callbacks
from stoker.train.model.keras_model import run_custom_step
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.strategy import Distribution, one_device
from stoker.train.step.custom_train_step import make_step
from stoker.train.step.multi_step import make_multi_step
from stoker.train.step.program import StepInput
from stoker.train.step.step import StepSettings, make_train_step

ROWS, STEPS = 8, 3
X = np.random.default_rng(0).normal(size=(ROWS, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


class OwnStep(keras.Model):  # type: ignore[misc]  # Keras has no types
    """The custom `train_step` of Keras's guide."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients: Any = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def made(kind: type[keras.Model], optimizer: keras.optimizers.Optimizer) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    model = kind(inputs, keras.layers.Dense(1)(inputs))
    model.compile(optimizer, "mse")
    model._symbolic_build(data_batch=(X, Y))
    return model


def by_replica(variable: Any) -> list[Any]:
    return [value.numpy().tolist() for value in variable.value.values]


def run_steps(step: Any, batches: tf.data.Dataset[Any], steps: int) -> Any:
    step_input = StepInput(iterator=iter(batches), ahead=True)
    step_input.take_first()
    arguments = step_input.iterator, tf.constant(steps, tf.int64), tf.constant(True)
    run = make_multi_step(step, rows_per_step=None).get_concrete_function(
        *arguments, step_input.left_spec
    )
    return run(*arguments, step_input.left)


def own_step(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Steps of a user's own `train_step`, many in one call, on one device and on two."""
    alone = made(OwnStep, keras.optimizers.Adam(0.1))
    for _ in range(STEPS):
        run_custom_step(alone, "train_step", (X, Y))
    with strategy.scope():
        mirrored = made(OwnStep, keras.optimizers.Adam(0.1))
    batches = tf.data.Dataset.from_tensors((X, Y)).unbatch().batch(ROWS).repeat()
    step = make_step(
        BuiltModel(model=mirrored, adapt=lambda features: features),
        as_it_is,
        distribution=Distribution(name="mirrored", strategy=strategy, replicas=2),
        settings=StepSettings(batch_size=ROWS // 2),
    )
    sums = run_steps(step, batches, STEPS)
    if (int(sums.steps), float(sums.rows), bool(sums.finite)) != (STEPS, STEPS * ROWS, True):
        raise RuntimeError(f"{STEPS} steps of {ROWS} rows, not {sums}")
    return {
        "alone": [value.tolist() for value in alone.get_weights()],
        "mirrored": [by_replica(variable) for variable in mirrored.weights],
    }


def two_outputs() -> keras.Model:
    """Labels by name, losses of several kinds, weights of theirs and of samples."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((3,))
    x = keras.layers.Dense(4, activation="tanh")(inputs)
    heads = {
        "kind": keras.layers.Dense(3, activation="softmax")(x),
        "size": keras.layers.Dense(1)(x),
    }
    model = keras.Model(inputs, heads)
    model.compile(
        keras.optimizers.Adam(0.1),
        loss={"kind": "sparse_categorical_crossentropy", "size": "mse"},
        loss_weights={"kind": 2.0, "size": 0.5},
        metrics={"kind": ["accuracy"]},
        weighted_metrics={"size": ["mae"]},
    )
    labels = {"kind": np.arange(ROWS) % 3, "size": Y}
    model._symbolic_build(data_batch=(X, labels, np.ones(ROWS, "float32")))
    return model


def several_outputs(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """Steps over one device and over two, whose shares of a batch are not alike."""
    labels = {"kind": np.arange(ROWS) % 3, "size": Y}
    weights = np.linspace(0.0, 2.0, ROWS).astype("float32")
    # Rows of a batch: 5, then 3.
    rows: Any = (X, labels, weights)
    batches = tf.data.Dataset.from_tensor_slices(rows).batch(5).repeat()
    found = {}
    for name, distribution in (
        ("alone", one_device()),
        ("mirrored", Distribution(name="mirrored", strategy=strategy, replicas=2)),
    ):
        with distribution.strategy.scope():
            model = two_outputs()
        step = make_train_step(
            BuiltModel(model=model, adapt=lambda features: features),
            as_it_is,
            distribution=distribution,
            settings=StepSettings(batch_size=5),
        )
        sums = run_steps(step, batches, 4)
        metrics = {name: float(value) for name, value in model.get_metrics_result().items()}
        local = distribution.strategy.experimental_local_results
        found[name] = {
            "loss": float(sums.loss_sum) / float(sums.rows),
            "metrics": {name: value for name, value in metrics.items() if "loss" not in name},
            "weights": [[p.numpy().tolist() for p in local(w.value)] for w in model.weights],
        }
    return found


def callbacks(strategy: tf.distribute.Strategy) -> dict[str, Any]:
    """What callbacks read and write of mirrored variables."""
    with strategy.scope():
        model = made(keras.Model, keras.optimizers.SGD(0.5))
    seen: dict[str, Any] = {}

    def listed() -> list[keras.callbacks.Callback]:
        return [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.25),
            keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True),
        ]

    hooks = Callbacks(model, listed(), steps=1, epochs=3)
    hooks.on_train_begin()
    hooks.on_epoch_begin(0)
    seen["rate"] = by_replica(model.optimizer.learning_rate)
    seen["after"] = by_replica(model.weights[0])
    hooks.on_epoch_end(0, {"loss": 1.0})
    facts, arrays = hooks.state()

    resumed = Callbacks(model, listed(), steps=1, epochs=3)
    resumed.set_state(json.loads(json.dumps(facts)), arrays)
    resumed.on_train_begin()
    for weight in model.weights:
        weight.assign(tf.zeros(weight.shape))
    resumed.on_epoch_end(1, {"loss": 2.0})
    seen["stopped"] = resumed.stop_training
    resumed.on_train_end({})
    seen["restored"] = by_replica(model.weights[0])
    return seen


def main() -> None:
    """Run both."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    scenarios = (own_step, several_outputs, callbacks)
    print(json.dumps({scenario.__name__: scenario(strategy) for scenario in scenarios}))


if __name__ == "__main__":
    main()
