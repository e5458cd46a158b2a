"""Large JSON bodies of nothing but numbers, such as images: read without an object for each number.

What is read here is what `decode` would have read, to the bit. Whatever is not plain, a ragged list, a
string, a number that its dtype does not hold, is left to `decode`, and so are all refusals.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import simdjson

from stoker.export.callpath import Signature

MIN_BYTES = 16 << 10
"""Smallest body that is worth it."""

_KEYS = ("instances", "inputs")
_NAME = "signature_name"

_NUMBERS = b"0123456789+-.eE \t\r\n"
"""All that stands between the brackets and commas of a nested list of numbers."""

_MAX_RANK = 32

_EXACT = {"float32": 2.0**24 - 1, "float64": 2.0**53 - 1}
"""Up to here every whole number has a value of its own, so that none has to be refused."""

_WHOLE = {
    name: np.iinfo(name)
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
}

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """The body of a `:predict` request: one list, which may hold more than numbers yet."""

    signature: str
    """The signature's name, empty for the default."""

    rows: bool
    """Whether `instances` was sent, else `inputs`."""

    raw: bytes
    """The body."""

    values: Any
    """The parsed list; it keeps its parser."""

    shape: tuple[int, ...]
    """Its shape, by the first element of every level."""

    def as_inputs(self, signature: Signature) -> dict[str, Array] | None:
        """Input name -> array; None where `decode` has to look at the body."""
        if len(signature.inputs) != 1:
            return None
        ((name, spec),) = signature.inputs.items()
        array = self._as_array(spec.dtype)
        return None if array is None else {name: array}

    def _as_array(self, dtype: str) -> Array | None:
        try:
            flat = _flat(self.values, dtype)
        except (TypeError, ValueError, RuntimeError):  # simdjson's, for what is no such number
            return None
        if flat is None or flat.size != math.prod(self.shape) or not self._is_dense():
            return None
        return flat.reshape(self.shape)

    def _is_dense(self) -> bool:
        """Whether its brackets and commas are those of its shape."""
        begin, end = self.raw.find(b"["), self.raw.rfind(b"]") + 1
        return self.raw[begin:end].translate(None, _NUMBERS) == _skeleton(self.shape)


def read_numbers(raw: bytes) -> Numbers | None:
    """The outer form of a large body; None of one that is small, or not plain."""
    if len(raw) < MIN_BYTES or not raw.startswith(b"{"):
        return None
    try:
        document: Any = simdjson.Parser().parse(raw)
        keys = list(document.keys()) if isinstance(document, simdjson.Object) else []
        named = document[_NAME] if _NAME in keys else ""
        found = [key for key in keys if key in _KEYS]
        values = document[found[0]] if len(found) == 1 else None
    except (ValueError, RuntimeError):  # simdjson's, for what is no JSON
        return None
    plain = isinstance(values, simdjson.Array) and len(keys) == len(found) + (_NAME in keys)
    shape = _shape(values) if plain else None
    if shape is None or not isinstance(named, str):
        return None
    rows = found[0] == "instances"
    return Numbers(signature=named, rows=rows, raw=raw, values=values, shape=shape)


def _flat(values: Any, dtype: str) -> Array | None:
    """All numbers in order, in their dtype; None where one may not fit it."""
    most = _EXACT.get(dtype)
    if most is not None:
        wide = _numbers(values, "d")
        fits = wide.size > 0 and -most <= wide.min() and wide.max() <= most
        return wide.astype(dtype) if fits else None
    limits = _WHOLE.get(dtype)
    if limits is None:
        return None
    whole = _numbers(values, "i")
    fits = whole.size > 0 and limits.min <= whole.min() and whole.max() <= limits.max
    return whole.astype(dtype) if fits else None


def _numbers(values: Any, kind: Literal["d", "i"]) -> Array:
    return np.frombuffer(values.as_buffer(of_type=kind), np.float64 if kind == "d" else np.int64)


def _shape(values: Any) -> tuple[int, ...] | None:
    """The shape by the first element of every level; None where a level is empty, or too deep."""
    shape: list[int] = []
    while isinstance(values, simdjson.Array):
        if not len(values) or len(shape) == _MAX_RANK:
            return None
        shape.append(len(values))
        values = values[0]
    return tuple(shape)


def _skeleton(shape: tuple[int, ...]) -> bytes:
    """The brackets and commas of a nested list."""
    text = b""
    for size in reversed(shape):
        text = b"[" + b",".join([text] * size) + b"]"
    return text
