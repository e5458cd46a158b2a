"""Joins several requests into one run: concatenates their inputs, and splits the outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from stoker.core.errors import Plain, UserError
from stoker.registry.exported_model import Signature, TensorSpec

Array = np.ndarray[Any, Any]
Outputs = Mapping[str, Array]

Key = tuple[tuple[str, tuple[int, ...]], ...]
"""Dtype and inner shape of every input: requests with equal keys can be joined."""

_TOLERANCE = {"float16": 1e-2, "bfloat16": 5e-2, "float32": 1e-4, "float64": 1e-8}
"""Maximum accepted difference between a joined and a single answer, as a share of the largest value.

The kernel of another batch size may add numbers in another order. A sum of 1,000 float32 terms then differs by about
1e-5.
"""


_MAX_PADDED = 1 << 24
"""Maximum number of values of a padded input. It limits the memory that one long request costs by padding all
others."""


class TooLongError(Exception):
    """The padded inputs would take too much memory, so each request must run alone."""


class NotByRowsError(Exception):
    """An output does not have one row for each row of the inputs."""


def can_be_joined(signature: Signature) -> bool:
    """Whether every input and output declares a first axis of variable length."""
    specs = [*signature.inputs.values(), *signature.outputs.values()]
    return all(_is_open(spec) for spec in specs)


def rows_of(arrays: Sequence[Array]) -> int:
    """The length of the arrays' first axis; 0 if it differs between the arrays."""
    if len(arrays) == 1:
        return arrays[0].shape[0] if arrays[0].ndim else 0
    lengths = {array.shape[:1] for array in arrays}
    return lengths.pop()[0] if len(lengths) == 1 and () not in lengths else 0


def have_all_axes(signature: Signature, arrays: Sequence[Array]) -> bool:
    """Whether each input has as many axes as declared, so that its first axis certainly holds the rows."""
    return all(
        spec.shape is None or array.ndim == len(spec.shape)
        for spec, array in zip(signature.inputs.values(), arrays, strict=True)
    )


def key_of(arrays: Sequence[Array], *, variable: bool) -> Key:
    """The key of a request: requests with equal keys can be joined.

    Args:
        arrays: The inputs in the signature's order, each with a first axis.
        variable: Whether joined requests may differ in the lengths of the inner axes.
    """
    return tuple(
        (str(array.dtype), (array.ndim,) if variable else array.shape[1:]) for array in arrays
    )


def join(requests: Sequence[Sequence[Array]], *, size: int) -> list[Array]:
    """The inputs of all requests, concatenated and padded with the first row.

    Args:
        requests: The inputs of each request; the requests have equal keys.
        size: Number of rows of the result, at least the sum of the requests' rows.
    """
    joined = []
    for parts in zip(*requests, strict=True):
        same = _same_shapes(parts)
        missing = size - sum(len(part) for part in same)
        filler = [np.repeat(same[0][:1], missing, axis=0)] if missing else []
        joined.append(np.concatenate([*same, *filler]))
    return joined


def cut(outputs: Outputs, rows: Sequence[int], *, size: int) -> list[dict[str, Array]]:
    """Split the outputs of a joined run by request.

    Args:
        outputs: The joined outputs.
        rows: The number of rows of each request, in order.
        size: Number of rows of the joined run.

    Raises:
        NotByRowsError: an output does not have `size` rows.
    """
    for array in outputs.values():
        if array.shape[:1] != (size,):
            raise NotByRowsError
    ends = np.cumsum(rows).tolist()
    starts = [0, *ends[:-1]]
    return [
        {name: array[start:end] for name, array in outputs.items()}
        for start, end in zip(starts, ends, strict=True)
    ]


def rejoined(pieces: Sequence[Outputs], rows: Sequence[int]) -> dict[str, Array]:
    """Concatenate the outputs of a request that was run in pieces.

    Args:
        pieces: The outputs of each piece.
        rows: The number of rows of each piece.

    Raises:
        UserError: an output does not have one row for each row of the inputs.
    """
    for piece, length in zip(pieces, rows, strict=True):
        for name, array in piece.items():
            if array.shape[:1] != (length,):
                raise UserError(
                    f"output {name!r} must have one row for each row of the inputs",
                    got=Plain(f"shape {array.shape} for {length} rows"),
                    fix="Send fewer rows, or turn off enable_large_batch_splitting.",
                )
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def agree(joined: Outputs, single: Outputs) -> bool:
    """Whether a joined answer equals the single answer; floats may differ by `_TOLERANCE`."""
    return all(_agree(joined[name], single[name]) for name in single)


def _agree(joined: Array, single: Array) -> bool:
    if joined.shape != single.shape:
        return False
    tolerance = _TOLERANCE.get(single.dtype.name)
    if tolerance is None or not single.size:
        return np.array_equal(joined, single)
    wide = single.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    return np.allclose(
        joined.astype(np.float64), wide, rtol=0.0, atol=tolerance * largest, equal_nan=True
    )


def _is_open(spec: TensorSpec) -> bool:
    return spec.shape is None or (len(spec.shape) > 0 and spec.shape[0] is None)


def _same_shapes(parts: Sequence[Array]) -> list[Array]:
    """Pad every inner axis of the parts to the longest length, each part with its own first value."""
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) == 1:
        return list(parts)
    longest = np.max(list(shapes), axis=0).tolist()
    if math.prod(longest) * sum(map(len, parts)) > _MAX_PADDED:
        raise TooLongError
    padded = []
    for part in parts:
        fill = part.reshape(-1)[0] if part.size else np.zeros((), part.dtype)[()]
        whole = np.full((len(part), *longest), fill, dtype=part.dtype)
        whole[tuple(slice(0, length) for length in part.shape)] = part
        padded.append(whole)
    return padded


Item = TypeVar("Item")

MANY = 16
"""Minimum number of requests for which splitting them into several runs is considered. Fewer requests rarely exceed one
run; if they do, threads answer them."""


def in_runs(
    items: Sequence[Item], rows: Callable[[Item], int], *, max_rows: int
) -> list[list[Item]]:
    """Group requests, in order, so that each group fits in one run.

    Args:
        items: The requests.
        rows: Returns the number of rows of a request.
        max_rows: Maximum number of rows of a run; a request with more rows is a group of its own.
    """
    parts: list[list[Item]] = [[]]
    total = 0
    for item in items:
        size = rows(item)
        if total + size > max_rows and parts[-1]:
            parts.append([])
            total = 0
        total += size
        parts[-1].append(item)
    return parts
