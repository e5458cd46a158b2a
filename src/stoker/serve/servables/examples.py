"""Classification and regression of serialized `tf.train.Example`s, independent of the protocol.

Source of the checks, their order and messages: TensorFlow Serving, `classifier.cc` and `regressor.cc`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2

from stoker.serve.errors import Code, ServeError

CLASSIFY = "tensorflow/serving/classify"
"""The method name of signatures and tasks that classify."""

REGRESS = "tensorflow/serving/regress"
"""The method name of signatures and tasks that regress."""

INPUT = "inputs"
"""Name of the only input of such signatures: serialized Examples, of shape [rows]."""

CLASSES, SCORES = "classes", "scores"
OUTPUTS = "outputs"

_MAX_CONTEXT_BYTES = 256 << 20
"""Maximum bytes of all copies of the context, one for each Example, so that a small body cannot fill the memory."""

Classes = list[tuple[bytes, float]]
"""The label and the score of each class, for one row."""

Outputs = Mapping[str, np.ndarray[Any, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A signature to run on the Examples."""

    method: str
    """`CLASSIFY` or `REGRESS`."""

    signature: str
    """The signature's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Inferred:
    """The answer to a task. Either `classes` or `values` is set."""

    task: Task
    """The task."""

    classes: Sequence[Classes] = ()
    """For a classification: the classes of each row."""

    values: Sequence[float] = ()
    """For a regression: the value of each row."""


def joined_examples(examples: Sequence[bytes], *, context: bytes = b"") -> np.ndarray[Any, Any]:
    """Return the Examples as the input of a signature, each preceded by the context.

    Protobuf reads two concatenated messages as one message with the fields of both. If both have a feature, the
    Example's feature is used.

    Raises:
        ServeError: the request has no Example.
    """
    if not examples:
        raise _invalid("Input is empty.")
    if len(context) * len(examples) > _MAX_CONTEXT_BYTES:
        raise _invalid(
            f"The context must have at most {_MAX_CONTEXT_BYTES:,} bytes over all examples"
        )
    array = np.empty(len(examples), dtype=object)
    array[:] = [context + example for example in examples]
    return array


def check_signature(task: Task, definition: meta_graph_pb2.SignatureDef, *, by_name: bool) -> None:
    """Check a signature against the needs of its task.

    Args:
        task: The task.
        definition: The signature in the SavedModel.
        by_name: Whether the signature's method name must match the task. TensorFlow 2 names every method `predict`, so
            TensorFlow Serving does not require a match by default.

    Raises:
        ServeError: the signature cannot answer the task.
    """
    kind = "classification" if task.method == CLASSIFY else "regression"
    if by_name and definition.method_name != task.method:
        raise _invalid(
            f"Expected {kind} signature method_name to be {task.method}. "
            f"Was: {definition.method_name}"
        )
    if len(definition.inputs) != 1:
        raise _invalid("Expected one input Tensor.")
    _check_number_of_outputs(task, len(definition.outputs))
    if INPUT not in definition.inputs:
        raise _unmet(f"No {kind} inputs found in SignatureDef: {_one_line(definition)}")
    if task.method == REGRESS and OUTPUTS not in definition.outputs:
        raise _unmet(f"No regression outputs found in SignatureDef: {_one_line(definition)}")
    if task.method == CLASSIFY and not {CLASSES, SCORES} & set(definition.outputs):
        raise _unmet(
            "Expected classification signature outputs to contain at least one of "
            f'"{CLASSES}" or "{SCORES}". Signature was: {definition}'
        )


def read_outputs(task: Task, outputs: Outputs, *, rows: int) -> Inferred:
    """Return the answer to a task from the outputs of its signature.

    Raises:
        ServeError: the outputs do not have the task's shape or dtype.
    """
    if task.method == CLASSIFY:
        return Inferred(task=task, classes=_classes(outputs, rows))
    return Inferred(task=task, values=_values(outputs[OUTPUTS], rows))


def _check_number_of_outputs(task: Task, found: int) -> None:
    if task.method == REGRESS and found != 1:
        raise _invalid("Expected one output Tensor.")
    if task.method == CLASSIFY and found not in (1, 2):
        raise _invalid(f"Expected one or two output Tensors, found {found}")


def _classes(outputs: Outputs, rows: int) -> list[Classes]:
    labels, scores = outputs.get(CLASSES), outputs.get(SCORES)
    _check_matrix(labels, name=CLASSES, dtype="string", rows=rows)
    _check_matrix(scores, name=SCORES, dtype="float32", rows=rows)
    if labels is not None and scores is not None and labels.shape[1] != scores.shape[1]:
        raise _invalid(
            "Tensors class and score should match in dim_size(1). "
            f"Got {labels.shape[1]} vs. {scores.shape[1]}"
        )
    if labels is None:
        labels = np.full(outputs[SCORES].shape, b"", dtype=object)
    if scores is None:
        scores = np.zeros(labels.shape, dtype=np.float32)
    pairs = zip(labels.tolist(), scores.tolist(), strict=True)
    return [list(zip(names, values, strict=True)) for names, values in pairs]


def _check_matrix(array: np.ndarray[Any, Any] | None, *, name: str, dtype: str, rows: int) -> None:
    if array is None:
        return
    if array.ndim != 2:
        raise _invalid(
            f"Expected Tensor shape: [batch_size num_classes] but got {_shape_text(array)}"
        )
    if _dtype(array).name != dtype:
        wanted = tf.dtypes.as_dtype(dtype)
        raise _invalid(f"Expected {name} Tensor of {_enum(wanted)}. Got: {_enum(_dtype(array))}")
    if array.shape[0] != rows:
        raise _invalid(f"Expected {name} output batch size of {rows}. Got: {array.shape[0]}")


def _values(array: np.ndarray[Any, Any], rows: int) -> list[float]:
    if array.ndim != 1 and (array.ndim != 2 or array.shape[1] != 1):
        raise _invalid(
            "Expected output Tensor shape to be either [batch_size] or "
            f"[batch_size, 1] but got {_shape_text(array)}"
        )
    if array.shape[0] != rows:
        raise _invalid(
            f"Input batch size did not match output batch size: {rows} vs. {array.shape[0]}"
        )
    if array.dtype != np.float32:
        raise _invalid(f"Expected output Tensor of DT_FLOAT.  Got: {_enum(_dtype(array))}")
    return array.reshape(-1).tolist()


def _dtype(array: np.ndarray[Any, Any]) -> tf.DType:
    return tf.string if array.dtype == object else tf.dtypes.as_dtype(array.dtype)


def _one_line(definition: meta_graph_pb2.SignatureDef) -> str:
    return " ".join(str(definition).split())


def _enum(dtype: tf.DType) -> str:
    """Return a dtype's name in protobuf, e.g. DT_FLOAT."""
    from tensorflow.core.framework import types_pb2

    return types_pb2.DataType.Name(dtype.as_datatype_enum)


def _shape_text(array: np.ndarray[Any, Any]) -> str:
    return "[" + ",".join(map(str, array.shape)) + "]"


def _invalid(message: str) -> ServeError:
    return ServeError(Code.INVALID_ARGUMENT, message)


def _unmet(message: str) -> ServeError:
    return ServeError(Code.FAILED_PRECONDITION, message)
