"""Computes TensorBoard data of a model: histograms of weights and gradients, graph, labeled embeddings.

The model does not change: neither weights nor seeds nor moving averages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from stoker.core.config import nearest
from stoker.core.errors import ConfigError
from stoker.data.features.preprocessing.transform import Transform
from stoker.data.user_dataset.features import AnyTransform
from stoker.telemetry.writers.summaries import Embedding, Histogram
from stoker.train.model.keras_model import walk_layers

BUCKETS = 30
"""Number of buckets of a histogram, TensorBoard's default."""

MAX_POINTS = 20_000
"""Maximum number of vectors of a layer in the projector: browsers cannot draw more smoothly. Vocabulary ids are
sorted by descending frequency, so the first ones are shown."""

LARGEST_CONSTANT_BYTES = 1 << 10
"""Maximum size of a constant in the graph, bytes. Larger ones are removed, because TensorBoard does not show
them."""

_LARGEST = 1e38
"""Half of the largest float32: values are limited to it, so that the width of a histogram cannot overflow."""


def weight_histograms(model: keras.Model) -> dict[str, Histogram]:
    """Return `weights/<path>` -> histogram, for every float weight."""
    return {
        # Read the first replica of this worker, so that no other worker must take part.
        f"weights/{variable.path}": histogram(
            getattr(variable.value, "values", [variable.value])[0]
        )
        for variable in model.weights
        if tf.as_dtype(variable.dtype).is_floating
    }


def gradients_of(model: keras.Model, loss_of: Callable[[], tf.Tensor]) -> dict[str, Any]:
    """Compute gradients with an additional pass; return path of the weight -> gradient.

    Args:
        model: The compiled model.
        loss_of: Computes the loss of a batch as in training; its writes to Keras variables (moving
            averages, seeds, metrics) are dropped.

    Returns:
        The gradients of all trainable weights on which the loss depends; for an Embedding, only of the rows
        in the batch.
    """
    state = [(v, tf.identity(v.value)) for v in model.variables]
    trainable = {id(v) for v in model.trainable_variables}
    with keras.StatelessScope(state_mapping=state), tf.GradientTape() as tape:
        watched = [(v, value) for v, value in state if id(v) in trainable]
        values = [value for _, value in watched]
        tape.watch(values)
        # Scale the loss as in training, because small gradients in float16 would be zero.
        scale = model.optimizer.scale_loss(tf.constant(1.0))
        loss = loss_of() * scale
    gradients = tape.gradient(loss, values)
    return {
        variable.path: _dense(gradient) / tf.cast(scale, gradient.dtype)
        for (variable, _), gradient in zip(watched, gradients, strict=True)
        if gradient is not None
    }


def gradient_histograms(gradients: Mapping[str, Any]) -> dict[str, Histogram]:
    """Return `gradients/<path>` -> histogram, for the result of `gradients_of`.

    Values that overflow are left out: in float16, before the loss scale has settled.
    """
    return {f"gradients/{path}": histogram(gradient) for path, gradient in gradients.items()}


def global_norm(gradients: Mapping[str, Any]) -> float:
    """Return the global norm of all gradients in the result of `gradients_of`; 0 without gradients."""
    if not gradients:
        return 0.0
    return float(tf.linalg.global_norm([tf.cast(g, tf.float32) for g in gradients.values()]))


def histogram(values: Any) -> Histogram:
    """Return the histogram of a tensor's finite values; without finite values, it has no buckets.

    Args:
        values: Floats of any shape; they stay on their device, which returns 30 counts.

    Returns:
        [buckets, 3]: left edge, right edge, count.
    """
    flat = tf.reshape(tf.cast(tf.convert_to_tensor(values), tf.float32), [-1])
    low, high, counts = (part.numpy() for part in _counted(flat))
    if not counts.any():
        return np.zeros((0, 3))
    if low == high:
        return np.array([[low - 0.5, high + 0.5, counts.sum()]], np.float64)
    edges = np.linspace(float(low), float(high), BUCKETS + 1)
    return np.stack([edges[:-1], edges[1:], counts.astype(np.float64)], axis=1)


