"""Statistics of a dataset and the schema inferred from them, as types and as JSON files."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from stoker.core.errors import DataError, Plain
from stoker.core.files import read_json
from stoker.data.features.spec import read_as

TOP_VALUES = 100
"""Number of most frequent values kept per column; of a column with no more, all values are known."""

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
    """Values in each of `HISTOGRAM_BINS` bins of equal width from min to max; one bin if those are
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
    """Number of rows with a value; of vectors, as below, number of values in all rows."""

    missing: int
    """Number of rows without a value: null, NaN, the empty string. Of lists of varying length, number
    of missing values in them and of lists without a value."""

    distinct: int | None
    """Exact number of different values; None for images."""

    numbers: NumberStatistics | None
    """Set for numbers."""

    lengths: LengthStatistics | None
    """Set for strings and images."""

    top: tuple[ValueCount, ...]
    """The most frequent values, the smaller first among equals; of strings, and of numbers with at
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


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFacts:
    """How one split relates to the others. Rows with images are compared by their images alone."""

    share: float
    """Its share of all rows."""

    distinct: int
    """Number of different rows in it."""

    label_rates: dict[str, dict[str, float]]
    """Label -> value -> its share of the split's labels; empty for vectors and for labels with more
    than `TOP_VALUES` values."""

    copies_of_train: int | None
    """Number of rows that are also in the training split; None for the training split, and for images
    that are stored there in another form."""

    features_in_train: int | None
    """The same for rows without their labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Statistics of all splits of a dataset."""

    fingerprint: str
    """Fingerprint of the dataset."""

    rows: dict[str, int]
    """Split -> number of records."""

    splits: dict[str, tuple[ColumnStatistics, ...]]
    """Split -> columns, in the dataset's order."""

    distinct: int | None = None
    """Number of different rows in all splits together; None if they were not compared."""

    split_facts: dict[str, SplitFacts] = field(default_factory=dict)
    """Split with records -> how it relates to the others; empty if they were not compared."""

    def column(self, split: str, name: str) -> ColumnStatistics:
        """Return one column of one split.

        Raises:
            KeyError: there is no such column.
        """
        for column in self.splits[split]:
            if column.name == name:
                return column
        raise KeyError(name)


def load_statistics(path: Path) -> Statistics:
    """Read `statistics.json`.

    Raises:
        DataError: it is missing, damaged, or something else.
    """
    return read_as(Statistics, read_json(path), f"{path} must hold statistics")


TRAIN = "train"
"""The split that the schema is inferred from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnSchema:
    """Expectations on one column."""

    name: str
    """Name of the raw column."""

    dtype: str
    """Its type."""

    required: bool
    """Whether the training split misses no value."""

    missing_share: float
    """Share of missing rows in the training split; of vectors and lists, of missing values."""

    domain: tuple[str, ...] | None
    """All values, sorted, of a column of strings with at most `TOP_VALUES` of them; else None."""

    min: float | None
    """The smallest finite value of a column of numbers."""

    max: float | None
    """The largest."""

    length: int | None = None
    """Values per row; None for single values, 0 for lists of varying length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """Expectations on a dataset."""

    columns: tuple[ColumnSchema, ...]
    """In the dataset's order."""

    labels: tuple[str, ...] = ()
    """The labels that are raw columns, not computed by the transform."""


def infer_schema(statistics: Statistics, *, labels: Collection[str] = ()) -> Schema:
    """Infer the schema from the training split.

    Args:
        statistics: Statistics of all splits; only `train` is used.
        labels: The labels that are raw columns.

    Raises:
        DataError: the training split is missing or empty.
    """
    columns = statistics.splits.get(TRAIN, ())
    if not columns:
        raise DataError(
            f"a schema needs a split {TRAIN!r} with records",
            got=Plain(", ".join(f"{name}: {rows}" for name, rows in statistics.rows.items())),
            fix="Name it under data.splits.",
        )
    return Schema(
        columns=tuple(_column(column) for column in columns),
        labels=tuple(column.name for column in columns if column.name in labels),
    )


def load_schema(path: Path) -> Schema:
    """Read `schema.json`.

    Raises:
        DataError: it is missing, damaged, or something else.
    """
    return read_as(Schema, read_json(path), f"{path} must hold a schema")


def _column(column: ColumnStatistics) -> ColumnSchema:
    is_small = column.dtype == "string" and 0 < (column.distinct or 0) <= TOP_VALUES
    return ColumnSchema(
        name=column.name,
        dtype=column.dtype,
        required=column.missing == 0,
        missing_share=column.missing_share,
        domain=tuple(sorted(top.value for top in column.top)) if is_small else None,
        min=column.numbers.min if column.numbers else None,
        max=column.numbers.max if column.numbers else None,
        length=column.length,
    )
