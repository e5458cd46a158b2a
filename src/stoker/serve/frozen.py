"""A small model's graph with its variables as constants, for the signatures that this answers alike.

What it gains is a tenth of a small model's call and nothing of one that computes, and a constant is
folded into what TensorFlow computes with it, so that not every model keeps its bits: decision 0032.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2

from stoker.core.errors import UserError
from stoker.export.callpath import LoadedModel, Signature, TensorSpec, zeros
from stoker.serve.breath import Breathe
from stoker.serve.reach import INIT_COLLECTIONS, node_of, roots_of

MOST_BYTES = 64 << 20
"""Larger variables are not made constants: they would be in memory twice, and what a call costs beside
reading them is little."""

_SIZES = (1, 3)
"""Rows of the batches that both must answer alike."""

_DRAWS = 4
"""Random batches of each size, beside one of zeros."""

_WHOLE_NUMBERS = 10
"""Whole numbers are drawn below that: they may count or name something."""

_NOT_FREEZABLE = (
    RuntimeError,
    ValueError,
    TypeError,
    KeyError,
    AttributeError,  # for a text: an asset's path, which its table is filled from
    tf.errors.OpError,
)
"""What TensorFlow raises for a graph whose variables cannot be made constants."""

_VARIABLES = ("VarHandleOp", "VariableV2", "Variable")

_REFUSES = (UserError, tf.errors.OpError)

_log = logging.getLogger(__name__)


class _Remarks(logging.Filter):
    """Leaves out that TensorFlow would rather have another of its functions called."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written."""
        return "convert_to_constants" not in record.getMessage()


def with_constants(
    session: tf.compat.v1.Session, meta_graph: meta_graph_pb2.MetaGraphDef
) -> meta_graph_pb2.MetaGraphDef | None:
    """The graph of a loaded model with the variables' values in their places.

    Args:
        session: Its variables are restored.
        meta_graph: As it was loaded.

    Returns:
        A graph that nothing is restored into; None where there is no variable, or too much of them,
        or TensorFlow cannot make constants of them.
    """
    if not 0 < _variable_bytes(session.graph) <= MOST_BYTES:
        return None
    restore = node_of(meta_graph.saver_def.restore_op_name)
    roots = [name for name in dict.fromkeys(roots_of(meta_graph)) if name != restore]
    _add_reads(session.graph)
    tensorflow = tf.get_logger()
    tensorflow.addFilter(remarks := _Remarks())
    try:
        constant = tf.compat.v1.graph_util.convert_variables_to_constants(
            session, session.graph.as_graph_def(), roots
        )
    except _NOT_FREEZABLE as error:
        _log.info("variables stay variables: %s", error)
        return None
    finally:
        tensorflow.removeFilter(remarks)
    made = meta_graph_pb2.MetaGraphDef(
        meta_info_def=meta_graph.meta_info_def,
        graph_def=constant,
        signature_def=meta_graph.signature_def,
        asset_file_def=meta_graph.asset_file_def,
    )
    for key in (*INIT_COLLECTIONS, tf.saved_model.ASSETS_KEY):
        if key in meta_graph.collection_def:
            made.collection_def[key].CopyFrom(meta_graph.collection_def[key])
    return made


def alike(model: LoadedModel, other: LoadedModel, *, breathe: Breathe) -> list[str]:
    """The signatures of which both answer the same bits to every batch that is tried, some at least."""
    return [
        name
        for name, signature in model.signatures.items()
        if _is_alike(model, other, name, signature, breathe)
    ]


def _variable_bytes(graph: tf.Graph) -> int:
    total = 0
    for operation in graph.get_operations():
        if operation.type in _VARIABLES:
            count = tf.TensorShape(operation.get_attr("shape")).num_elements()
            if count is None:  # nobody knows before it is read
                return MOST_BYTES + 1
            total += count * operation.get_attr("dtype").size
    return total


def _add_reads(graph: tf.Graph) -> None:
    """TensorFlow takes a variable's value from an operation of this name; no signature reaches it."""
    there = {operation.name for operation in graph.get_operations()}
    with graph.as_default():
        for operation in graph.get_operations():
            name = f"{operation.name}/Read/ReadVariableOp"
            if operation.type == "VarHandleOp" and name not in there:
                tf.raw_ops.ReadVariableOp(
                    resource=operation.outputs[0], dtype=operation.get_attr("dtype"), name=name
                )


def _is_alike(
    model: LoadedModel, other: LoadedModel, name: str, signature: Signature, breathe: Breathe
) -> bool:
    answered = False
    for batch in _batches(signature.inputs):
        first, second = (_answer(each, name, batch) for each in (model, other))
        breathe()
        if first is None and second is None:
            continue
        if first is None or second is None or not _same_bits(first, second):
            _log.info("%s: the signature %s stays with its variables", model.path, name)
            return False
        answered = True
    return answered


def _answer(
    model: LoadedModel, name: str, batch: Mapping[str, np.ndarray[Any, Any]]
) -> dict[str, np.ndarray[Any, Any]] | None:
    try:
        return model.call(name, batch)
    except _REFUSES:
        return None


def _same_bits(
    first: Mapping[str, np.ndarray[Any, Any]], second: Mapping[str, np.ndarray[Any, Any]]
) -> bool:
    for name, here in first.items():
        there = second[name]
        if here.dtype != there.dtype or here.shape != there.shape:
            return False
        same = (
            here.tolist() == there.tolist()
            if here.dtype == object
            else here.tobytes() == there.tobytes()
        )
        if not same:
            return False
    return True


def _batches(
    inputs: Mapping[str, TensorSpec],
) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
    random = np.random.default_rng(0)
    for size in _SIZES:
        yield {name: zeros(spec, size) for name, spec in inputs.items()}
        for _ in range(_DRAWS):
            yield {name: _drawn(zeros(spec, size), random) for name, spec in inputs.items()}


def _drawn(like: np.ndarray[Any, Any], random: np.random.Generator) -> np.ndarray[Any, Any]:
    whole = random.integers(0, _WHOLE_NUMBERS, like.shape)
    if like.dtype == object:
        texts = np.empty(whole.size, object)
        texts[:] = [b"%d" % number for number in whole.ravel()]
        return texts.reshape(like.shape)
    if like.dtype.kind in "biu":
        return whole.astype(like.dtype)
    return random.standard_normal(like.shape).astype(like.dtype)
