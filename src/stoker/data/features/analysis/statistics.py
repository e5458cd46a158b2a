"""Types and JSON files of a dataset's statistics, and of the schema that is inferred from them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from stoker.core.errors import DataError, Plain
from stoker.core.files import read_json
from stoker.core.statistics.columns import TOP_VALUES, ColumnStatistics
from stoker.data.features.spec import read_as


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitFacts:
    """Facts that relate one split to the others. Rows with images are compared only by their images."""

    share: float
    """Its share of all rows."""

    distinct: int
    """Number of different rows in the split."""

    label_rates: dict[str, dict[str, float]]
    """Label -> value -> the value's share of the split's labels; empty for vectors and for labels with
    more than `TOP_VALUES` values."""

    copies_of_train: int | None
    """Number of rows that are also in the training split. None for the training split itself, and for
    images if their original bytes are not stored."""

    features_in_train: int | None
    """Number of rows whose features are also in the training split; None as for `copies_of_train`."""


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
    """Number of different rows in all splits together; None if the splits were not compared."""

    split_facts: dict[str, SplitFacts] = field(default_factory=dict)
    """Split with records -> its facts; empty if the splits were not compared."""

    def column(self, split: str, name: str) -> ColumnStatistics:
        """Return one column of one split.

        Raises:
            KeyError: the column does not exist.
        """
        for column in self.splits[split]:
            if column.name == name:
                return column
        raise KeyError(name)


def load_statistics(path: Path) -> Statistics:
    """Read `statistics.json`.

    Raises:
        DataError: the file is missing or damaged, or does not hold statistics.
    """
    return read_as(Statistics, read_json(path), f"{path} must hold statistics")


TRAIN = "train"
"""The split that the schema is inferred from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnSchema:
    """Expectations for one column."""

    name: str
    """Name of the raw column."""

    dtype: str
    """Type of the column's values."""

    required: bool
    """Whether the training split has no missing value."""

    missing_share: float
    """Share of missing values in the training split; elements of vectors and lists count."""

    domain: tuple[str, ...] | None
    """All distinct values, sorted, of a column of strings with at most `TOP_VALUES` of them; else None."""

    min: float | None
    """The smallest finite value of a column of numbers; else None."""

    max: float | None
    """The largest finite value of a column of numbers; else None."""

    length: int | None = None
    """Number of values per row; None for single values, 0 for lists of varying length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schema:
    """Expectations for a dataset."""

    columns: tuple[ColumnSchema, ...]
    """One schema per column, in the dataset's order."""

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
            f"a schema can be inferred only from a split {TRAIN!r} with records",
            got=Plain(", ".join(f"{name}: {rows}" for name, rows in statistics.rows.items())),
            fix=f"Give {TRAIN!r} a share of the data under data.splits.",
        )
    return Schema(
        columns=tuple(_column(column) for column in columns),
        labels=tuple(column.name for column in columns if column.name in labels),
    )


def load_schema(path: Path) -> Schema:
    """Read `schema.json`.

    Raises:
        DataError: the file is missing or damaged, or does not hold a schema.
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
