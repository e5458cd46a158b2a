"""Arrays -> the JSON text that TensorFlow Serving writes.

Source: TensorFlow Serving, RESTful API, "Predict API"; its `json_tensor` for the text of numbers.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from stoker.core.errors import UserError

Tensors = Mapping[str, np.ndarray[Any, Any]]


def predictions(outputs: Tensors) -> str:
    """The answer to `instances`: one value, or one object, a row.

    Raises:
        UserError: the outputs have no common first axis.
    """
    return predictions_of(rows_of(outputs))


def predictions_of(rows: Sequence[str]) -> str:
    """The answer to `instances` of rows as `rows_of` writes them."""
    return '{"predictions": [' + ", ".join(rows) + "]}"


def rows_of(outputs: Tensors) -> list[str]:
    """The text of each row of an answer to `instances`.

    Raises:
        UserError: the outputs have no common first axis.
    """
    _check_rows(outputs)
    if len(outputs) == 1:
        ((name, array),) = outputs.items()
        return _nested(name, array, 1)
    columns = {name: _nested(name, array, 1) for name, array in outputs.items()}
    keys = [json.dumps(name) for name in columns]
    return [
        "{" + ", ".join(f"{key}: {text}" for key, text in zip(keys, row, strict=True)) + "}"
        for row in zip(*columns.values(), strict=True)
    ]


def _check_rows(outputs: Tensors) -> None:
    """Source: TensorFlow Serving's `json_tensor.cc` for the texts."""
    rows: int | None = None
    for name, array in outputs.items():
        if array.ndim == 0:
            raise UserError(f"Tensor name: {name} has no shape information", fix=_COLUMNS)
        if rows not in (None, array.shape[0]):
            raise UserError(
                f"Tensor name: {name} has inconsistent batch size: {array.shape[0]} "
                f"expecting: {rows}",
                fix=_COLUMNS,
            )
        rows = array.shape[0]


_COLUMNS = "Send 'inputs' instead of 'instances'."


def columns(outputs: Tensors) -> str:
    """The answer to `inputs`: one value a tensor, bare if there is only one."""
    texts = {name: _nested(name, array, 0)[0] for name, array in outputs.items()}
    if len(texts) == 1:
        return '{"outputs": ' + next(iter(texts.values())) + "}"
    inside = ", ".join(f"{json.dumps(name)}: {text}" for name, text in texts.items())
    return '{"outputs": {' + inside + "}}"


def number_texts(array: np.ndarray[Any, Any]) -> list[str]:
    """The text of every float: `%g` where that reads back as the same number, else all digits.

    A whole number gets `.0`, so that a reader's list is of one type.
    """
    wide = array.dtype == np.float64
    exact = array.reshape(-1).astype(np.float64 if wide else np.float32, copy=False)
    values = exact.tolist()
    texts = ["%g" % value for value in values]  # noqa: UP031 - the format is C's, by its name
    for place in _inexact(texts, exact, values):
        texts[place] = ("%.17g" if wide else "%.9g") % values[place]
    return [_SPECIAL.get(text) or _with_point(text) for text in texts]


def _inexact(
    texts: Sequence[str], exact: np.ndarray[Any, Any], values: Sequence[float]
) -> list[int]:
    """The places of those texts that do not read back as their numbers."""
    if len(texts) <= _FEW:
        code = f"{len(texts)}{exact.dtype.char}"
        again = struct.unpack(code, struct.pack(code, *map(float, texts)))
        return [place for place, value in enumerate(values) if again[place] != value]
    read = np.array(texts, dtype="U").astype(np.float64).astype(exact.dtype)
    return np.flatnonzero(read != exact).tolist()


_FEW = 64
"""Numbers up to which they are quicker read back one by one than as an array."""

_SPECIAL = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _with_point(text: str) -> str:
    return text if "." in text or "e" in text else text + ".0"


def _nested(name: str, array: np.ndarray[Any, Any], axis: int) -> list[str]:
    """The texts of all that lies at `axis`, each with its inner axes in brackets."""
    texts = _scalars(name, array)
    for level in range(array.ndim - 1, axis - 1, -1):
        size, count = array.shape[level], math.prod(array.shape[:level])
        texts = [
            "[" + ", ".join(texts[place * size : (place + 1) * size]) + "]"
            for place in range(count)
        ]
    return texts


def _scalars(name: str, array: np.ndarray[Any, Any]) -> list[str]:
    if array.dtype == object:
        as_bytes = name.endswith("_bytes")
        return [_string_text(item, as_bytes=as_bytes) for item in array.reshape(-1).tolist()]
    if array.dtype.kind in "iub":
        return [json.dumps(item) for item in array.reshape(-1).tolist()]
    if array.dtype.kind == "c":
        raise UserError(
            f"Failed to write JSON value for tensor type: {array.dtype.name}, output {name!r}"
        )
    return number_texts(array)


def _string_text(item: bytes, *, as_bytes: bool) -> str:
    """A string, or its base64 where the name asks for it or the bytes are no text."""
    try:
        if not as_bytes:
            return json.dumps(item.decode())
    except UnicodeDecodeError:
        pass
    return json.dumps({"b64": base64.b64encode(item).decode()})
