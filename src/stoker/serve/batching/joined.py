"""Joins several requests into one call: concatenates the inputs and splits the outputs."""

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
"""Largest accepted difference between a joined and a single answer, as a share of the largest value.

A kernel for another batch size adds up in another order: of 1,000 terms that is 1e-5 in float32.
"""


_MAX_PADDED = 1 << 24
"""Most values of a padded input: one long request must not make all others as long."""


class TooLongError(Exception):
    """The padded inputs would take too much memory: each request runs alone."""


class NotByRowsError(Exception):
    """An output does not have one row for each row of the inputs."""


def can_be_joined(signature: Signature) -> bool:
    """Whether every input and output declares a first axis of any length."""
    specs = [*signature.inputs.values(), *signature.outputs.values()]
    return all(_is_open(spec) for spec in specs)


def rows_of(arrays: Sequence[Array]) -> int:
    """The common first length of the arrays; 0 if they differ."""
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
    """What must be equal in requests to join them.

    Args:
        arrays: The inputs in the signature's order, each with a first axis.
        variable: Whether the lengths of the inner axes may differ.
    """
    return tuple(
        (str(array.dtype), (array.ndim,) if variable else array.shape[1:]) for array in arrays
    )


def join(requests: Sequence[Sequence[Array]], *, size: int) -> list[Array]:
    """The inputs of all requests, concatenated and padded with the first row.

    Args:
        requests: For each request its inputs, of equal keys.
        size: Rows of the result; at least as many as the requests have.
    """
    joined = []
    for parts in zip(*requests, strict=True):
        same = _same_shapes(parts)
        missing = size - sum(len(part) for part in same)
        filler = [np.repeat(same[0][:1], missing, axis=0)] if missing else []
        joined.append(np.concatenate([*same, *filler]))
    return joined


def cut(outputs: Outputs, rows: Sequence[int], *, size: int) -> list[dict[str, Array]]:
    """The outputs of each request.

    Args:
        outputs: The joined outputs.
        rows: The number of rows of each request, in order.
        size: Number of rows of the joined call.

    Raises:
        NotByRowsError: an output has another number of rows.
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
        rows: The rows of each piece.

    Raises:
        UserError: an output does not have one row for each row of the inputs.
    """
    for piece, length in zip(pieces, rows, strict=True):
        for name, array in piece.items():
            if array.shape[:1] != (length,):
                raise UserError(
                    f"output {name!r} must have one row for each row of the inputs",
                    got=Plain(f"shape {array.shape} for {length} rows"),
                    fix="Send fewer rows, or turn enable_large_batch_splitting off.",
                )
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def agree(joined: Outputs, single: Outputs) -> bool:
    """Whether a joined answer equals the single one; floats may differ by the tolerance."""
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
    """The parts, with every inner axis padded to the longest; each part is padded with its own first value."""
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
"""Least number of requests for which splitting them into several runs is considered. Fewer rarely exceed one run,
and if they do, threads answer them."""


def in_runs(items: Sequence[Item], rows: Callable[[Item], int], *, most: int) -> list[list[Item]]:
    """Group requests, in order, so that each group fits in one run.

    Args:
        items: The requests.
        rows: Returns the number of rows of one.
        most: The most rows of a run; a request that has more is alone.
    """
    parts: list[list[Item]] = [[]]
    total = 0
    for item in items:
        size = rows(item)
        if total + size > most and parts[-1]:
            parts.append([])
            total = 0
        total += size
        parts[-1].append(item)
    return parts
