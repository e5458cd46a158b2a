"""A summary of the labels of one split, with the numbers that checks of the model need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.config import build

MAX_CLASSES = 1_000
"""Maximum number of distinct values of a label that are counted individually."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelSummary:
    """Summary of the labels of one output in one split. Non-finite values are left out."""

    rows: int
    """Number of labels that were read."""

    shape: tuple[int, ...]
    """Shape of one label, without the batch axis."""

    min: float | None
    """The smallest value; None if no value is finite."""

    max: float | None
    """The largest value; None if no value is finite."""

    integral: bool
    """Whether every value is a whole number."""

    zero_or_one: bool
    """Whether every value is 0 or 1."""

    least_sum: float | None
    """The smallest sum over a label's last axis; None for scalar labels."""

    most_sum: float | None
    """The largest sum over a label's last axis; None for scalar labels."""

    counts: dict[str, int] | None
    """Value -> number of rows with it; None for vectors, or with more than `MAX_CLASSES` values."""

    ones: tuple[int, ...] | None = None
    """Element of a label vector -> number of rows with a 1 there; None unless all labels are vectors of 0 and 1."""

    @property
    def multi_hot(self) -> bool:
        """Whether the labels are vectors of 0 and 1, some of them with no 1 or with several."""
        vectors = len(self.shape) == 1 and self.most_sum is not None
        return vectors and self.zero_or_one and (self.least_sum, self.most_sum) != (1.0, 1.0)


def labels_as_facts(
    labels: Mapping[str, Mapping[str, LabelSummary]],
) -> dict[str, dict[str, dict[str, Any]]]:
    """Convert split -> output -> label summary to JSON values."""
    return {
        split: {output: asdict(summary) for output, summary in by_output.items()}
        for split, by_output in labels.items()
    }


def labels_from_facts(
    facts: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, LabelSummary]]:
    """Convert the JSON values of `labels_as_facts` back to label summaries."""
    return {
        split: {output: build(LabelSummary, raw) for output, raw in by_output.items()}
        for split, by_output in facts.items()
    }


class LabelCounter:
    """Summarizes labels batch by batch."""

    def __init__(self) -> None:
        """Start without labels."""
        self._rows = 0
        self._shape: tuple[int, ...] = ()
        self._limits: tuple[float, float] | None = None
        self._sums: tuple[float, float] | None = None
        self._integral = self._zero_or_one = True
        self._counts: dict[str, int] | None = {}
        self._ones: NDArray[np.int64] | None = None

    def add(self, values: NDArray[Any]) -> None:
        """Add a batch of labels.

        Args:
            values: [batch, ...] numbers; of values of other types only the number is counted.
        """
        self._rows += len(values)
        self._shape = tuple(values.shape[1:])
        if values.dtype.kind not in "biuf":
            return
        numbers = values.astype(np.float64)
        finite = numbers[np.isfinite(numbers)]
        if not finite.size:
            return
        self._limits = _wider(self._limits, finite)
        self._integral = self._integral and bool((finite == np.floor(finite)).all())
        self._zero_or_one = self._zero_or_one and bool(np.isin(finite, (0.0, 1.0)).all())
        if numbers.ndim > 1 and numbers.shape[-1] > 1:
            self._sums = _wider(self._sums, numbers.sum(axis=-1))
            if self._zero_or_one and numbers.ndim == 2:
                ones = (numbers == 1).sum(axis=0)
                self._ones = ones if self._ones is None else self._ones + ones
        else:
            self._count(finite)

    def _count(self, finite: NDArray[np.float64]) -> None:
        if self._counts is None:
            return
        found, counts = np.unique(finite, return_counts=True)
        for value, count in zip(found, counts, strict=True):
            name = repr(float(value)).removesuffix(".0")
            self._counts[name] = self._counts.get(name, 0) + int(count)
        if len(self._counts) > MAX_CLASSES:
            self._counts = None

    def summary(self) -> LabelSummary:
        """The summary of the labels added so far."""
        least, most = self._limits or (None, None)
        least_sum, most_sum = self._sums or (None, None)
        return LabelSummary(
            rows=self._rows,
            shape=self._shape,
            min=least,
            max=most,
            integral=self._integral,
            zero_or_one=self._zero_or_one,
            least_sum=least_sum,
            most_sum=most_sum,
            counts=None if self._sums is not None else self._counts,
            ones=self._summed_ones(),
        )

    def _summed_ones(self) -> tuple[int, ...] | None:
        if self._ones is None or not self._zero_or_one or len(self._ones) > MAX_CLASSES:
            return None
        return tuple(self._ones.tolist())


def _wider(
    limits: tuple[float, float] | None, values: NDArray[np.float64]
) -> tuple[float, float] | None:
    values = values[np.isfinite(values)]
    if not values.size:
        return limits
    least, most = float(values.min()), float(values.max())
    return (least, most) if limits is None else (min(limits[0], least), max(limits[1], most))
