"""A random sample of the rows of all requests in a time window, and its statistics."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.statistics.columns import ColumnStatistics
from stoker.core.statistics.values import statistics_of_sizes, statistics_of_values

MAX_ROWS = 2_000
"""Maximum number of rows of a sample. Two samples of this size from the same distribution usually differ by at most 5 %
of the rows."""

MAX_WIDTH = 64
"""Maximum number of values that a row may have in a column; wider columns are not compared."""

MAX_TEXT = 256
"""Number of characters of a string that are kept."""

_CUT = 4 * MAX_TEXT
"""Number of bytes of a string that are kept until it is decoded: a character in UTF-8 takes at most four bytes."""

_CELL_BYTES = 8
_TEXT_BYTES = 60
"""Memory of a number (`_CELL_BYTES`) and of a string without its characters (`_TEXT_BYTES`), bytes."""

Inputs = Mapping[str, NDArray[Any]]
"""Input -> [rows, ...] values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledInputs:
    """The first rows of a request, reduced to what the statistics need."""

    values: Inputs
    """The values. Long strings are cut."""

    sizes: Inputs
    """String input -> [rows, ...] length of each value before it was cut: bytes, or characters of a `str`."""

    @property
    def held_bytes(self) -> int:
        """Approximate memory of the rows, bytes."""
        texts = (each for each in self.values.values() if each.dtype == object)
        return sum(each.nbytes for each in (*self.values.values(), *self.sizes.values())) + sum(
            _TEXT_BYTES + len(text) for each in texts for text in each.flat
        )


def sampled_inputs(inputs: Inputs, *, rows: int) -> SampledInputs:
    """Copy the first rows of a request, without wide columns.

    Args:
        inputs: Inputs of a request; strings are bytes or `str`.
        rows: Maximum number of rows.
    """
    values, sizes = dict[str, NDArray[Any]](), dict[str, NDArray[Any]]()
    for name, column in inputs.items():
        if not column.ndim or column[:1].size > MAX_WIDTH:
            continue
        taken = column[:rows]
        if taken.dtype.kind not in "OSU":
            values[name] = np.array(taken)
            continue
        texts = taken.reshape(-1).tolist()
        sizes[name] = np.array(list(map(len, texts)), np.int64).reshape(taken.shape)
        cut = np.empty(len(texts), object)
        cut[:] = [text[:_CUT] for text in texts]
        values[name] = cut.reshape(taken.shape)
    return SampledInputs(values=values, sizes=sizes)


class InputWindow:
    """A random sample of the rows in a window; each row is in it with the same probability. For use in one thread."""

    def __init__(self, training: Mapping[str, ColumnStatistics], *, began_s: float) -> None:
        """Args: training: statistics by column; began_s: start of the window, seconds of the monotonic clock."""
        self.training = training
        self.began_s = began_s
        self.seen = 0
        self.held_bytes = 0
        self._columns: dict[str, NDArray[Any]] = {}

    def add(self, inputs: SampledInputs) -> None:
        """Add the rows of a request. A request that lacks a column of the first request in the window is ignored."""
        rows = flat_rows(inputs, self.training)
        if not self._columns:
            self._columns = {
                name: np.empty((MAX_ROWS, values.shape[1]), values.dtype)
                for name, values in rows.items()
            }
            self.held_bytes = sum(each.size for each in self._columns.values()) * _CELL_BYTES
        if not rows or any(
            name not in rows or rows[name].shape[1] != held.shape[1]
            for name, held in self._columns.items()
        ):
            return
        count = len(next(iter(rows.values())))
        places = [self._place(self.seen + row) for row in range(count)]
        kept = [row for row in range(count) if places[row] < MAX_ROWS]
        for name, held in self._columns.items():
            self._keep(held, rows[name][kept], [places[row] for row in kept])
        self.seen += count

    def statistics(self) -> Iterator[ColumnStatistics]:
        """Yield the statistics of each column."""
        rows = min(self.seen, MAX_ROWS)
        for name, held in self._columns.items():
            of_column = self.training[name]
            if of_column.dtype == "image":
                yield statistics_of_sizes(held[:rows].reshape(-1), of_column)
            else:
                yield statistics_of_values(held[:rows], of_column)

    def _place(self, number: int) -> int:
        """Return the index at which the n-th row is stored.

        An index from `MAX_ROWS` on means that the row is left out.
        """
        if number < MAX_ROWS:
            return number
        return random.randrange(number + 1)  # noqa: S311 - a sample, not a secret

    def _keep(self, held: NDArray[Any], rows: NDArray[Any], places: list[int]) -> None:
        if held.dtype == object:
            before = held[places].reshape(-1).tolist()
            self.held_bytes += sum(_TEXT_BYTES + len(text) for text in rows.reshape(-1).tolist())
            self.held_bytes -= sum(_TEXT_BYTES + len(text) for text in before if text is not None)
        held[places] = rows


def flat_rows(
    inputs: SampledInputs, training: Mapping[str, ColumnStatistics]
) -> dict[str, NDArray[Any]]:
    """Return column -> [rows, values], for the columns that can be compared with the training data.

    Strings become `str`, numbers float64 or int64, images the number of their bytes.
    """
    found = {}
    for name, column in training.items():
        values = (inputs.sizes if column.dtype == "image" else inputs.values).get(name)
        width = 1 if column.length is None else column.length
        if values is None or not 0 < width <= MAX_WIDTH or math.prod(values.shape[1:]) != width:
            continue
        is_text = values.dtype.kind == "O"
        if is_text != (column.dtype == "string"):
            continue
        flat = values.reshape(len(values), width)
        if is_text:
            texts = np.empty(flat.shape, object)
            texts[:] = [[_text(value) for value in row] for row in flat.tolist()]
            found[name] = texts
        else:
            is_whole = column.dtype in ("int64", "image")
            found[name] = flat.astype(np.int64 if is_whole else np.float64)
    return found


def _text(value: str | bytes) -> str:
    return (value if isinstance(value, str) else value.decode(errors="replace"))[:MAX_TEXT]
