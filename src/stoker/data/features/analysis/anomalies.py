"""Find anomalies: differences from the schema, data that no model can learn from, and skew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stoker.core.statistics.columns import TOP_VALUES, ColumnStatistics
from stoker.core.statistics.gap import distribution_gap
from stoker.data.columns import VARYING
from stoker.data.features.analysis.statistics import TRAIN, ColumnSchema, Schema, Statistics
from stoker.data.sources.columns.text import WIDEST_FLOAT32

MISSING_RISE = 0.05
"""A split is reported if its share of missing values is higher than in training by more than this."""

FAR_OUTSIDE = 1.0
"""A value is reported if its distance from the training range is more than this many widths of the range."""

FEW_STEPS = 100
"""If float32 has fewer values than this between a column's minimum and maximum, the column has lost digits
that a model may need."""

RARE_SHARE = 0.01
"""A class with less than this share of the rows is reported: it is learned badly or not at all."""

_SHOWN = 5
"""Maximum number of values that one message names."""

Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Anomaly:
    """One problem with the data."""

    split: str
    """The split with the problem."""

    column: str
    """The column; "" for the whole split."""

    kind: str
    """Name of the kind of problem, for programs."""

    severity: Severity
    """`error`: training on this data would be wrong. `warning`: someone should look at it."""

    message: str
    """The expected and the actual state, for people."""


def find_anomalies(statistics: Statistics, schema: Schema) -> list[Anomaly]:
    """Compare every split with the schema, and check the training split.

    Returns:
        Errors first, then by split and column in the order of the data.
    """
    found = [
        anomaly for split in statistics.splits for anomaly in _split(statistics, schema, split)
    ]
    return sorted(found, key=lambda anomaly: anomaly.severity != "error")


def _split(statistics: Statistics, schema: Schema, split: str) -> Iterator[Anomaly]:
    if not statistics.rows[split]:
        yield _make(split, "", "empty_split", "error", "the split holds no records")
        return
    columns = {column.name: column for column in statistics.splits[split]}
    for expected in schema.columns:
        column = columns.pop(expected.name, None)
        if column is None:
            yield _make(split, expected.name, "absent", "error", "the column is missing")
        else:
            yield from _column(split, column, expected, is_label=expected.name in schema.labels)
    for name in columns:
        yield _make(split, name, "unexpected", "warning", "the column is not in the schema")


def _column(
    split: str, column: ColumnStatistics, expected: ColumnSchema, *, is_label: bool
) -> Iterator[Anomaly]:
    if column.dtype != expected.dtype:
        text = f"it holds {column.dtype}, but the schema says {expected.dtype}"
        yield _make(split, column.name, "dtype", "error", text)
        return
    if column.length != expected.length:
        text = f"it holds {_form(column.length)}, but the schema says {_form(expected.length)}"
        yield _make(split, column.name, "length", "error", text)
        return
    if is_label and column.length == VARYING:
        is_label = False
        if split == TRAIN:
            yield _make(split, column.name, "label_lists", "warning", _LABEL_LISTS)
    yield from _infinite(split, column, is_label=is_label)
    if is_label:
        yield from _label(split, column)
    if split == TRAIN:
        yield from _constant(split, column)
        yield from _rounded(split, column)
    else:
        yield from _missing(split, column, expected)
        yield from _new_values(split, column, expected, is_label=is_label)
        yield from _outside(split, column, expected)


def _form(length: int | None) -> str:
    if length == VARYING:
        return "lists of varying length"
    return "single values" if length is None else f"vectors of length {length}"


def _places(column: ColumnStatistics) -> str:
    if column.length == VARYING:
        return "the values of its lists"
    return "the rows" if column.length is None else "the elements of its vectors"


def _infinite(split: str, column: ColumnStatistics, *, is_label: bool) -> Iterator[Anomaly]:
    if column.numbers and column.numbers.infinite:
        text = f"{column.numbers.infinite:,} values are infinite"
        yield _make(split, column.name, "infinite", "error" if is_label else "warning", text)


def _constant(split: str, column: ColumnStatistics) -> Iterator[Anomaly]:
    if not column.count:
        yield _make(split, column.name, "all_missing", "warning", "no row holds a value")
    elif column.distinct == 1 and not column.missing and not _lengths_vary(column):
        where = "row" if column.length is None else "element of its vectors"
        where = "value of its lists" if column.length == VARYING else where
        text = f"every {where} holds the same value, {column.top[0].value!r}"
        yield _make(split, column.name, "constant", "warning", text)


def _rounded(split: str, column: ColumnStatistics) -> Iterator[Anomaly]:
    """Find numbers far from 0 and close together, many of which float32 stores as the same value."""
    numbers = column.numbers
    if column.dtype != "float32" or numbers is None or numbers.min is None or numbers.max is None:
        return
    span, widest = numbers.max - numbers.min, max(abs(numbers.min), abs(numbers.max))
    if column.whole and widest <= WIDEST_FLOAT32:
        return
    step = float(np.spacing(np.float32(widest)))
    if 0 < span / step < FEW_STEPS:
        text = (
            f"float32 has {span / step + 1:.0f} values from {numbers.min!r} to {numbers.max!r}, "
            f"{step:g} apart, and rounds every number to one of them"
        )
        if step <= 1:
            text += " (whole numbers are not changed)"
        yield _make(split, column.name, "rounded", "warning", text)


def _lengths_vary(column: ColumnStatistics) -> bool:
    return column.list_lengths is not None and column.list_lengths.min != column.list_lengths.max


def _missing(split: str, column: ColumnStatistics, expected: ColumnSchema) -> Iterator[Anomaly]:
    share = column.missing_share
    is_new = expected.required and column.missing > 0
    if is_new or share > expected.missing_share + MISSING_RISE:
        text = (
            f"{share:.1%} of {_places(column)} are missing ({expected.missing_share:.1%} in the "
            "training split)"
        )
        yield _make(split, column.name, "missing", "warning", text)


def _new_values(
    split: str, column: ColumnStatistics, expected: ColumnSchema, *, is_label: bool
) -> Iterator[Anomaly]:
    if expected.domain is None:
        return
    new = [top for top in column.top if top.value not in expected.domain]
    many = (column.distinct or TOP_VALUES + 1) > TOP_VALUES
    if new or many:
        shown = ", ".join(f"{top.value[:40]!r} ({top.count:,})" for top in new[:_SHOWN])
        more = "..." if many or len(new) > _SHOWN else ""
        text = f"it has values that the training split does not have: {shown}{more}"
        yield _make(split, column.name, "new_values", "error" if is_label else "warning", text)


def _outside(split: str, column: ColumnStatistics, expected: ColumnSchema) -> Iterator[Anomaly]:
    numbers = column.numbers
    if numbers is None or expected.min is None or expected.max is None or numbers.min is None:
        return
    margin = FAR_OUTSIDE * (expected.max / 2 - expected.min / 2)
    low, high = expected.min / 2 - margin, expected.max / 2 + margin
    highest = numbers.min if numbers.max is None else numbers.max
    if numbers.min / 2 < low or highest / 2 > high:
        text = (
            f"its values range from {numbers.min:g} to {highest:g}; in the training split, from "
            f"{expected.min:g} to {expected.max:g}"
        )
        yield _make(split, column.name, "out_of_range", "warning", text)


def _label(split: str, column: ColumnStatistics) -> Iterator[Anomaly]:
    if column.missing:
        text = f"{column.missing:,} rows have no label"
        yield _make(split, column.name, "label_missing", "error", text)
    if split == TRAIN and column.distinct == 1:
        yield _make(split, column.name, "one_class", "error", _ONE_CLASS)
    if split == TRAIN and (column.distinct or 0) > 1 and len(column.top) == column.distinct:
        rarest = column.top[-1]
        if rarest.count < RARE_SHARE * column.count:
            text = f"class {rarest.value!r} has only {rarest.count:,} of {column.count:,} rows"
            yield _make(split, column.name, "label_imbalance", "warning", text)


_LABEL_LISTS = (
    "a raw column that is the label must hold one value per record, but this one holds lists of varying "
    "length: compute the label from the lists in preprocessing_fn"
)

_ONE_CLASS = (
    "all rows have the same label: there is nothing to learn (if your train_step needs no label, pass "
    "the features as the label)"
)


def _make(split: str, column: str, kind: str, severity: Severity, message: str) -> Anomaly:
    return Anomaly(split=split, column=column, kind=kind, severity=severity, message=message)


SKEW_SHARE = 0.1
"""A split is reported if its shares of values differ from the training split's by more than this."""


def find_skew(
    split: str, column: ColumnStatistics, training: ColumnStatistics
) -> Iterator[Anomaly]:
    """Compare the distribution of one column with that of the training split.

    Args:
        split: Name of the compared split, for the message.
        column: The column in that split.
        training: The same column in the training split.

    Yields:
        At most one anomaly: if the shares differ by more than `SKEW_SHARE` beyond chance.
    """
    gap = distribution_gap(column, training)
    if gap is not None and gap.beyond_chance > SKEW_SHARE:
        yield Anomaly(
            split=split, column=column.name, kind="skew", severity="warning", message=gap.text
        )
