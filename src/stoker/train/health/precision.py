"""Checks that the model's outputs are computed in float32; controls TF32."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from stoker.core.finding import Finding

_SMALL = ("float16", "bfloat16")

_SHAPES_ONLY = (
    keras.layers.Reshape,
    keras.layers.Flatten,
    keras.layers.Identity,
    keras.layers.Permute,
)
"""Layers that change no value: the layer before them matters."""


def apply_tf32(*, on: bool) -> None:
    """Let GPUs from Ampere on multiply float32 with 10 bits of mantissa, or not."""
    tf.config.experimental.enable_tensor_float_32_execution(on)


def check_outputs(model: keras.Model, answers: Any) -> Finding | None:
    """Warn if the last layer is not in float32 under a mixed policy.

    Args:
        model: The built model.
        answers: Its outputs for some batch, in the precision of training.

    Returns:
        A warning that names the layers whose 16-bit outputs reach the loss.
    """
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    if outputs:
        small = [path for output in outputs if (path := _small_layer(output))]
    else:
        dtypes = {keras.backend.standardize_dtype(a.dtype) for a in keras.tree.flatten(answers)}
        last = model.layers[-1].path if model.layers else model.name
        small = [f"{model.name} (its last layer is {last})"] if dtypes & set(_SMALL) else []
    if not small:
        return None
    return Finding(
        kind="output_precision",
        severity="warning",
        message=f"the model's outputs are computed in 16 bits by {', '.join(dict.fromkeys(small))}",
        fix='Give the last layer dtype="float32": a probability in bfloat16 has 3 digits, and the '
        "loss is computed from it.",
    )


def _small_layer(output: Any) -> str | None:
    """Return the layer that makes an output's values, if it computes in 16 bits."""
    operation, arguments = _maker(output)
    while _passes_on(operation) and arguments:
        operation, arguments = _maker(arguments[0])
    dtype = getattr(operation, "compute_dtype", None) or keras.backend.standardize_dtype(
        output.dtype
    )
    return getattr(operation, "path", operation.name) if dtype in _SMALL else None


def _maker(tensor: Any) -> tuple[Any, list[Any]]:
    history = tensor._keras_history  # noqa: SLF001 - Keras's own way from a tensor to its layer
    node = history.operation._inbound_nodes[history.node_index]  # noqa: SLF001
    return history.operation, list(node.input_tensors)


def _passes_on(operation: Any) -> bool:
    if isinstance(operation, keras.layers.Activation):
        return operation.activation is keras.activations.linear
    # Keras has no public class for `output[...]`.
    return isinstance(operation, _SHAPES_ONLY) or type(operation).__name__ == "GetItem"
