"""Small Keras models and data for them, each a function of a seed: what people put into `fit`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, losses, metrics, regularizers
from numpy.typing import NDArray

ROWS, BATCH, CLASSES, TOKENS = {"train": 44, "eval": 20}, 8, 4, 7

Arrays = dict[str, NDArray[Any]]


class Penalty(layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Adds a loss of its own to the model's."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(x)))
        return x


class Weighted(keras.Model):  # type: ignore[misc]  # Keras has no types
    """Overrides `compute_loss`."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return 0.5 * super().compute_loss(*args, **options)


class OwnStep(keras.Model):  # type: ignore[misc]  # Keras has no types
    """The custom `train_step` of Keras's guide."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            predicted = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight)
        gradients: Any = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, predicted, sample_weight=weight)
        return {metric.name: metric.result() for metric in self.metrics}


INPUTS = {
    "numbers": ((5,), "float32"),
    "single": ((), "float32"),
    "wide": ((3,), "float64"),
    "token": ((), "int32"),
    "tokens": ((6,), "int64"),
    "series": ((6, 3), "float32"),
    "image": ((8, 8, 2), "float32"),
    "flag": ((), "bool"),
}
"""Name -> shape of one record's value and dtype."""

HEADS = [
    "number",
    "numbers",
    "count",
    "binary",
    "binary_logits",
    "hinge",
    "classes",
    "class_logits",
    "one_hot",
]
"""What an output can be."""