@tf.function(input_signature=[tf.TensorSpec([None], tf.float32)], autograph=False)
def _counted(flat: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    finite = tf.boolean_mask(flat, tf.math.is_finite(flat))
    finite = tf.clip_by_value(finite, -_LARGEST, _LARGEST)

    def of_some() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        low, high = tf.reduce_min(finite), tf.reduce_max(finite)
        # `histogram_fixed_width` refuses values that are all equal, so they get a single bucket.
        places = tf.math.divide_no_nan(finite - low, high - low) * BUCKETS
        buckets = tf.minimum(tf.cast(places, tf.int32), BUCKETS - 1)
        return low, high, tf.math.bincount(buckets, minlength=BUCKETS, maxlength=BUCKETS)

    def of_none() -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        return tf.constant(0.0), tf.constant(0.0), tf.zeros([BUCKETS], tf.int32)

    found: tuple[tf.Tensor, tf.Tensor, tf.Tensor] = tf.cond(tf.size(finite) > 0, of_some, of_none)
    return found


def graph_bytes(graph: tf.Graph) -> bytes:
    """Serialize a graph for TensorBoard's plugin, without large constants."""
    graph_def = graph.as_graph_def(add_shapes=True)
    nodes = [*graph_def.node, *(n for f in graph_def.library.function for n in f.node_def)]
    for node in nodes:
        if node.op == "Const" and node.attr["value"].ByteSize() > LARGEST_CONSTANT_BYTES:
            node.attr["value"].tensor.tensor_content = b""
            for name in ("float_val", "int_val", "int64_val", "string_val", "half_val"):
                node.attr["value"].tensor.ClearField(name)
    return bytes(graph_def.SerializeToString(deterministic=True))


def embeddings_of(
    model: keras.Model, chosen: Mapping[str, Sequence[str] | None]
) -> list[Embedding]:
    """Return the current vectors of some layers.

    Args:
        model: A model with Embedding layers, which may be nested.
        chosen: Path of a layer (its name, if it is not nested) -> the terms of its first ids, or None for
            no labels. Later ids are buckets for unknown words.

    Raises:
        ConfigError: The Embedding layer does not exist; the error suggests a similar name.
    """
    layers = {
        path: layer
        for path, layer in walk_layers(model)
        if isinstance(layer, keras.layers.Embedding)
    }
    found = []
    for name, terms in chosen.items():
        if name not in layers:
            raise ConfigError(
                "train.tensorboard.embeddings must name Embedding layers of the model",
                got=name,
                fix=nearest(name, layers),
            )
        vectors = layers[name].embeddings.value[:MAX_POINTS]
        vectors = np.asarray(tf.cast(vectors, tf.float32).numpy())
        labels = None if terms is None else _labels(terms, len(vectors))
        found.append(Embedding(name=name, vectors=vectors, labels=labels))
    return found


def _labels(terms: Sequence[str], points: int) -> list[str]:
    outside = [f"[outside {index}]" for index in range(points - len(terms))]
    return [*terms, *outside][:points]


def _dense(gradient: Any) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def vocabulary_terms(transform: AnyTransform, name: str) -> list[str]:
    """Return the terms of a vocabulary in the order of their ids.

    Args:
        transform: The transform that contains the vocabulary.
        name: A feature that is made with the vocabulary, or its `vocab_filename`.

    Raises:
        ConfigError: The vocabulary does not exist; the error suggests a similar name.
    """
    # This call raises an error that says what is wrong with the name.
    transform.output.vocabulary_size(name)
    if not isinstance(transform, Transform):
        raise RuntimeError("only Stoker's own transform has vocabularies")
    spec = transform.spec
    ids = spec.ids.get(name)
    vocabulary = spec.vocabularies[ids.vocabulary if ids and ids.vocabulary else name]
    return [term.decode(errors="replace") for term in vocabulary.read(transform.root)]
