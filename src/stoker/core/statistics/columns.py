"""Statistics of one column of values; the analysis of a dataset and a server use the same types."""

from __future__ import annotations

from dataclasses import dataclass

TOP_VALUES = 100
"""Number of most frequent values that are kept per column. If a column has at most this many, all its values are
kept."""

HISTOGRAM_BINS = 20
"""Number of bins of equal width in a histogram: a small chart cannot show more."""

QUANTILE_BUCKETS = 10
"""Number of parts of equal count that the quantiles divide the values into; 10: the quantiles are deciles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberStatistics:
    """Statistics of the finite values in a column of numbers; mean, std, min and max are None if there are none."""

    mean: float | None
    """Mean of the values; also None if it is beyond the range of float64."""

    std: float | None
    """Standard deviation of the values (0 delta degrees of freedom)."""

    min: float | None
    """The smallest value."""

    max: float | None
    """The largest value."""

    zeros: int
    """Number of zeros."""

    infinite: int
    """Number of infinite values; no other field here includes them."""

    quantiles: tuple[float, ...]
    """The nine deciles, exact."""

    histogram: tuple[int, ...]
    """Number of values in each of `HISTOGRAM_BINS` bins of equal width from min to max; a single bin if min and max
    are equal; empty if there are no values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthStatistics:
    """Lengths of strings (characters), of encoded images (bytes) or of lists (values); missing ones are left out."""

    mean: float | None
    """The mean length."""

    min: int | None
    """The smallest length."""

    max: int | None
    """The largest length."""

    quantiles: tuple[float, ...] = ()
    """For images, the nine exact deciles of the encoded size in bytes. Empty if training images are not stored in their
    original form, and in statistics of earlier versions of Stoker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueCount:
    """A value and the number of its occurrences."""

    value: str
    """The value as text; a number as Python prints it."""

    count: int
    """Number of rows with this value; for vectors and lists, number of elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnStatistics:
    """Statistics of one column of one split."""

    name: str
    """Name of the raw column."""

    dtype: str
    """The column's type, see `stoker.data.columns`."""

    count: int
    """Number of rows with a value; for vectors, number of values in all rows (as in the fields below)."""

    missing: int
    """Number of rows without a value: null, NaN or the empty string. For lists of varying length: number of missing
    values inside lists, plus number of lists without a value."""

    distinct: int | None
    """Exact number of different values; None for images."""

    numbers: NumberStatistics | None
    """Statistics of numbers; None for other types."""

    lengths: LengthStatistics | None
    """Lengths of strings and images; None for other types."""

    top: tuple[ValueCount, ...]
    """The most frequent values, for strings, and for numbers with at most `TOP_VALUES` different values. Of equally
    frequent values, the smaller one is first."""

    length: int | None = None
    """Number of values per row; None for single values, 0 for lists of varying length."""

    whole: bool = False
    """Whether the source has only whole numbers, which are stored as floats because some are missing."""

    list_lengths: LengthStatistics | None = None
    """Number of values per list, for lists of varying length; a missing list has 0 values."""

    @property
    def missing_share(self) -> float:
        """Share of rows without a value; for vectors, share of missing values."""
        return self.missing / max(self.count + self.missing, 1)
