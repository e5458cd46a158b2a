"""Trace `preprocessing_fn` once, with the analyzer results known so far as constants."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.user_code import call
from stoker.data.columns import PADDING
from stoker.data.dataset import Dataset
from stoker.data.features.image_decoding import decode_images
from stoker.data.features.preprocessing.trace import Trace, sources, tracing
from stoker.data.sources.config import leaving_out

PreprocessingFn = Callable[[dict[str, tf.Tensor]], Mapping[str, tf.Tensor]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The inputs of a transform."""

    dataset: Dataset
    """The raw columns, and the shape that images are converted to."""

    function: PreprocessingFn | None
    """The user's function; None: every column is passed on unchanged."""

    labels: tuple[str, ...]
    """Names of what the model learns: an output of the function or, if no output has this name, a raw column."""

    label_only: tuple[str, ...]
    """Raw columns that serving will not have; a label that is a raw column is always one of them."""

    weights: tuple[str, ...] = ()
    """Name of an output or, if no output has this name, of a raw column, with each row's weight; or empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedFunction:
    """The result of one trace."""

    wrapped: Any
    """The traced function; `prune(feeds, fetches)` cuts out a part of it."""

    raw: dict[str, tf.Tensor]
    """Raw column -> its placeholder."""

    decoded: dict[str, tf.Tensor]
    """Image column -> [batch, height, width, channels] uint8, as the function gets it."""

    lists: dict[str, tf.RaggedTensor]
    """Column of lists of varying length -> ragged tensor, as the function gets it."""

    features: dict[str, tf.Tensor]
    """Outputs by name, without labels and weight."""

    labels: dict[str, tf.Tensor]
    """Label -> its tensor, int64 or float32."""

    classes_calls: dict[str, int]
    """Label of strings -> index of the analyzer call for its classes."""

    weights: dict[str, tf.Tensor]
    """Name of the weight -> [batch] float32; empty if all rows have equal weight."""

    trace: Trace
    """The analyzer calls, and the known ids."""


class RawInputs(dict[str, Any]):
    """The columns by name; the error for an unknown name suggests the most similar name."""

    def __missing__(self, name: str) -> Any:
        """Refuse a column that the data does not have."""
        raise ConfigError(
            "preprocessing_fn must use only columns that the data has",
            got=name,
            fix=nearest(str(name), self),
        )


def trace_function(
    plan: Plan, *, answers: Sequence[Any], requests: Sequence[Any], objects: list[Any]
) -> TracedFunction:
    """Trace the user's function.

    Args:
        plan: The function, and the dataset and columns to trace it with.
        answers: See `Trace`.
        requests: See `Trace`.
        objects: See `Trace`; created tables are added.

    Raises:
        ConfigError: the function raises, or returns something that cannot be a feature or a label.
    """
    found: dict[str, Any] = {}
    columns = plan.dataset.columns

    def body(*raw: tf.Tensor) -> list[tf.Tensor]:
        graph = tf.compat.v1.get_default_graph()
        trace = Trace(graph, answers=answers, requests=requests, objects=objects)
        placeholders = {column.name: tensor for column, tensor in zip(columns, raw, strict=True)}
        with tracing(trace):
            decoded = _decoded(plan.dataset, placeholders)
            lists = {c.name: unpadded(placeholders[c.name]) for c in columns if c.is_ragged}
            inputs = RawInputs(placeholders | decoded | lists)
            outputs = _outputs(plan, inputs)
            _require_width(outputs, {name: placeholders[name] for name in lists})
            labels, classes_calls = _labels(plan, trace, outputs, inputs)
            weights = {name: _weight(name, outputs, inputs) for name in plan.weights}
        not_features = {*plan.labels, *plan.weights}
        features = {name: tensor for name, tensor in outputs.items() if name not in not_features}
        found.update(raw=placeholders, decoded=decoded, lists=lists)
        found.update(features=features, labels=labels)
        found.update(trace=trace, classes_calls=classes_calls, weights=weights)
        return [*features.values(), *labels.values(), *weights.values()]

    # Raw names may contain characters that a graph does not allow.
    specs = [
        tf.TensorSpec([None, *column.shape], tf.as_dtype(column.tensor_dtype), name=f"c{index}")
        for index, column in enumerate(columns)
    ]
    wrapped = tf.compat.v1.wrap_function(body, specs)
    _refuse_what_cannot_be_served(wrapped.graph)
    return TracedFunction(wrapped=wrapped, **found)


def unpadded(padded: tf.Tensor) -> tf.RaggedTensor:
    """Convert padded lists to ragged lists, without the missing values at their ends.

    Args:
        padded: [batch, longest list] int64, float32 or strings; see `stoker.data.columns`.

    Returns:
        [batch, None] of the same type.
    """
    if padded.dtype.is_floating:
        present = tf.logical_not(tf.math.is_nan(padded))
    else:
        present = tf.not_equal(padded, PADDING[padded.dtype.name])
    places = tf.range(1, tf.shape(padded)[1] + 1)
    lengths = tf.reduce_max(tf.where(present, places, 0), axis=1)
    # The maximum over an empty axis is the lowest number of the type.
    ragged: Any = tf.RaggedTensor
    return ragged.from_tensor(padded, lengths=tf.maximum(lengths, 0))


_PYTHON_OPS = {"PyFunc", "EagerPyFunc", "PyFuncStateless"}
_RANDOM_OPS = {
    *("RandomUniform", "RandomUniformInt", "RandomStandardNormal", "TruncatedNormal"),
    *("RandomShuffle", "Multinomial", "RandomGamma", "RandomPoissonV2"),
}


def _refuse_what_cannot_be_served(graph: tf.Graph) -> None:
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(n for f in definition.library.function for n in f.node_def)]
    for node in nodes:
        if node.op in _PYTHON_OPS:
            raise ConfigError(
                "preprocessing_fn must use only TensorFlow operations, because a server runs nothing else",
                got=Plain(f"a Python function ({node.op}, {node.name})"),
                fix="Write it with tf.* instead of tf.numpy_function or tf.py_function.",
            )
        if node.op in _RANDOM_OPS:
            raise ConfigError(
                "preprocessing_fn must give the same outputs for the same row",
                got=Plain(f"a random operation ({node.op}, {node.name})"),
                fix="Put random operations into the model, e.g. a keras.layers.Random* layer.",
            )


def _decoded(dataset: Dataset, raw: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    if dataset.image is None:
        return {}
    return {
        column.name: decode_images(raw[column.name], dataset.image)
        for column in dataset.columns
        if column.dtype == "image"
    }


def _outputs(plan: Plan, inputs: RawInputs) -> dict[str, tf.Tensor]:
    if plan.function is None:
        left_out = {
            *plan.labels,
            *plan.label_only,
            *plan.weights,
            "path" if plan.dataset.image else None,
        }
        outputs = {name: inputs[name] for name in inputs if name not in left_out}
        for name, tensor in outputs.items():
            if isinstance(tensor, tf.RaggedTensor):
                raise ConfigError(
                    f"lists of varying length (column {name!r}) must be made dense before a model can "
                    "take them",
                    got=Plain("no preprocessing function"),
                    fix=f"Set {leaving_out(name)}, or name a function under `preprocessing`: "
                    + _made_dense(f'inputs["{name}"]', tensor.dtype),
                )
    else:
        outputs = _checked(plan.function, _called(plan.function, inputs), inputs)
    # `prune` needs a separate tensor for an output that is also an input, or that appears twice.
    return {name: tf.identity(tensor) for name, tensor in outputs.items()}


def _called(function: PreprocessingFn, inputs: RawInputs) -> Any:
    try:
        # AutoGraph has nothing to convert here, but would wrap our errors in its own.
        plain = tf.autograph.experimental.do_not_convert(function)
        return call(plain, inputs, what="preprocessing_fn")
    except UserError as error:
        if error.__cause__ is None:  # raised by Stoker: the error does not name the user's line yet
            error.rule = f"{error.rule} ({raised_at(error, function)})"
            error.args = (error.line(),)
        raise


def _checked(function: PreprocessingFn, outputs: Any, inputs: RawInputs) -> dict[str, tf.Tensor]:
    place = defined_at(function)
    if not isinstance(outputs, Mapping):
        raise ConfigError(
            f"preprocessing_fn must return a dict of tensors ({place})",
            got=Plain(type(outputs).__name__),
            fix='Write `return {"name": tensor, ...}`.',
        )
    for name, tensor in outputs.items():
        problem = _problem(name, tensor)
        if problem:
            fix = "Fix that output, or leave it out."
            if isinstance(tensor, tf.RaggedTensor):
                problem += _columns_of(tensor, inputs)
                fix = f"Make it dense: {_made_dense('x', tensor.dtype)}"
            raise ConfigError(
                f"preprocessing_fn must return dense tensors with one row per record ({place})",
                got=Plain(f"{name!r}: {problem}"),
                fix=fix,
            )
    return dict(outputs)


def _made_dense(lists: str, dtype: tf.DType) -> str:
    """Return a message on how to make lists dense; `lists` is the code that stands for the lists in it."""
    if dtype == tf.string:
        return (
            f"`st.hash_strings({lists}, 1000).to_tensor(0, shape=[None, 20])` gives a number for each "
            "of the first 20 strings of a list, padded with 0."
        )
    return (
        f"`{lists}.to_tensor(0, shape=[None, 20])` gives the first 20 values of each list, padded with "
        f"0; `tf.reduce_sum({lists}, axis=1)` gives their sum."
    )


def _columns_of(ragged: tf.RaggedTensor, inputs: RawInputs) -> str:
    """Return the list columns from which a ragged tensor is computed, for a message."""
    lists = {name: each for name, each in inputs.items() if isinstance(each, tf.RaggedTensor)}
    made_of = sources([ragged.flat_values])
    names = [name for name, each in lists.items() if sources([each.flat_values]) & made_of]
    return f", computed from {' and '.join(map(repr, names))}" if names else ""


def _require_width(outputs: Mapping[str, tf.Tensor], lists: Mapping[str, tf.Tensor]) -> None:
    """Refuse outputs whose width depends on the longest list of the batch."""
    for name, tensor in outputs.items():
        columns = sources([tensor]) & {raw.op.name for raw in lists.values()}
        if columns and None in tensor.shape[1:].as_list():
            column = next(key for key, raw in lists.items() if raw.op.name in columns)
            raise ConfigError(
                f"output {name!r} of preprocessing_fn must have the same shape in every batch",
                got=Plain(
                    f"{tensor.shape}, as wide as the longest list of {column!r} in the batch"
                ),
                fix="Give the width, e.g. x.to_tensor(0, shape=[None, 20]), or reduce over axis 1.",
            )


def _problem(name: object, tensor: Any) -> str:
    if not isinstance(name, str):
        return "a name that is not a string"
    if not isinstance(tensor, tf.Tensor) or tensor.dtype == tf.resource:
        return type(tensor).__name__
    if getattr(tensor, "graph", None) is not tf.compat.v1.get_default_graph():
        return "a tensor that does not depend on the inputs"
    if tensor.shape.rank is None:
        return "a tensor whose number of dimensions is not known (use tf.ensure_shape)"
    if tensor.shape.rank == 0 or tensor.shape[0] is not None:
        return f"shape {tensor.shape}, whose first dimension is not the batch"
    return ""


def _labels(
    plan: Plan, trace: Trace, outputs: dict[str, tf.Tensor], inputs: RawInputs
) -> tuple[dict[str, tf.Tensor], dict[str, int]]:
    """Return the labels as numbers, and the analyzer calls for the classes of string labels."""
    labels: dict[str, tf.Tensor] = {}
    classes_calls: dict[str, int] = {}
    for name in plan.labels:
        found = _label(name, outputs, inputs)
        labels[name], classes_call = _label_as_number(trace, found)
        if classes_call is not None:
            classes_calls[name] = classes_call
    return labels, classes_calls


def _label(name: str, outputs: dict[str, tf.Tensor], inputs: RawInputs) -> tf.Tensor:
    if name in outputs:
        return outputs[name]
    if name in inputs:
        return _raw_label(name, inputs[name])
    raise ConfigError(
        "label must be a raw column or an output of preprocessing_fn",
        got=name,
        fix=nearest(name, dict.fromkeys([*inputs, *outputs])),
    )


def _weight(
    name: str, outputs: Mapping[str, tf.Tensor], inputs: Mapping[str, tf.Tensor]
) -> tf.Tensor:
    if name not in {**inputs, **outputs}:
        raise ConfigError(
            "train.sample_weight must be a raw column or an output of preprocessing_fn",
            got=name,
            fix=nearest(name, {**inputs, **outputs}),
        )
    weight = outputs[name] if name in outputs else inputs[name]
    if not (weight.dtype.is_floating or weight.dtype.is_integer):
        raise ConfigError(
            "train.sample_weight must be a column or output of numbers",
            got=Plain(f"{name!r}, which holds {weight.dtype.name}"),
            fix="Convert it to numbers in preprocessing_fn, e.g. with tf.where or tf.cast.",
        )
    if weight.shape.rank == 2 and weight.shape[1] == 1:
        weight = tf.reshape(weight, [-1])
    if weight.shape.rank != 1:
        raise ConfigError(
            "train.sample_weight must be one number per row",
            got=Plain(f"{name!r}, of shape {weight.shape}"),
            fix="Reduce it to one number in preprocessing_fn, e.g. with tf.reduce_mean(..., axis=1).",
        )
    # A separate tensor, because the output may also be a label.
    return tf.identity(tf.cast(weight, tf.float32))


def _raw_label(name: str, column: tf.Tensor) -> tf.Tensor:
    """Return a raw column as the label."""
    if column.shape.rank == 2 and column.shape[1] == 1:
        return tf.reshape(column, [-1])
    if isinstance(column, tf.RaggedTensor):
        raise ConfigError(
            "a raw column that is the label must hold one value per record",
            got=Plain(f"{name!r}, which holds lists of varying length"),
            fix="Compute the label from it in preprocessing_fn, e.g. "
            f'{{"answer": tf.reduce_max(inputs[{name!r}], axis=1)}}, and set label: answer.',
        )
    if column.shape.rank == 2:
        raise ConfigError(
            "a raw column that is the label must hold one value per record",
            got=Plain(f"{name!r}, which holds vectors of length {column.shape[1]}"),
            fix="Compute the label from it in preprocessing_fn, e.g. "
            f'{{"answer": tf.argmax(inputs[{name!r}], axis=1)}}, and set label: answer. If several '
            f'labels can be true at once, return {{"answer": inputs[{name!r}]}}.',
        )
    return tf.identity(column)


def _label_as_number(trace: Trace, label: tf.Tensor) -> tuple[tf.Tensor, int | None]:
    """Return the label as int64 or float32, and the call for its classes.

    A string becomes its index among the training split's sorted distinct strings.
    """
    if label.dtype == tf.string:
        call = trace.request("classes", label)
        classes = trace.answer(call)
        if classes is None:
            return tf.zeros_like(label, tf.int64) + tf.cast(
                trace.calls[call].placeholder, tf.int64
            ), call
        return trace.track(lambda: class_table(classes)).lookup(label), call
    if label.dtype.is_floating:
        return tf.cast(label, tf.float32), None
    return tf.cast(label, tf.int64), None


def class_table(classes: Sequence[bytes]) -> Any:
    """Return a table from class name to id; -1 for classes that the training split does not have."""
    return tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(
            tf.constant(list(classes), tf.string), tf.range(len(classes), dtype=tf.int64)
        ),
        default_value=-1,
    )


def defined_at(function: Callable[..., Any]) -> str:
    """Return where a function begins, such as `model.py, line 12`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return _shown(code.co_filename, code.co_firstlineno) if code else repr(function)


def raised_at(error: BaseException, function: Callable[..., Any]) -> str:
    """Return where an error was raised: the deepest line of its traceback in the function's own file."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code and frame.filename == code.co_filename]
    return _shown(own[-1].filename, own[-1].lineno or 0) if own else defined_at(function)


def _shown(file: str, line: int) -> str:
    return f"{Path(file).name}, line {line}"
