"""A `tf.data` pipeline as the graph that TensorFlow runs."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

_IGNORE_STATE = 1
"""Python functions and tables are written by name only: the graph is not run."""


_INT32, _INT64 = tf.int32.as_datatype_enum, tf.int64.as_datatype_enum


def set_to(dataset: tf.data.Dataset[Any], operation: str, number: int) -> list[int]:
    """What constants an input of each operation of a kind is, from the source to the step.

    Args:
        dataset: The pipeline.
        operation: As TensorFlow names it, without its version: `PrefetchDataset`.
        number: Which of its inputs, from 0.
    """
    written = tf.raw_ops.DatasetToGraphV2(
        input_dataset=tf.data.experimental.to_variant(dataset),
        external_state_policy=_IGNORE_STATE,
    )
    graph = tf.compat.v1.GraphDef.FromString(written.numpy())
    constants = {
        node.name: tf.make_ndarray(node.attr["value"].tensor).tolist()
        for node in graph.node
        if node.op == "Const" and node.attr["dtype"].type in (_INT32, _INT64)
    }
    return [
        constants[node.input[number]]
        for node in graph.node
        if node.op.rstrip("V0123456789") == operation
    ]
