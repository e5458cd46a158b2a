"""Reads large JSON bodies that contain only numbers, such as images, with simdjson: without a Python object per number.

The result equals that of `decode`, to the bit. `decode` reads all other bodies (with a ragged list, a string, or a
number that the dtype cannot hold) and reports all errors.

Simdjson's objects are used only within the call that created them. Only the numbers are kept, so the parser and its
memory are free for the next body.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import simdjson

from stoker.registry.exported_model import Signature
from stoker.serve.errors import ServeError
from stoker.serve.rest.json_text import parse_json

MIN_BYTES = 16 << 10
"""Minimum size of a body for which this module is faster than `decode`, bytes."""

_MIN_LIST_BYTES = 1 << 10
"""Minimum size of a list that is parsed separately in a body with several lists, bytes."""

_MAX_KEPT_BYTES = 4 << 20
"""Maximum size of a document whose parser is kept, bytes. A parser keeps up to 15 times the document's size in
memory."""

_MAX_SPARE = 2
"""Maximum number of parsers that are kept. Simdjson holds the GIL, so two threads rarely need parsers at the same
time."""

_KEYS = ("instances", "inputs")
_NAME = "signature_name"

_NUMBERS = b"0123456789+-.eE \t\r\n"
"""All characters that a nested list of numbers may contain, except brackets and commas."""

_MAX_RANK = 32

_FLOATS = ("float32", "float64")

_WHOLE = {
    name: np.iinfo(name)
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")
}

_spare: deque[simdjson.Parser] = deque(maxlen=_MAX_SPARE)
"""Parsers that are free for another document. A thread that pops a parser is its only user."""

Array = np.ndarray[Any, Any]
_Read = TypeVar("_Read")


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberList:
    """A dense list of numbers whose dtype is not known yet."""

    wide: Array
    """The numbers in their shape: int64 if all are written as whole numbers, else float64."""

    raw: bytes
    """The JSON of the numbers, for error messages."""

    def as_dtype(self, dtype: str) -> Array | None:
        """Return the numbers in this dtype; None if a number may not fit."""
        wide = self.wide
        if dtype in _FLOATS:
            with np.errstate(over="ignore"):  # beyond float32 a number becomes infinite
                return wide.astype(np.float64, copy=False).astype(dtype, copy=False)
        if dtype in _WHOLE and wide.dtype == np.int64:
            low, high = _WHOLE[dtype].min, _WHOLE[dtype].max
        else:
            return None
        fits = low <= wide.min() and wide.max() <= high
        return wide.astype(dtype, copy=False) if fits else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Numbers:
    """A `:predict` body with one list of numbers."""

    signature: str
    """The signature's name; empty: the default signature."""

    rows: bool
    """Whether the body has `instances` instead of `inputs`."""

    values: NumberList
    """The numbers."""

    def as_inputs(self, signature: Signature) -> dict[str, Array] | None:
        """Return input -> array; None if `decode` must read the body."""
        if len(signature.inputs) != 1:
            return None
        ((name, spec),) = signature.inputs.items()
        array = self.values.as_dtype(spec.dtype)
        return None if array is None else {name: array}


def read_numbers(raw: bytes) -> Numbers | None:
    """Return the numbers of a large `:predict` body; None if it is small, or is not a single list of numbers."""
    if len(raw) < MIN_BYTES or not raw.startswith(b"{"):
        return None
    return _parsed(raw, _numbers)


def read_lists(raw: bytes) -> dict[str, Any] | None:
    """Parse a large body of the Open Inference Protocol, with a `NumberList` for each list of numbers.

    Each list is cut out and parsed separately. While the rest is parsed, a marker string replaces the list, so that the
    rest keeps its meaning.

    Returns:
        The body as `parse_json` returns it, except the `data` of its inputs; None if `parse_json` must parse
        it because it is small, has no such list, or is invalid.
    """
    if len(raw) < MIN_BYTES:
        return None
    rest, lists = _cut_out(raw)
    # `count` also finds a marker that the client wrote, unless the client wrote it with escapes.
    if not lists or b"\\" in rest or rest.count(_MARK) != len(lists):
        return None
    try:
        body = parse_json(rest)
    except ServeError:
        return None
    inputs = body.get("inputs") if isinstance(body, dict) else None
    if not isinstance(inputs, list):
        return None
    back = [
        one for one in inputs if isinstance(one, dict) and _mark_of(one.get("data")) is not None
    ]
    if len(back) != len(lists):  # a list is outside of the inputs, or its key occurs twice
        return None
    for one in back:
        one["data"] = lists[int(one["data"][len(_MARK) :])]
    return body


_DATA = b'"data"'
_OPENED = re.compile(rb'"data"[ \t\r\n]*:[ \t\r\n]*\[')

_MARK = b"stoker:numbers:"
"""The marker that replaces a list, followed by the list's number."""


