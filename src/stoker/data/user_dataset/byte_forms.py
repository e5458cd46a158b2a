"""Numbers that were bytes: whether all of a feature's values are what a form makes of 0 to 255."""

from __future__ import annotations

import functools
from typing import Any, Final, get_args

import numpy as np
from numpy.typing import NDArray

from stoker.data.feed.config import ByteForm

FORMS: Final[tuple[ByteForm, ...]] = get_args(ByteForm)

LEAST_BYTES = 1024
"""Of a record's feature, from which on it is worth a look."""


class ByteForms:
    """The forms that are possible after all that was seen; none where it is another kind of feature."""

    def __init__(self) -> None:
        self._possible: tuple[ByteForm, ...] = FORMS

    def add(self, values: NDArray[Any]) -> None:
        """Take in a batch, [batch, ...]."""
        self._possible = tuple(form for form in self._possible if _holds(values, form))

    @property
    def form(self) -> ByteForm | None:
        """The first one that is possible; of 0 and 1 alone several are."""
        return self._possible[0] if self._possible else None


def _holds(values: NDArray[Any], form: ByteForm) -> bool:
    kind = values.dtype.kind
    if kind not in "fiu" or values.dtype.itemsize == 1 or (kind != "f" and form != "x"):
        return False
    if values.size * values.dtype.itemsize < LEAST_BYTES * max(1, len(values)):
        return False
    wide = np.nan_to_num(values.astype(np.float64)) * (1 if form == "x" else 255)
    places = np.clip(np.rint(wide), 0, 255).astype(np.uint8)
    bits = np.dtype(f"u{values.dtype.itemsize}")
    # By their bits: a zero below zero is another number to whoever divides by it.
    made = _table(form, values.dtype.name)[places]
    return bool((made.view(bits) == np.ascontiguousarray(values).view(bits)).all())


@functools.cache
def _table(form: ByteForm, dtype: str) -> NDArray[Any]:
    """What each byte becomes."""
    numbers = np.arange(256).astype(dtype)
    if form == "x/255":
        return numbers / numbers.dtype.type(255)
    if form == "x*(1/255)":
        return numbers * numbers.dtype.type(1 / 255)
    return numbers
