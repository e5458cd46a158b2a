"""What the data is, as types and as JSON; `measure` takes it from the shards."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from stoker.core.errors import DataError, Plain
from stoker.core.files import read_json
from stoker.data.features.spec import read_as

TOP_VALUES = 100
"""Most frequent values kept by column; a column with no more values is known whole."""

HISTOGRAM_BINS = 20
"""Bars of equal width: what a small chart can show."""

QUANTILE_BUCKETS = 10
"""Deciles."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NumberStatistics:
    """Of the finite values of a column of numbers; all None where there is none."""

    mean: float | None
    """Their mean; None also where it is beyond float64."""

    std: float | None
    """Their standard deviation (0 delta degrees of freedom)."""

    min: float | None
    """The smallest."""

    max: float | None
    """The largest."""

    zeros: int
    """How many are 0."""

    infinite: int
    """Values that are infinite; they are counted here only."""

    quantiles: tuple[float, ...]
    """The nine deciles, exact."""

    histogram: tuple[int, ...]
    """Values in each of `HISTOGRAM_BINS` bins of equal width from min to max; one bin where those
    are equal, none where there is no value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthStatistics:
    """Lengths of strings (characters) or encoded images (bytes), missing ones left out; of lists."""

    mean: float | None
    """The mean length."""

    min: int | None
    """The shortest."""

    max: int | None
    """The longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ValueCount:
    """One value and how often it stands there."""

    value: str
    """The value, numbers as Python writes them."""

    count: int
    """Rows, or places in vectors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnStatistics:
    """One column of one split."""

    name: str
    """The raw column."""

    dtype: str
    """Its type, see `stoker.data.columns`."""

    count: int
    """Rows that hold a value; of vectors, as in all that follows, the values in all rows."""

    missing: int
    """Rows that hold none: null, NaN, the empty string. Of lists of varying length the missing values
    in them, and the lists without a value."""

    distinct: int | None
    """Different values, exactly; None for images."""

    numbers: NumberStatistics | None
    """For numbers."""

    lengths: LengthStatistics | None
    """For strings and images."""

    top: tuple[ValueCount, ...]
    """The most frequent values, the smaller first among equals; of strings, and of numbers with at
    most `TOP_VALUES` different values."""

    length: int | None = None
    """Values in each row; None where it is a single one, 0 where lists vary in length."""

    whole: bool = False
    """Whether the source has whole numbers only, stored as floats because some are missing."""

    list_lengths: LengthStatistics | None = None
    """Values in each list, where they vary; a missing list has none."""

    @property
    def missing_share(self) -> float:
        """Missing rows (of vectors: values) by all."""
        return self.missing / max(self.count + self.missing, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFacts:
    """How one split relates to the others. Rows with images are compared by these alone."""

    share: float
    """Its rows by those of all splits."""

    distinct: int
    """Different rows in it."""

    label_rates: dict[str, dict[str, float]]
    """Label -> value -> its share of the split's labels; empty for vectors and for labels with more
    than `TOP_VALUES` values."""

    copies_of_train: int | None
    """Rows that the training split holds too; None for the training split, and for images that are
    stored there in another form."""

    features_in_train: int | None
    """The same of rows without their labels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """All splits of a dataset."""

    fingerprint: str
    """The dataset that this was taken of."""

    rows: dict[str, int]
    """Split -> records."""

    splits: dict[str, tuple[ColumnStatistics, ...]]
    """Split -> columns, in the dataset's order."""

    distinct: int | None = None
    """Different rows in all splits together; None where they were not compared."""

    split_facts: dict[str, SplitFacts] = field(default_factory=dict)
    """Split that holds a record -> how it relates to the others; empty where they were not compared."""

    def column(self, split: str, name: str) -> ColumnStatistics:
        """One column of one split.

        Raises:
            KeyError: there is none.
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
"""The split that the schema is taken from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnSchema:
    """What one column should look like."""

    name: str
    """The raw column."""

    dtype: str
    """Its type."""

    required: bool
    """True where the training split misses no value."""

    missing_share: float
    """Share of the training split's rows that miss it; of vectors and lists, of their values."""

    domain: tuple[str, ...] | None
    """All values, sorted, of a column of strings that has at most `TOP_VALUES` of them; else None."""

    min: float | None
    """The smallest finite value of a column of numbers."""

    max: float | None
    """The largest."""

    length: int | None = None
    """Values in each row; None where it is a single one, 0 where lists vary in length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """What a dataset should look like."""

    columns: tuple[ColumnSchema, ...]
    """In the dataset's order."""

    labels: tuple[str, ...] = ()
    """The raw columns that are labels, and not made by the transform."""


def infer_schema(statistics: Statistics, *, labels: Collection[str] = ()) -> Schema:
    """Take the schema from the training split.

    Args:
        statistics: Of all splits; only `train` is looked at.
        labels: The labels, where they are raw columns.

    Raises:
        DataError: there is no training split, or it is empty.
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
