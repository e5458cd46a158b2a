"""Finds the layer with the first value that is not finite: runs a step's batch again, eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import keras
import numpy as np
import tensorflow as tf

from stoker.internals.keras_internals import get_keras_mask, set_keras_mask
from stoker.train.model.keras_model import walk_layers
from stoker.train.model.remat import plain_call

SHOWN_ROWS = 8
"""Maximum number of rows that an error names: enough to look at, and short enough for one line."""

Place = Literal["feature", "label", "sample weight", "weight", "output", "loss", "gradient"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BadValues:
    """The first values of a step that are not finite."""

    place: Place
    """What contains the values. `gradient`: the gradient of a layer's inputs or weights, if the layer's
    outputs and their gradient are finite."""

    name: str
    """Name of the feature, or path of the layer or weight."""

    nan_share: float
    """Share of the values that are NaN."""

    infinite_share: float
    """Share of the values that are infinite."""

    least: float | None
    """Smallest finite value; None if there is none."""

    most: float | None
    """Largest finite value; None if there is none."""

    dtype: str
    """Dtype of the values."""

    rows: tuple[int, ...] = ()
    """Rows of the batch that contain the values, at most `SHOWN_ROWS`; empty if the values have no rows."""


def first_bad_values(
    model: keras.Model, batch: Sequence[Any], *, adapt: Callable[[Any], Any]
) -> BadValues | None:
    """Run forward and backward pass of a batch again, and check every value.

    Nothing is changed: weights, BatchNorm's averages and seeds stay as they are. The activations of the
    whole batch are in memory.

    Args:
        model: A built, compiled model, in the state before the step: functional, Sequential or subclassed.
        batch: Features, labels and optionally weights.
        adapt: Converts features to the model's input.

    Returns:
        The first values that are not finite: in the batch, in a weight, in the output of the first layer
        with such an output, in the loss, or in a gradient, of the first such layer from the loss
        backwards. None if all values of this run are finite; the cause is then XLA's order of operations,
        or another replica's batch.
    """
    features, labels, *weights = batch
    given: list[tuple[Place, Any]] = [("feature", features), ("label", labels)]
    given += [("sample weight", weight) for weight in weights]
    rows = _row_count(labels)
    for place, structure in given:
        for name, tensor in _named(structure, place):
            if not _is_finite(tensor):
                return _bad(place, name, tensor, rows)
    for variable in model.variables:
        if not _is_finite(variable.value):
            return _bad("weight", variable.path, tf.convert_to_tensor(variable.value), None)
    loss_arguments = {"x": features, "y": labels, "sample_weight": weights[0] if weights else None}
    return _run_again(model, adapt(features), loss_arguments, rows)


@dataclass(kw_only=True, slots=True)
class _Call:
    """A call of a layer. `begin` and `end` are running numbers, which show which calls contain other calls."""

    path: str
    layer: Any
    begin: int
    inputs: list[tf.Tensor] = field(default_factory=list)
    outputs: list[tf.Tensor] = field(default_factory=list)
    end: int = 0

    def contains(self, other: _Call) -> bool:
        return self.begin < other.begin and other.end < self.end


def _run_again(
    model: keras.Model, inputs: Any, loss_arguments: dict[str, Any], rows: int | None
) -> BadValues | None:
    calls: list[_Call] = []
    weights = [variable.value for variable in model.trainable_variables]
    # The scope keeps all changes of variables, and drops them at its end.
    with tf.GradientTape() as tape, keras.StatelessScope(), _watched(model, calls):
        answers = model(inputs, training=True)
        loss = model.compute_loss(**loss_arguments, y_pred=answers, training=True)
        scaled = model.optimizer.scale_loss(loss) if model.optimizer else loss
    for call in calls:
        for tensor in call.outputs:
            if not _is_finite(tensor):
                return _bad("output", call.path, tensor, rows)
    for name, tensor in _named(answers, model.name):
        if not _is_finite(tensor):
            return _bad("output", name, tensor, rows)
    if not _is_finite(loss):
        return _bad("loss", "loss", loss, None)
    flat = [tensor for _, tensor in _named(answers, model.name)]
    sources = [*flat, *weights, *(t for call in calls for t in (*call.outputs, *call.inputs))]
    by_id = {
        id(source): gradient
        for source, gradient in zip(sources, tape.gradient(scaled, sources), strict=True)
    }
    return _first_backwards(calls, flat, by_id, rows)


def _first_backwards(
    calls: list[_Call], answers: list[tf.Tensor], gradients: dict[int, Any], rows: int | None
) -> BadValues | None:
    for tensor in answers:
        gradient = gradients[id(tensor)]
        if not _is_finite(gradient):
            return _bad("loss", "gradient of the loss by the model's output", gradient, rows)
    bad_calls = [call for call in reversed(calls) if _makes_gradient_bad(call, gradients)]
    if bad_calls:
        # If a layer inside a block is bad, so is the block; the innermost one is the most specific.
        innermost = bad_calls[0]
        for call in bad_calls:
            if innermost.contains(call):
                innermost = call
        return _bad("gradient", innermost.path, _bad_of(_passed_back(innermost, gradients)), rows)
    for call in reversed(calls):
        reached = [gradients[id(tensor)] for tensor in call.outputs]
        if not all(map(_is_finite, reached)):
            return _bad("gradient", f"what follows {call.path}", _bad_of(reached), rows)
    return None


def _makes_gradient_bad(call: _Call, gradients: dict[int, Any]) -> bool:
    reached = [gradients[id(tensor)] for tensor in call.outputs]
    passed = _passed_back(call, gradients)
    return all(map(_is_finite, reached)) and not all(map(_is_finite, passed))


def _passed_back(call: _Call, gradients: dict[int, Any]) -> list[Any]:
    own = [variable.value for variable in getattr(call.layer, "trainable_variables", ())]
    return [gradients.get(id(tensor)) for tensor in (*call.inputs, *own)]


@contextmanager
def _watched(model: keras.Model, calls: list[_Call]) -> Iterator[None]:
    """In the `with` block, record the inputs and outputs of each call of each layer."""
    ticks = iter(range(10**12))
    operations = {id(layer): (path, layer) for path, layer in walk_layers(model)}
    for outer in (model, *(layer for _, layer in operations.values())):
        # A functional model also contains operations that are not layers: `a + b`, keras.ops.log.
        for operation in getattr(outer, "operations", ()):
            operations.setdefault(id(operation), (operation.name, operation))
    with ExitStack() as stack:
        for path, operation in list(operations.values()):
            kept = vars(operation).get("call")
            operation.call = _recording(path, operation, calls, ticks)
            stack.callback(_put_back, operation, kept)
        yield


def _put_back(operation: Any, kept: Callable[..., Any] | None) -> None:
    if kept is None:
        del operation.call
    else:
        operation.call = kept


def _recording(
    path: str, operation: Any, calls: list[_Call], ticks: Iterator[int]
) -> Callable[..., Any]:
    # Use the original `call`, because a rematerialized one would hide the layers inside.
    plain = plain_call(operation)

    def call(*args: Any, **kwargs: Any) -> Any:
        one = _Call(path=path, layer=operation, begin=next(ticks))
        # Copy the input, so that the copy's gradient contains only what this call passes back.
        args, kwargs = tf.nest.map_structure(_copied, (args, kwargs))
        one.inputs = _floats((args, kwargs))
        outputs = plain(*args, **kwargs)
        one.outputs, one.end = _floats(outputs), next(ticks)
        calls.append(one)
        return outputs

    return call


def _copied(value: Any) -> Any:
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value
    copy = tf.identity(value)
    mask = get_keras_mask(value)
    if mask is not None:
        set_keras_mask(copy, mask)
    return copy


def _floats(structure: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [t for t in flat if isinstance(t, tf.Tensor) and t.dtype.is_floating]


def _named(structure: Any, default_name: str) -> list[tuple[str, tf.Tensor]]:
    found = []
    for path, value in keras.tree.flatten_with_path(structure):
        name = "/".join(str(part) for part in path) or default_name
        found += [(name, tensor) for tensor in _floats(value)]
    return found


def _row_count(labels: Any) -> int | None:
    shapes = [tensor.shape for tensor in tf.nest.flatten(labels, expand_composites=True)]
    return int(shapes[0][0]) if shapes and shapes[0].rank else None


def _is_finite(values: Any) -> bool:
    if values is None:
        return True
    tensor = tf.convert_to_tensor(getattr(values, "values", values))
    return not tensor.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(tensor)))


def _bad_of(tensors: Sequence[Any]) -> Any:
    return next(tensor for tensor in tensors if not _is_finite(tensor))


def _bad(place: Place, name: str, tensor: Any, rows: int | None) -> BadValues:
    dtype = tensor.dtype.name
    values = np.asarray(tf.cast(tf.convert_to_tensor(tensor), tf.float64))
    finite = np.isfinite(values)
    has_rows = values.ndim > 0 and values.shape[0] == rows
    bad_rows = np.flatnonzero(~finite.reshape(rows, -1).all(axis=1)) if has_rows else np.array([])
    return BadValues(
        place=place,
        name=name,
        nan_share=float(np.isnan(values).mean()),
        infinite_share=float(np.isinf(values).mean()),
        least=float(values[finite].min()) if finite.any() else None,
        most=float(values[finite].max()) if finite.any() else None,
        dtype=dtype,
        rows=tuple(int(row) for row in bad_rows[:SHOWN_ROWS]),
    )