def _mark_of(value: Any) -> str | None:
    return value if isinstance(value, str) and value.startswith(_MARK.decode()) else None


def _cut_out(raw: bytes) -> tuple[bytes, list[NumberList]]:
    """Return the body with a marker for each large list of numbers under a key `data`, and the lists."""
    parts: list[bytes] = []
    lists: list[NumberList] = []
    done = 0
    for begin, end in _spans(raw):
        numbers = _parsed(raw[begin:end], _whole_list)
        if numbers is not None:
            parts += [raw[done:begin], b'"%b%d"' % (_MARK, len(lists))]
            lists.append(numbers)
            done = end
    return b"".join([*parts, raw[done:]]), lists


def _spans(raw: bytes) -> Iterator[tuple[int, int]]:
    """Return the positions of possible large lists, in order."""
    at = raw.find(_DATA)  # several times faster than searching with the regular expression
    while at >= 0:
        opened, end = _OPENED.match(raw, at), at + len(_DATA)
        if opened is not None:
            begin, end = opened.end() - 1, max(end, _end_of_numbers(raw, opened.end() - 1))
            if end - begin >= _MIN_LIST_BYTES:
                yield begin, end
        at = raw.find(_DATA, end)


def _end_of_numbers(raw: bytes, begin: int) -> int:
    """Return the end of the last `]` before a character that a list of numbers cannot contain."""
    quote = raw.find(b'"', begin)
    stop = quote if quote >= 0 else len(raw)
    brace = raw.find(b"}", begin, stop)
    return raw.rfind(b"]", begin, brace if brace >= 0 else stop) + 1


def _parsed(raw: bytes, read: Callable[[Any, bytes], _Read | None]) -> _Read | None:
    """Return what `read` extracts from the document; None if it is not JSON.

    `read` must not keep parts of the document. After an error, which may refer to the document, the parser is not used
    again.
    """
    keep = len(raw) <= _MAX_KEPT_BYTES
    try:
        parser = _spare.pop() if keep else simdjson.Parser()
    except IndexError:
        parser = simdjson.Parser()
    try:
        found = read(parser.parse(raw), raw)
    except (TypeError, ValueError, RuntimeError):  # simdjson's errors
        return None
    if keep:
        _spare.append(parser)
    return found


def _numbers(document: Any, raw: bytes) -> Numbers | None:
    """Return the only list of a `:predict` body."""
    keys = list(document.keys()) if isinstance(document, simdjson.Object) else []
    named = document[_NAME] if _NAME in keys else ""
    found = [key for key in keys if key in _KEYS]
    plain = len(found) == 1 and len(keys) == 1 + (_NAME in keys) and isinstance(named, str)
    values = document[found[0]] if plain else None
    numbers = _list_of(values, raw, begin=raw.find(b"["), end=raw.rfind(b"]") + 1)
    if numbers is None:
        return None
    return Numbers(signature=named, rows=found[0] == "instances", values=numbers)


def _whole_list(document: Any, raw: bytes) -> NumberList | None:
    return _list_of(document, raw, begin=0, end=len(raw))


def _list_of(values: Any, raw: bytes, *, begin: int, end: int) -> NumberList | None:
    """Return the parsed list at `begin:end`; None if it is not dense or not of numbers."""
    shape, first = _outline(values)
    if not shape or not isinstance(first, int | float):
        return None
    flat = _flat(values, whole=isinstance(first, int))
    if flat.size != math.prod(shape) or not _is_dense(raw, shape, begin=begin, end=end):
        return None
    return NumberList(wide=flat.reshape(shape), raw=raw)


def _flat(values: Any, *, whole: bool) -> Array:
    """Return all numbers in order, as a copy that is independent of the parser."""
    if whole:
        try:
            return np.frombuffer(values.as_buffer(of_type="i"), np.int64)
        except TypeError:  # the first number is an integer, another is not
            pass
    return np.frombuffer(values.as_buffer(of_type="d"), np.float64)


def _is_dense(raw: bytes, shape: tuple[int, ...], *, begin: int, end: int) -> bool:
    """Return whether the brackets and commas of a list match a shape."""
    if len(shape) == 1:
        return raw.find(b"[", begin + 1, end) < 0
    return raw[begin:end].translate(None, _NUMBERS) == _skeleton(shape)


def _outline(values: Any) -> tuple[tuple[int, ...], Any]:
    """Return the shape that the first element of every level implies, and the first value.

    The shape is () if a list is empty or nested too deeply.
    """
    shape: list[int] = []
    while isinstance(values, simdjson.Array):
        if not len(values) or len(shape) == _MAX_RANK:
            return (), None
        shape.append(len(values))
        values = values[0]
    return tuple(shape), values


def _skeleton(shape: tuple[int, ...]) -> bytes:
    """Return the brackets and commas of a nested list of this shape."""
    text = b""
    for size in reversed(shape):
        text = b"[" + b",".join([text] * size) + b"]"
    return text
