"""What the training split says that every split should look like."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stoker.core.errors import DataError, Plain
from stoker.core.files import read_json
from stoker.data.features.analysis.statistics import TOP_VALUES, ColumnStatistics, Statistics

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


def schema_to_json(schema: Schema) -> dict[str, Any]:
    """As JSON's own types."""
    return asdict(schema)


def load_schema(path: Path) -> Schema:
    """Read `schema.json`.

    Raises:
        DataError: it is missing, damaged, or something else.
    """
    raw = read_json(path)
    try:
        return Schema(
            columns=tuple(
                ColumnSchema(
                    **{**item, "domain": None if item["domain"] is None else tuple(item["domain"])}
                )
                for item in raw["columns"]
            ),
            labels=tuple(raw["labels"]),
        )
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{path} must hold a schema",
            got=Plain(f"{type(error).__name__}: {error}"),
            fix="Run `stoker analyze` again.",
        ) from error


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
