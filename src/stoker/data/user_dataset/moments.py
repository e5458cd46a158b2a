"""What is kept of tensors that are too large to be counted value by value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.data.features.analysis.statistics import (
    ColumnStatistics,
    LengthStatistics,
    NumberStatistics,
)
from stoker.data.user_dataset.description import TensorColumn


@dataclass
class Moments:
    """What is kept of a tensor's values: of bytes, their lengths."""

    count: int = 0
    finite: int = 0
    missing: int = 0
    infinite: int = 0
    zeros: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    def add(self, values: NDArray[Any]) -> None:
        """Take in a batch.

        Source: Chan, Golub, LeVeque 1979, updating formulae for the sample variance.
        """
        if values.dtype == object:
            values = np.array([len(value) for value in values.flat])
        numbers = values.astype(np.float64).reshape(-1)
        kept = numbers[np.isfinite(numbers)]
        missing = int(np.isnan(numbers).sum())
        self.missing += missing
        self.count += numbers.size - missing
        self.infinite += numbers.size - missing - kept.size
        if not kept.size:
            return
        mean, together = float(kept.mean()), self.finite + kept.size
        away = mean - self.mean
        self.squares += float(((kept - mean) ** 2).sum())
        self.squares += away * away * self.finite * kept.size / together
        self.mean += away * kept.size / together
        self.finite = together
        self.zeros += int((kept == 0).sum())
        self.low, self.high = min(self.low, float(kept.min())), max(self.high, float(kept.max()))

    def statistics(self, column: TensorColumn) -> ColumnStatistics:
        """The same in the form that a report shows."""
        is_bytes, seen = column.dtype == "string", self.finite > 0
        numbers = NumberStatistics(
            mean=self.mean if seen else None,
            std=math.sqrt(self.squares / self.finite) if seen else None,
            min=self.low if seen else None,
            max=self.high if seen else None,
            zeros=self.zeros,
            infinite=self.infinite,
            quantiles=(),
            histogram=(),
        )
        lengths = LengthStatistics(
            mean=self.mean if seen else None,
            min=int(self.low) if seen else None,
            max=int(self.high) if seen else None,
        )
        return ColumnStatistics(
            name=column.name,
            dtype=_kind(column),
            count=self.count,
            missing=self.missing,
            distinct=None,
            numbers=None if is_bytes else numbers,
            lengths=lengths if is_bytes else None,
            top=(),
        )


def _kind(column: TensorColumn) -> str:
    if column.shape:
        sizes = ", ".join("any" if size is None else str(size) for size in column.shape)
        return f"{column.dtype} tensor [{sizes}]"
    return "bytes" if column.dtype == "string" else column.dtype
