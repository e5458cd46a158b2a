"""Statistics of one column of values, the same for the analysis of a dataset and for a server."""

from __future__ import annotations

from dataclasses import dataclass

TOP_VALUES = 100
"""Number of most frequent values kept per column; if a column has no more, all its values are known."""

HISTOGRAM_BINS = 20
"""Number of bins of equal width, as many as a small chart can show."""

QUANTILE_BUCKETS = 10
"""Deciles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberStatistics:
    """Statistics of the finite values of a column of numbers; None if there are none."""

    mean: float | None
    """Their mean; None also if it is beyond float64."""

    std: float | None
    """Their standard deviation (0 delta degrees of freedom)."""

    min: float | None
    """The smallest."""

    max: float | None
    """The largest."""

    zeros: int
    """Number of zeros."""

    infinite: int
    """Number of infinite values; counted only here."""

    quantiles: tuple[float, ...]
    """The nine deciles, exact."""

    histogram: tuple[int, ...]
    """Number of values in each of `HISTOGRAM_BINS` bins of equal width from min to max; one bin if those are
    equal, none without a value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthStatistics:
    """Lengths of strings (characters), encoded images (bytes) or lists (values), without missing ones."""

    mean: float | None
    """The mean length."""

    min: int | None
    """The shortest."""

    max: int | None
    """The longest."""

    quantiles: tuple[float, ...] = ()
    """For images, the nine deciles, exact; none if training images are stored in another form than
    their original one, and in statistics of earlier versions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueCount:
    """One value and its count."""

    value: str
    """The value; a number as Python prints it."""

    count: int
    """Number of rows, or of elements of vectors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnStatistics:
    """Statistics of one column of one split."""

    name: str
    """Name of the raw column."""

    dtype: str
    """Its type, see `stoker.data.columns`."""

    count: int
    """Number of rows with a value; for vectors, as below, number of values in all rows."""

    missing: int
    """Number of rows without a value: null, NaN, the empty string. For lists of varying length, number
    of missing values in them and of lists without a value."""

    distinct: int | None
    """Exact number of different values; None for images."""

    numbers: NumberStatistics | None
    """Set for numbers."""

    lengths: LengthStatistics | None
    """Set for strings and images."""

    top: tuple[ValueCount, ...]
    """The most frequent values, the smaller first among equals; for strings, and for numbers with at
    most `TOP_VALUES` different values."""

    length: int | None = None
    """Values per row; None for single values, 0 for lists of varying length."""

    whole: bool = False
    """Whether the source has whole numbers only, stored as floats because some are missing."""

    list_lengths: LengthStatistics | None = None
    """Values per list of varying length; a missing list has none."""

    @property
    def missing_share(self) -> float:
        """Share of missing rows (of vectors: values)."""
        return self.missing / max(self.count + self.missing, 1)