class Drawn:
    """All choices of one seed; building twice gives the same model."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng([seed, 0])
        self.seed = seed
        names = rng.permutation(sorted(INPUTS))[: rng.integers(1, 4)]
        self.inputs = [str(name) for name in names]
        if self.inputs == ["flag"]:  # BatchNormalization makes any two values -1 and 1: no gradient
            self.inputs.append("numbers")
        heads = rng.choice(HEADS, rng.choice([1, 1, 2, 3]), replace=False)
        self.heads = {f"out_{head}": str(head) for head in heads}
        self.weight = bool(rng.random() < 0.35)
        self.label_dtype = str(rng.choice(["int64", "int32", "float32"]))
        self.label_column = bool(rng.random() < 0.5)
        self.single_tensor = len(self.inputs) == 1 and bool(rng.random() < 0.3)

    def rng(self, stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, stream])


def dataset(seed: int, split: str) -> tf.data.Dataset[Any]:
    """Batches as `fit` takes them; the last one is smaller."""
    drawn = Drawn(seed)
    rng, rows = drawn.rng(10 + len(split)), ROWS[split]
    features = {name: feature(name, rng, rows) for name in drawn.inputs}
    labels = {output: label(head, drawn, rng, rows) for output, head in drawn.heads.items()}
    parts: list[Any] = [
        next(iter(features.values())) if drawn.single_tensor else features,
        labels if len(labels) > 1 else next(iter(labels.values())),
    ]
    if drawn.weight:
        parts.append(rng.choice([0.0, 0.5, 1.0, 2.0], rows).astype("float32"))
    return tf.data.Dataset.from_tensor_slices(tuple(parts)).batch(BATCH)


def feature(name: str, rng: np.random.Generator, rows: int) -> NDArray[Any]:
    shape, dtype = INPUTS[name]
    if dtype == "bool":
        return rng.random((rows, *shape)) < 0.5
    if dtype.startswith("int"):
        found: NDArray[Any] = rng.integers(1, TOKENS, (rows, *shape))
    else:
        found = rng.normal(size=(rows, *shape))
    if name in ("tokens", "series"):  # of many lengths, 0 where nothing is
        used = np.arange(shape[0]) < rng.integers(1, shape[0] + 1, (rows, 1))
        found = found * used.reshape(rows, shape[0], *[1] * (len(shape) - 1))
    return found.astype(dtype)


def label(head: str, drawn: Drawn, rng: np.random.Generator, rows: int) -> NDArray[Any]:
    if head in ("number", "numbers"):
        shape = (rows, 3) if head == "numbers" else (rows, 1) if drawn.label_column else (rows,)
        return rng.normal(size=shape).astype("float32")
    if head == "count":
        return rng.poisson(2, (rows, 1)).astype("float32")
    if head == "hinge":
        return rng.choice([-1.0, 1.0], (rows, 1)).astype("float32")
    if head == "one_hot":
        return np.eye(CLASSES, dtype="float32")[rng.integers(0, CLASSES, rows)]
    most = 2 if head.startswith("binary") else CLASSES
    shape = (rows, 1) if drawn.label_column or head.startswith("binary") else (rows,)
    return rng.integers(0, most, shape).astype(drawn.label_dtype)


def build(seed: int, features: Any) -> keras.Model:
    """A compiled model on inputs by name."""
    drawn = Drawn(seed)
    rng = drawn.rng(1)
    names = iter(range(100))

    def named(kind: Any, *args: Any, **options: Any) -> Any:
        return kind(*args, name=f"layer{next(names)}", **options)

    def dense(units: int, **options: Any) -> Any:
        return named(
            layers.Dense, units, kernel_initializer=weights_of(drawn, next(names)), **options
        )

    given = {name: features["inputs" if drawn.single_tensor else name] for name in drawn.inputs}
    towers = [tower(name, x, rng, drawn, named) for name, x in given.items()]
    x = towers[0]
    if len(towers) > 1:
        how = rng.choice(["concatenate", "add", "multiply", "average"])
        if how == "concatenate":
            x = named(layers.Concatenate)(towers)
        else:
            kind = {"add": layers.Add, "multiply": layers.Multiply, "average": layers.Average}[how]
            x = named(kind)([dense(6)(tower) for tower in towers])
    shared = dense(6, activation="tanh")
    x = dense(6)(x)
    for _ in range(rng.integers(1, 4)):
        x = body(x, rng, named, dense, shared)
    outputs = {output: head_of(head, x, rng, drawn, output) for output, head in drawn.heads.items()}
    result: Any = outputs if len(outputs) > 1 else next(iter(outputs.values()))
    if len(outputs) > 1 and rng.random() < 0.3:
        result = list(outputs.values())
    cls = [keras.Model, keras.Model, keras.Model, Weighted, OwnStep][rng.integers(5)]
    if cls is OwnStep and len(outputs) > 1:
        cls = keras.Model
    model = cls(features, result, name="model")
    frozen = [each for each in model.layers if each.name in ("layer1", "layer3") and each.weights]
    if frozen and rng.random() < 0.25:
        frozen[0].trainable = False
    compile_(model, drawn, named_losses=not isinstance(result, list) or bool(rng.random() < 0.7))
    return model


def weights_of(drawn: Drawn, stream: int) -> Any:
    kinds = [
        keras.initializers.GlorotUniform,
        keras.initializers.HeNormal,
        keras.initializers.Orthogonal,
    ]
    return kinds[stream % 3](seed=drawn.seed * 100 + stream)


def tower(name: str, x: Any, rng: np.random.Generator, drawn: Drawn, named: Any) -> Any:
    """From an input to [batch, n]."""
    vectors = {"embeddings_initializer": keras.initializers.RandomUniform(seed=drawn.seed)}
    if name in ("single", "flag"):
        return named(layers.Reshape, (1,))(keras.ops.cast(x, "float32"))
    if name == "wide":
        x = keras.ops.cast(x, "float32")
        return named(layers.Normalization, mean=[0.1] * 3, variance=[1.5] * 3)(x)
    if name == "token":
        return named(layers.Embedding, TOKENS, 4, **vectors)(x)
    if name == "tokens":
        masked = bool(rng.integers(2))
        x = named(layers.Embedding, TOKENS, 4, mask_zero=masked, **vectors)(x)
    elif name == "series" and rng.integers(2):
        x = named(layers.Masking)(x)
    if name == "image":
        return image(x, rng, drawn, named)
    return sequence(x, rng, drawn, named) if name in ("tokens", "series") else x


def image(x: Any, rng: np.random.Generator, drawn: Drawn, named: Any) -> Any:
    """From [batch, 8, 8, 2] to [batch, n]."""
    first, second = (keras.initializers.GlorotUniform(seed=drawn.seed + n) for n in range(2))
    how = rng.choice(["plain", "separable", "by_channel"])
    normalized = bool(rng.integers(2))
    bias = {"use_bias": not normalized and bool(rng.integers(2))}  # BatchNormalization cancels it
    if how == "plain":
        more = {"strides": int(rng.integers(1, 3)), **bias}
        x = named(layers.Conv2D, 4, 3, padding="same", kernel_initializer=first, **more)(x)
    elif how == "separable":
        starts = {"depthwise_initializer": first, "pointwise_initializer": second}
        x = named(layers.SeparableConv2D, 4, 3, **starts, **bias)(x)
    else:
        x = named(layers.DepthwiseConv2D, 3, depthwise_initializer=first, **bias)(x)
    if normalized:
        x = named(layers.BatchNormalization, momentum=0.9)(x)
    x = named(layers.ReLU)(x)
    pool = [layers.MaxPooling2D, layers.AveragePooling2D][rng.integers(2)]
    if rng.integers(2):
        return named(layers.Flatten)(named(pool, 2)(x))
    return named(layers.GlobalAveragePooling2D)(x)


def sequence(x: Any, rng: np.random.Generator, drawn: Drawn, named: Any) -> Any:
    start = {"kernel_initializer": keras.initializers.GlorotUniform(seed=drawn.seed)}
    again = {"recurrent_initializer": keras.initializers.Orthogonal(seed=drawn.seed)}
    how = rng.choice(["lstm", "gru", "rnn", "both", "mean", "conv", "attention"])
    if how == "lstm":
        return named(layers.LSTM, 5, **start, **again)(x)
    if how == "gru":
        return named(layers.GRU, 5, reset_after=bool(rng.integers(2)), **start, **again)(x)
    if how == "rnn":
        return named(layers.SimpleRNN, 5, go_backwards=True, **start, **again)(x)
    if how == "both":
        return named(layers.Bidirectional, layers.GRU(3, name="inner", **start, **again))(x)
    if how == "conv":
        return named(layers.GlobalMaxPooling1D)(
            named(layers.Conv1D, 5, 3, padding="causal", **start)(x)
        )
    if how == "attention":
        # Softmax cancels a bias of the keys.
        x = named(layers.MultiHeadAttention, 2, 3, use_bias=False, **start)(x, x)
    return named(layers.GlobalAveragePooling1D)(x)


def body(x: Any, rng: np.random.Generator, named: Any, dense: Any, shared: Any) -> Any:
    """From [batch, 6] to [batch, 6]."""
    nested = f"nested{rng.integers(10**9)}"
    penalties = {"kernel_regularizer": regularizers.L1L2(0.001, 0.01), "bias_regularizer": "l2"}
    kinds = [
        lambda: dense(6, activation=str(rng.choice(["relu", "elu", "tanh", "gelu", "selu"])))(x),
        lambda: named(layers.Add)([x, dense(6, activation="relu")(x)]),
        lambda: named(layers.LayerNormalization)(x),
        lambda: named(layers.BatchNormalization, momentum=0.8, scale=bool(rng.integers(2)))(
            dense(6, use_bias=False)(keras.ops.tanh(x))
        ),
        # Of two channels it makes about -1 and 1: no gradient.
        lambda: named(layers.GroupNormalization, 2)(x),
        lambda: shared(shared(x)),
        lambda: dense(6, **penalties)(x),
        lambda: dense(6, activation="relu", activity_regularizer=regularizers.L2(0.01))(x),
        lambda: named(Penalty)(x),
        lambda: named(layers.PReLU)(x),
        lambda: dense(6, kernel_constraint=keras.constraints.MaxNorm(1.0), use_bias=False)(x),
        lambda: keras.Sequential([dense(5, activation="relu"), dense(6)], name=nested)(x),
        lambda: keras.ops.silu(x),
    ]
    return kinds[rng.integers(len(kinds))]()


def head_of(head: str, x: Any, rng: np.random.Generator, drawn: Drawn, output: str) -> Any:
    units = {"numbers": 3, "classes": CLASSES, "class_logits": CLASSES, "one_hot": CLASSES}.get(
        head, 1
    )
    activation = {
        "count": "softplus", "binary": "sigmoid", "hinge": "tanh", "classes": "softmax", "one_hot": "softmax",
    }.get(head)  # fmt: skip
    start = keras.initializers.GlorotUniform(seed=drawn.seed + HEADS.index(head))
    return layers.Dense(units, activation=activation, kernel_initializer=start, name=output)(x)


LOSSES: dict[str, list[Any]] = {
    "number": ["mse", "mae", losses.Huber, losses.LogCosh],
    "numbers": ["mse", losses.CosineSimilarity, "mean_absolute_error", losses.Huber],
    "count": [losses.Poisson, "mean_squared_logarithmic_error", "poisson"],
    "binary": ["binary_crossentropy", lambda: losses.BinaryCrossentropy(label_smoothing=0.1), losses.BinaryFocalCrossentropy],
    "binary_logits": [lambda: losses.BinaryCrossentropy(from_logits=True), lambda: losses.BinaryFocalCrossentropy(from_logits=True)],
    "hinge": ["hinge", losses.SquaredHinge],
    "classes": ["sparse_categorical_crossentropy", losses.SparseCategoricalCrossentropy],
    "class_logits": [lambda: losses.SparseCategoricalCrossentropy(from_logits=True)],
    "one_hot": ["categorical_crossentropy", lambda: losses.CategoricalCrossentropy(label_smoothing=0.1), losses.KLDivergence, lambda: losses.CategoricalFocalCrossentropy(gamma=1.0)],
}  # fmt: skip

METRICS: dict[str, list[Any]] = {
    "number": ["mae", metrics.RootMeanSquaredError],
    "numbers": ["mse", metrics.CosineSimilarity],
    "count": ["mse"],
    "binary": ["accuracy", metrics.AUC, metrics.Precision],
    "binary_logits": [lambda: metrics.BinaryAccuracy(threshold=0.0)],
    "hinge": ["mae"],
    "classes": ["accuracy", lambda: metrics.SparseTopKCategoricalAccuracy(k=2)],
    "class_logits": ["accuracy"],
    "one_hot": ["accuracy", metrics.CategoricalAccuracy],
}


def compile_(model: keras.Model, drawn: Drawn, *, named_losses: bool) -> None:
    rng = drawn.rng(2)

    def one_of(choices: list[Any]) -> Any:
        found = choices[rng.integers(len(choices))]
        return found if isinstance(found, str) else found()

    by_name = {output: one_of(LOSSES[head]) for output, head in drawn.heads.items()}
    of_metrics = {output: [one_of(METRICS[head])] for output, head in drawn.heads.items()}
    options: dict[str, Any] = {}
    several = len(by_name) > 1
    loss: Any = by_name if several else next(iter(by_name.values()))
    if several and rng.random() < 0.5:
        options["loss_weights"] = {
            output: float(rng.choice([0.25, 1.0, 2.0])) for output in by_name
        }
    if several and not named_losses:
        loss = list(by_name.values())
        options = {key: list(value.values()) for key, value in options.items()}
    if rng.random() < 0.6:
        which = "weighted_metrics" if drawn.weight and rng.random() < 0.5 else "metrics"
        options[which] = of_metrics if several else next(iter(of_metrics.values()))
        if several and not named_losses:
            options[which] = list(of_metrics.values())
    model.compile(optimizer=optimizer(rng), loss=loss, jit_compile=False, **options)


def optimizer(rng: np.random.Generator) -> keras.optimizers.Optimizer:
    made = keras.optimizers
    clip = [{}, {}, {"clipnorm": 0.5}, {"clipvalue": 0.1}, {"global_clipnorm": 0.5}][
        rng.integers(5)
    ]
    rates = [
        0.01,
        0.01,
        made.schedules.ExponentialDecay(0.02, 3, 0.8),
        made.schedules.CosineDecay(0.02, 10, warmup_target=0.03, warmup_steps=3),
        made.schedules.PiecewiseConstantDecay([2, 5], [0.02, 0.01, 0.005]),
        made.schedules.PolynomialDecay(0.02, 8),
    ]
    rate: Any = rates[rng.integers(len(rates))]
    kinds = [
        lambda: made.SGD(rate, **clip),
        lambda: made.SGD(rate, momentum=0.9, nesterov=bool(rng.integers(2)), **clip),
        lambda: made.Adam(rate, amsgrad=bool(rng.integers(2)), **clip),
        lambda: made.AdamW(rate, weight_decay=0.02, **clip),
        lambda: made.Adam(rate, epsilon=1e-4, **clip),
        lambda: made.RMSprop(rate, momentum=0.5, centered=bool(rng.integers(2)), **clip),
        lambda: made.Adagrad(rate, **clip),
        lambda: made.Adadelta(rate, **clip),
        lambda: made.Adamax(rate, **clip),
        lambda: made.Nadam(rate if isinstance(rate, float) else 0.01, **clip),
        lambda: made.Ftrl(rate, l1_regularization_strength=0.001, **clip),
        lambda: made.SGD(rate, weight_decay=0.01, **clip),
        lambda: made.Lamb(rate, **clip),
        lambda: made.Adafactor(rate, **clip),
    ]
    return kinds[rng.integers(len(kinds))]()
