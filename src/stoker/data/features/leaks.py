"""Columns that decide the label alone: a copy of it, or what is only known after it.

Statistics of each column have been taken; this needs one query for all columns of numbers and one
for each column of few values.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence

from stoker.cluster.limits import usable_cores
from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.features import engine
from stoker.data.features.anomalies import Anomaly
from stoker.data.features.schema import TRAIN
from stoker.data.features.statistics import ColumnStatistics, Statistics

LEAST_ROWS = 100
"""Rows of the training split below which a column may decide the label by chance."""

LEAST_OTHERS = 10
"""Rows that are not of the commonest class below which it may."""

ROWS_PER_VALUE = 10
"""Rows per different value, on average, below which its values say little by deciding the label."""

SAME = 1 - 1e-6
"""Correlation with a label of numbers from which a column is a linear copy of it; rounding to two
digits less than the standard deviation has leaves more."""

LARGEST = 1e100
"""Numbers from which squares can overflow, which DuckDB refuses; marks of missing values are so large."""

_NUMBERS = ("int64", "float32", "float64")


def find_leaks(
    dataset: Dataset, statistics: Statistics, labels: Collection[str]
) -> Iterator[Anomaly]:
    """Find the columns whose values alone decide a label in every row of the training split.

    Args:
        dataset: Shards whose hashes were checked, by `compute_statistics`.
        statistics: Of the dataset.
        labels: The raw columns that are labels.
    """
    if statistics.rows.get(TRAIN, 0) < LEAST_ROWS:
        return
    told = {column.name: column for column in statistics.splits[TRAIN]}
    columns = {column.name: column for column in dataset.columns}
    features = [
        column
        for column in dataset.columns
        if column.name not in labels and column.dtype != "image" and column.length is None
    ]
    with engine.connection(threads=usable_cores()) as backend:
        split = engine.read_split(backend, dataset, TRAIN)
        for name in labels:
            if name in columns and not told[name].missing and columns[name].length is None:
                for column in _deciding(split, columns[name], told, features):
                    yield Anomaly(
                        split=TRAIN,
                        column=column,
                        kind="decides_label",
                        severity="warning",
                        message=f"it alone decides the label {name!r} in every row",
                    )


def _deciding(
    split: engine.Split,
    label: Column,
    told: dict[str, ColumnStatistics],
    features: Sequence[Column],
) -> list[str]:
    about = told[label.name]
    found: set[str] = set()
    if (about.distinct or 0) > 2 and label.dtype in _NUMBERS:
        found.update(_linear(split, label, [c for c in features if c.dtype in _NUMBERS]))
    counts = [top.count for top in about.top]
    are_classes = len(counts) == about.distinct
    if are_classes and sum(counts) - max(counts, default=0) >= LEAST_OTHERS:
        found.update(_apart(split, label, features))
        for column in features:
            distinct = told[column.name].distinct or 0
            few = 1 < distinct + (told[column.name].missing > 0) <= about.count / ROWS_PER_VALUE
            if few and column.name not in found and _pure(split, label, column):
                found.add(column.name)
    return [column.name for column in features if column.name in found]


def _linear(split: engine.Split, label: Column, numbers: Sequence[Column]) -> list[str]:
    if not numbers:
        return []
    wanted = split.value(label.name).cast("float64")
    asked = {}
    for index, column in enumerate(numbers):
        value = split.value(column.name).cast("float64")
        both = engine.is_present(value, "float64") & (value.abs() < LARGEST)
        both &= wanted.abs() < LARGEST
        asked[f"r{index}"] = value.corr(wanted, where=both, how="pop")
        asked[f"n{index}"] = both.sum()
    row = split.table.aggregate(**asked).to_pyarrow().to_pylist()[0]
    return [
        column.name
        for index, column in enumerate(numbers)
        if (row[f"n{index}"] or 0) >= LEAST_ROWS and abs(row[f"r{index}"] or 0) >= SAME
    ]


def _apart(split: engine.Split, label: Column, features: Sequence[Column]) -> Iterator[str]:
    """Columns of which each class has a range of numbers of its own, or is missing as a whole."""
    asked = {}
    for index, column in enumerate(features):
        value = split.value(column.name)
        present = engine.is_present(value, column.dtype)
        # Without filters, which cost ten times the rest: a shard holds null for a missing number.
        asked[f"missing{index}"] = (~present).cast("int64").sum()
        if column.dtype in _NUMBERS:
            asked |= {f"low{index}": value.min(), f"high{index}": value.max()}
    counted = split.table.group_by(wanted=split.value(label.name))
    rows = counted.aggregate(rows=split.table.count(), **asked).to_pyarrow().to_pylist()
    for index, column in enumerate(features):
        missing = [row[f"missing{index}"] or 0 for row in rows]
        present = [row for row, count in zip(rows, missing, strict=True) if not count]
        without = sum(count == row["rows"] for row, count in zip(rows, missing, strict=True))
        if without < 2 and without + len(present) == len(rows):
            is_number = column.dtype in _NUMBERS
            limits = [(row[f"low{index}"], row[f"high{index}"]) for row in present if is_number]
            if len(present) == 1 or _disjoint(limits):
                yield column.name


def _disjoint(limits: Sequence[tuple[float, float]]) -> bool:
    ordered = sorted(limits)
    return len(ordered) > 1 and all(
        high < low for (_, high), (low, _) in itertools.pairwise(ordered)
    )


def _pure(split: engine.Split, label: Column, column: Column) -> bool:
    """Whether rows of equal value have equal labels."""
    table = split.table.select(value=split.value(column.name), wanted=split.value(label.name))
    by_value = table.group_by("value").aggregate(low=table.wanted.min(), high=table.wanted.max())
    mixed = by_value.filter(by_value.low != by_value.high).count()
    return int(mixed.to_pyarrow().as_py()) == 0
