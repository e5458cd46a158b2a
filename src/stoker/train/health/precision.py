"""Checks 16-bit training: float32 outputs, and shapes that suit tensor cores. Sets TF32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from stoker.core.errors import Finding
from stoker.internals.keras_internals import inputs_of_layer, layer_of
from stoker.train.health.step_operations import StepOperation, named, step_operations

_SMALL = ("float16", "bfloat16")

_SHAPES_ONLY = (
    keras.layers.Reshape,
    keras.layers.Flatten,
    keras.layers.Identity,
    keras.layers.Permute,
)
"""Layers that change no value, so the check looks at the layer before them."""


def apply_tf32(*, on: bool) -> None:
    """Set whether GPUs (Ampere or newer) multiply float32 numbers with 10 bits of mantissa."""
    tf.config.experimental.enable_tensor_float_32_execution(on)


def check_outputs(model: keras.Model, answers: Any) -> Finding | None:
    """Warn if the last layer does not compute in float32 under a mixed policy.

    Args:
        model: The built model.
        answers: The model's outputs for some batch, in the precision of training.

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
    return Finding.warning(
        "output_precision",
        f"the model's outputs are computed in 16 bits by {', '.join(dict.fromkeys(small))}",
        fix='Give the last layer dtype="float32": a probability in bfloat16 has 3 digits, and the '
        "loss is computed from it.",
    )


def _small_layer(output: Any) -> str | None:
    """Return the path of the layer that computes an output's values, if it computes in 16 bits."""
    operation, arguments = _maker(output)
    while _passes_on(operation) and arguments:
        operation, arguments = _maker(arguments[0])
    dtype = getattr(operation, "compute_dtype", None) or keras.backend.standardize_dtype(
        output.dtype
    )
    return getattr(operation, "path", operation.name) if dtype in _SMALL else None


def _maker(tensor: Any) -> tuple[Any, list[Any]]:
    return layer_of(tensor), inputs_of_layer(tensor)


def _passes_on(operation: Any) -> bool:
    if isinstance(operation, keras.layers.Activation):
        return operation.activation is keras.activations.linear
    # `output[...]` changes no value either; compare its class by name, because the class is not public.
    return isinstance(operation, _SHAPES_ONLY) or type(operation).__name__ == "GetItem"


MULTIPLE = 8
"""Tensor cores need no padding if the sides of 16-bit matrix products are multiples of this.

Source: NVIDIA, Deep Learning Performance: Matrix Multiplication, "Tensor Core requirements".
"""

_PADDED_CHANNELS = 4
"""Maximum number of input channels (as of an image) that cuDNN pads efficiently itself."""

Side = tuple[str, int | None]
"""Name of a side of a product, and its length; None if the length is unknown in the traced graph."""


def check_tensor_cores(step: Any, *, batch_size: int) -> Finding | None:
    """Check every 16-bit matrix product and convolution of the forward pass.

    Args:
        step: The step's concrete function.
        batch_size: Number of samples of a replica in one pass.

    Returns:
        A warning that names layers and sides; None if all sides fit, or nothing is computed in 16 bits. An
        output layer in float32 is not checked. The check only reads shapes; it was not tried on a GPU.
    """
    misses: list[str] = []
    products = 0
    for operation in step_operations(step):
        if operation.is_gradient or not _in_16_bits(operation):
            continue
        sides = list(_sides(operation))
        products += bool(sides)
        wrong = [f"{length} {name}" for name, length in sides if length and length % MULTIPLE]
        if wrong:
            misses.append(f"{operation.scope or operation.kind} ({', '.join(wrong)})")
    if products and batch_size % MULTIPLE:
        misses.insert(0, f"train.batch_size ({batch_size})")
    if not misses:
        return None
    return Finding.warning(
        "tensor_cores",
        f"16-bit products have sides that are not multiples of {MULTIPLE}: {named(misses)}",
        fix=f"Round units, channels and batch size up to multiples of {MULTIPLE}.",
    )


def _in_16_bits(operation: StepOperation) -> bool:
    kinds = [tensor.dtype for tensor in operation.operation.inputs]
    return bool(kinds) and all(kind in (tf.float16, tf.bfloat16) for kind in kinds)


def _sides(operation: StepOperation) -> Iterator[Side]:
    inputs = operation.operation.inputs
    if len(inputs) != 2 or any(tensor.shape.rank is None for tensor in inputs):
        return
    left, right = (tensor.shape.as_list() for tensor in inputs)
    if operation.kind in ("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"):
        yield from _of_matrices(operation.operation, left, right)
    elif operation.kind in ("Conv2D", "Conv3D"):
        *_, channels, filters = right
        if channels is None or channels > _PADDED_CHANNELS:
            yield "input channels", channels
        yield "filters", filters
    elif operation.kind == "Einsum":
        yield from _of_einsum(operation.operation.get_attr("equation").decode(), left, right)


def _of_matrices(
    operation: tf.Operation, left: list[int | None], right: list[int | None]
) -> Iterator[Side]:
    plain = operation.type == "MatMul"
    turned = operation.get_attr("transpose_a" if plain else "adj_x")
    turned_right = operation.get_attr("transpose_b" if plain else "adj_y")
    yield "inputs", left[-2] if turned else left[-1]
    yield "units", right[-2] if turned_right else right[-1]
    if not plain:
        yield "rows", left[-1] if turned else left[-2]


def _of_einsum(equation: str, left: list[int | None], right: list[int | None]) -> Iterator[Side]:
    operands, _, result = equation.partition("->")
    first, _, second = operands.partition(",")
    if "." in equation:
        return
    lengths = dict(zip(second, right, strict=False)) | dict(zip(first, left, strict=False))
    shared = set(first) & set(second)
    # Several einsum labels with the same role form a single side of the product: multiply their lengths.
    roles = {
        "inputs": shared - set(result),
        "units": set(second) & set(result) - shared,
        "rows": set(first) & set(result) - shared,
    }
    for role, labels in roles.items():
        length: int | None = 1
        for label in labels:
            side = lengths[label]
            length = None if length is None or side is None else length * side
        yield role, length
