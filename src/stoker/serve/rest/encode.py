"""Encodes answers as the JSON that TensorFlow Serving writes.

Source: TensorFlow Serving, RESTful API, "Predict API"; for the format of numbers, its `json_tensor`.
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
from stoker.serve.servables.examples import Inferred

Tensors = Mapping[str, np.ndarray[Any, Any]]


def predictions(outputs: Tensors) -> str:
    """Return the answer to `instances`: one value or one object per row.

    Raises:
        UserError: the outputs have no common first axis.
    """
    return predictions_of(rows_of(outputs))


def predictions_of(rows: Sequence[str]) -> str:
    """Return the answer to `instances`, from the rows that `rows_of` returned."""
    return '{"predictions": [' + ", ".join(rows) + "]}"


def rows_of(outputs: Tensors) -> list[str]:
    """Return the JSON of each row of an answer to `instances`.

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
    """Raise if the outputs have no common first axis. Source of the messages: TensorFlow Serving's `json_tensor.cc`."""
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
    """Return the answer to `inputs`: an object of named tensors; a single tensor without its name."""
    texts = {name: _nested(name, array, 0)[0] for name, array in outputs.items()}
    if len(texts) == 1:
        return '{"outputs": ' + next(iter(texts.values())) + "}"
    inside = ", ".join(f"{json.dumps(name)}: {text}" for name, text in texts.items())
    return '{"outputs": {' + inside + "}}"


def classifications_text(answer: Inferred) -> str:
    """Return the JSON of a classification: for each row, label and score of each class."""
    rows = []
    for row in answer.classes:
        scores = number_texts(np.array([score for _, score in row], dtype=np.float32))
        labels = [json.dumps(label.decode(errors="replace")) for label, _ in row]
        pairs = zip(labels, scores, strict=True)
        rows.append("[" + ", ".join(f"[{label}, {score}]" for label, score in pairs) + "]")
    return '{"results": [' + ", ".join(rows) + "]}"


def regressions_text(answer: Inferred) -> str:
    """Return the JSON of a regression: one value per row."""
    texts = number_texts(np.array(answer.values, dtype=np.float32))
    return '{"results": [' + ", ".join(texts) + "]}"


def number_texts(array: np.ndarray[Any, Any]) -> list[str]:
    """Return every float as text: in the format `%g` if the number can be read back exactly, else with all digits.

    Whole numbers end with `.0`, so that all numbers of a parsed list have the same type.
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
    """Return the indexes of texts from which the number cannot be read back exactly."""
    if len(texts) <= _FEW:
        code = f"{len(texts)}{exact.dtype.char}"
        again = struct.unpack(code, struct.pack(code, *map(float, texts)))
        return [place for place, value in enumerate(values) if again[place] != value]
    read = np.array(texts, dtype="U").astype(np.float64).astype(exact.dtype)
    return np.flatnonzero(read != exact).tolist()


_FEW = 64
"""Up to this many numbers, reading numbers back one by one is faster than as an array."""

_SPECIAL = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _with_point(text: str) -> str:
    return text if "." in text or "e" in text else text + ".0"


def _nested(name: str, array: np.ndarray[Any, Any], axis: int) -> list[str]:
    """Return the JSON of each element of `axis`; inner axes become nested lists."""
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
    """Return the JSON of a string; base64 if the output's name ends with `_bytes`, or the string is not UTF-8."""
    try:
        if not as_bytes:
            return json.dumps(item.decode())
    except UnicodeDecodeError:
        pass
    return json.dumps({"b64": base64.b64encode(item).decode()})
