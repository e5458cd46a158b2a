"""The models that are trained, and data in memory that they can learn from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from numpy.typing import NDArray

CLASSES = 10
INPUTS = "inputs"
"""Name of the one feature."""

BATCHES = 32
"""Different batches; they come again and again."""

WORDS, LENGTH, WIDTH = 1000, 32, 64
"""The transformer's vocabulary, words a text, and width."""

Body = Callable[[Any], Any]
"""The input -> what the last layer sees."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A model and its data."""

    body: Body
    shape: tuple[int, ...]
    """Of one sample."""

    batch_size: int
    dtype: str = "float32"
    tolerance: float = 0.05
    """Most by which losses may differ after equally many steps; they begin at log(10) = 2.3."""


def dense(*widths: int) -> Body:
    """A perceptron."""

    def body(x: Any) -> Any:
        for width in widths:
            x = layers.Dense(width, activation="relu")(x)
        return x

    return body


def convolutions(x: Any) -> Any:
    """Two blocks of two convolutions with BatchNorm."""
    for filters in (16, 32):
        for _ in range(2):
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization()(x))
        x = layers.MaxPooling2D()(x)
    return layers.GlobalAveragePooling2D()(x)


def encoder(x: Any) -> Any:
    """Two blocks of a transformer encoder."""
    x = layers.Embedding(WORDS, WIDTH)(x)
    for _ in range(2):
        seen = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(num_heads=4, key_dim=WIDTH // 4)(seen, seen)
        seen = layers.LayerNormalization()(x)
        x = x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, activation="gelu")(seen))
    return layers.GlobalAveragePooling1D()(x)


TASKS = {
    # What rows of a table are usually trained with.
    "table_mlp": Task(body=dense(64, 32), shape=(16,), batch_size=256),
    "mlp": Task(body=dense(256, 128), shape=(784,), batch_size=64),
    "wide_mlp": Task(body=dense(1024, 1024), shape=(784,), batch_size=64),
    "cnn": Task(body=convolutions, shape=(32, 32, 3), batch_size=32),
    # A word comes twice in a batch: Keras 3.15's Adam squares the parts of its gradient one by one,
    # ours their sum, so that the same steps lead elsewhere. Without that sum losses were equal.
    "transformer": Task(body=encoder, shape=(LENGTH,), batch_size=64, dtype="int32", tolerance=0.2),
}


def compiled(task: Task, features: dict[str, Any], **settings: Any) -> keras.Model:
    """The compiled model.

    Args:
        task: Which.
        features: Name -> `keras.Input`.
        settings: More of `keras.Model.compile`.
    """
    x = layers.Dense(CLASSES, dtype="float32")(task.body(features[INPUTS]))
    model = keras.Model(features, x)
    model.compile(
        optimizer=keras.optimizers.Adam(1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        **({"jit_compile": False} | settings),
    )
    return model


def keras_inputs(task: Task) -> dict[str, Any]:
    """What `compiled` takes, as Keras's own users make it."""
    return {INPUTS: keras.Input(task.shape, dtype=task.dtype, name=INPUTS)}


def make_data(task: Task, *, rows: int, count: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Batches of samples that stand around one of their class, with much noise.

    Returns:
        [count, rows, ...] samples and [count, rows] classes.
    """
    rng = np.random.default_rng(0)
    label = rng.integers(0, CLASSES, (count, rows))
    if task.dtype == "int32":
        own = rng.integers(0, WORDS, (CLASSES, 64))
        words = own[label[..., None], rng.integers(0, 64, (count, rows, *task.shape))]
        others = rng.integers(0, WORDS, words.shape)
        return np.where(rng.random(words.shape) < 0.2, words, others).astype(np.int32), label
    noise = rng.standard_normal((count, rows, *task.shape), dtype=np.float32)
    if len(task.shape) == 1:
        return noise + rng.normal(0, 0.1, (CLASSES, *task.shape)).astype(np.float32)[label], label
    height, width, channels = task.shape
    texture = rng.normal(0, 0.5, (CLASSES, 4, 4, channels)).astype(np.float32)
    return noise + np.tile(texture, (1, height // 4, width // 4, 1))[label], label


def make_batches(
    task: Task, *, rows: int | None = None, count: int = BATCHES
) -> tf.data.Dataset[Any]:
    """Complete batches in memory: input costs no contestant anything.

    Args:
        task: Whose.
        rows: Rows a batch; the task's own by default.
        count: Different batches.
    """
    samples, label = make_data(task, rows=rows or task.batch_size, count=count)
    elements: Any = ({INPUTS: samples}, label)
    return tf.data.Dataset.from_tensor_slices(elements)


def mean_loss(model: keras.Model, batches: tf.data.Dataset[Any]) -> float:
    """The compiled loss over batches, as inference sees it."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return float(np.mean([loss(y, model(x, training=False)) for x, y in batches]))
