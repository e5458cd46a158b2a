"""Parses serialized `tf.train.Example`s of requests into the columns of the training data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.statistics.columns import ColumnStatistics
from stoker.serve.observability.input_window import MAX_WIDTH, Inputs

EXAMPLES = "examples"
"""Name of the only input of a signature that takes serialized Examples."""

MAX_EXAMPLES = 16
"""Maximum number of Examples that are parsed per request. An Example takes about as long as a thousand numbers."""

MAX_BYTES = 4 << 20
"""Maximum size of a request's Examples that are parsed, bytes."""

_MISSING_WHOLE = -(2**63)
"""The value that means a missing integer in an `int64_list`; see `stoker.export.signatures`."""


def first_examples(serialized: Inputs) -> NDArray[Any] | None:
    """Return the first Examples of a request; None if the inputs are not Examples, or the first one is too large."""
    examples = serialized.get(EXAMPLES)
    if examples is None or len(serialized) > 1 or examples.dtype.kind not in "OS":
        return None
    taken = list(examples.reshape(-1)[:MAX_EXAMPLES])
    while taken and sum(map(len, taken)) > MAX_BYTES:
        taken.pop()
    found = np.empty(len(taken), object)
    found[:] = taken
    return found if taken else None


def columns_of(examples: Iterable[bytes], training: Mapping[str, ColumnStatistics]) -> Inputs:
    """Parse Examples as the exported model does.

    Returns:
        Column -> [rows, values]. Left out are Examples that lack a required value or have a wrong number of values, and
        columns of variable length or with too many values.

    Raises:
        google.protobuf.message.DecodeError: a message is not an Example.
    """
    # Imported here, because this module must not load TensorFlow; where models are served, it is loaded already.
    from tensorflow.core.example import example_pb2

    columns = [each for each in training.values() if 0 < (each.length or 1) <= MAX_WIDTH]
    columns = [each for each in columns if each.length != 0]
    rows = []
    for raw in examples:
        features = example_pb2.Example.FromString(raw).features.feature
        row = [
            _values(features[each.name], each) if each.name in features else _missing(each)
            for each in columns
        ]
        if None not in row:
            rows.append(row)
    return {
        column.name: _array([row[at] for row in rows], column) for at, column in enumerate(columns)
    }


def _values(feature: Any, column: ColumnStatistics) -> list[Any] | None:
    kind = feature.WhichOneof("kind")
    is_bytes = column.dtype in ("string", "image")
    if kind is None or not (found := list(getattr(feature, kind).value)):
        return _missing(column)
    if len(found) != (column.length or 1) or is_bytes != (kind == "bytes_list"):
        return None
    if column.whole:
        return [np.nan if value == _MISSING_WHOLE else value for value in found]
    return found


def _missing(column: ColumnStatistics) -> list[Any] | None:
    """Return the values that replace a missing column; None if the column must not be missing."""
    if column.dtype in ("int64", "image"):
        return None
    return [b"" if column.dtype == "string" else np.nan] * (column.length or 1)


def _array(rows: Sequence[list[Any] | None], column: ColumnStatistics) -> NDArray[Any]:
    width = column.length or 1
    if column.dtype in ("string", "image"):
        found = np.empty((len(rows), width), object)
        found[:] = rows or found
        return found
    dtype = np.int64 if column.dtype == "int64" else np.float64
    return np.array(rows, dtype).reshape(len(rows), width)
