"""Find columns that alone decide the label: copies of the label, or values that are known only after it.

The statistics of each column are already computed. The checks need one query for all columns of numbers,
and one query for each column with few distinct values. `analyze` checks labels that are raw columns;
`transform` checks the labels that `preprocessing_fn` computes. Each element of a vector or list is checked
like a column, up to `MAX_ELEMENTS`; the length of lists of varying length is checked, too. Images are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stoker.cluster.limits import usable_cores
from stoker.core.statistics.columns import ColumnStatistics
from stoker.data.columns import Column, Dtype
from stoker.data.dataset import Dataset, one_shard
from stoker.data.features import engine
from stoker.data.features.analysis.anomalies import Anomaly
from stoker.data.features.analysis.measure import compute_statistics
from stoker.data.features.analysis.statistics import TRAIN, Statistics
from stoker.data.features.spec import LabelSpec

MIN_ROWS = 100
"""With fewer training rows, nothing is checked: a column may decide the label by chance."""

MIN_OTHERS = 10
"""With fewer rows outside the most common class, a column may decide the class by chance."""

ROWS_PER_VALUE = 10
"""With fewer rows per distinct value, on average, it means little that each value has a single label."""

SAME = 1 - 1e-6
"""A column with at least this correlation to a numeric label is a linear copy of the label. A copy that is
rounded to a hundredth of the standard deviation has a lower correlation, and is not found."""

LARGEST = 1e100
"""Larger numbers are left out: they may stand for missing values, and DuckDB fails if their squares
overflow."""

MAX_ELEMENTS = 64
"""Maximum number of elements of a vector or list column that are checked: evenly spaced elements of longer
vectors, the first elements of longer lists. Each costs about as much as a column."""

SAMPLE_ROWS = 50_000
"""Elements are checked in this many rows first: an element that does not decide the label in these rows
cannot decide it in all rows. 64 elements cost 9 s of CPU per 100,000 rows."""

_SHOWN = 5
"""Maximum number of elements that one message names."""

_NUMBERS = ("int64", "float32", "float64")


def find_leaks(
    dataset: Dataset, statistics: Statistics, labels: Collection[str]
) -> Iterator[Anomaly]:
    """Find the columns that alone decide a label in every row of the training split.

    Args:
        dataset: Shards whose hashes `compute_statistics` has checked.
        statistics: Statistics of the dataset.
        labels: The raw columns that are labels.
    """
    if statistics.rows.get(TRAIN, 0) < MIN_ROWS:
        return
    by_column = {column.name: column for column in statistics.splits[TRAIN]}
    names = [column.name for column in dataset.columns]
    features = [column for column in dataset.columns if column.name not in labels]
    with engine.connection(threads=usable_cores()) as backend:
        split = engine.read_split(backend, dataset, TRAIN)
        for name in labels:
            if name in names and _is_whole(by_column[name]):
                yield from _deciding_columns(
                    split, split.value(name), by_column[name], by_column, features
                )


def _is_whole(label: ColumnStatistics) -> bool:
    return not label.missing and label.length is None


class ComputedLabels:
    """The labels of the training split that `preprocessing_fn` computes, in a temporary file."""

    def __init__(self, folder: Path, labels: Iterable[LabelSpec]) -> None:
        """Create the file in an empty folder. Labels with several values per row are left out."""
        single = {each.name: each for each in labels if each.shape in ((), (1,))}
        dtypes: dict[str, Any] = {name: each.dtype for name, each in single.items()}
        self._columns = tuple(Column(name=name, dtype=dtype) for name, dtype in dtypes.items())
        self._path = folder / f"{TRAIN}.parquet"
        schema = pa.schema([(column.name, column.arrow_type) for column in self._columns])
        self._file, self._rows = pq.ParquetWriter(self._path, schema), 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def add(self, values: Mapping[str, NDArray[Any]]) -> None:
        """Add the next rows.

        Args:
            values: Label -> [batch] or [batch, 1] numbers, without NaN.
        """
        arrays = [pa.array(values[column.name].reshape(-1)) for column in self._columns]
        if arrays:
            self._rows += len(arrays[0])
            self._file.write_batch(pa.record_batch(arrays, schema=self._file.schema))

    def leaks(
        self,
        dataset: Dataset,
        statistics: Statistics,
        *,
        computed_from: Collection[Column],
        served: Iterable[Column],
    ) -> Iterator[Anomaly]:
        """Find the columns that decide a label, as `find_leaks` does. The file must be closed.

        If the labels are computed from a single column, every column that decides this column decides the
        labels, too: for example a copy of `price`, if the label is the logarithm of `price`.

        Args:
            dataset: The dataset that the labels were computed from.
            statistics: Statistics of the dataset.
            computed_from: Raw columns that the labels are computed from; they are not checked.
            served: Raw columns that the model sees.
        """
        if self._rows < MIN_ROWS:
            return
        made = one_shard(self._path, TRAIN, rows=self._rows, columns=self._columns)
        by_column = {column.name: column for column in statistics.splits[TRAIN]}
        all_statistics = compute_statistics(made).splits[TRAIN]
        features = [column for column in served if column not in computed_from]
        with engine.connection(threads=usable_cores()) as backend:
            read = (engine.read_split(backend, each, TRAIN) for each in (dataset, made))
            split, labels = engine.side_by_side(backend, *read)
            found: list[Anomaly] = []
            for label_statistics in all_statistics:
                found += _deciding_columns(
                    split,
                    labels.value(label_statistics.name),
                    label_statistics,
                    by_column,
                    features,
                )
            for source in computed_from if len(computed_from) == 1 else ():
                label_statistics = replace(by_column[source.name], name=all_statistics[0].name)
                if _is_whole(label_statistics) and source.name not in {
                    each.name for each in all_statistics
                }:
                    found += _deciding_columns(
                        split, split.value(source.name), label_statistics, by_column, features
                    )
        yield from dict.fromkeys(found)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Feature:
    """One value per row that may decide a label."""

    column: str
    """Name of the raw column that holds the value."""

    element: int | None = None
    """Its index in the vectors or lists of that column; None: the whole value, or the list's length."""

    dtype: Dtype
    """Type of the values."""

    value: ir.Column
    """[rows] values, an expression on the table."""

    distinct: int | None = None
    """Number of different values, the missing one included; None if it was not counted."""


def _features(
    split: engine.Split, columns: Iterable[Column], by_column: Mapping[str, ColumnStatistics]
) -> Iterator[_Feature]:
    """Return the values to check: single values, lengths of lists, elements of vectors and lists."""
    for column in columns:
        name, size = column.name, column.length
        value, found = split.value(name), by_column[name]
        if column.dtype == "image":
            continue
        if size is None:
            distinct = (found.distinct or 0) + (found.missing > 0)
            yield _Feature(column=name, dtype=column.dtype, value=value, distinct=distinct)
            continue
        lengths = found.list_lengths
        if lengths is not None:
            least, size = int(lengths.min or 0), int(lengths.max or 0)
            # An upper bound: it is not known which lengths between minimum and maximum occur.
            distinct = size - least + 1
            yield _Feature(column=name, dtype="int64", value=value.length(), distinct=distinct)
        for place in _places(size, spread=lengths is None):
            yield _Feature(column=name, element=place, dtype=column.dtype, value=value[place])


def _places(size: int, *, spread: bool) -> Sequence[int]:
    """Return at most `MAX_ELEMENTS` indices: the first ones, or evenly spaced ones."""
    if size <= MAX_ELEMENTS or not spread:
        return range(min(size, MAX_ELEMENTS))
    return [step * (size - 1) // (MAX_ELEMENTS - 1) for step in range(MAX_ELEMENTS)]


def _deciding_columns(
    split: engine.Split,
    label: ir.Column,
    label_statistics: ColumnStatistics,
    by_column: Mapping[str, ColumnStatistics],
    columns: Sequence[Column],
) -> Iterator[Anomaly]:
    """Return an anomaly for each column that decides a label of the same table.

    Args:
        split: The table.
        label: The label's column in the table.
        label_statistics: The label's statistics.
        by_column: Name of a column -> its statistics.
        columns: The columns to check; images are left out.
    """
    features = list(_features(split, columns, by_column))
    if label_statistics.count > SAMPLE_ROWS and any(each.element is not None for each in features):
        sample = engine.Split(table=split.table.limit(SAMPLE_ROWS), names=split.names)
        elements = [
            each for each in _features(sample, columns, by_column) if each.element is not None
        ]
        likely = {
            (each.column, each.element)
            for each in _deciding_features(
                sample, sample.table[label.get_name()], label_statistics, elements
            )
        }
        features = [
            each
            for each in features
            if each.element is None or (each.column, each.element) in likely
        ]
    found = _deciding_features(split, label, label_statistics, features)
    for column in columns:
        of_column = [each for each in features if each.column == column.name and each in found]
        if of_column:
            yield Anomaly(
                split=TRAIN,
                column=column.name,
                kind="decides_label",
                severity="warning",
                message=f"{_subject(column, of_column)} alone decides the label {label_statistics.name!r} in every "
                "row",
            )


def _deciding_features(
    split: engine.Split,
    label: ir.Column,
    label_statistics: ColumnStatistics,
    features: Sequence[_Feature],
) -> list[_Feature]:
    """Return the features that decide the label in every row of a table."""
    found: list[_Feature] = []
    if (label_statistics.distinct or 0) > 2 and label_statistics.dtype in _NUMBERS:
        found += _linear(split, label, [each for each in features if each.dtype in _NUMBERS])
    counts = [top.count for top in label_statistics.top]
    are_classes = len(counts) == label_statistics.distinct
    if are_classes and sum(counts) - max(counts, default=0) >= MIN_OTHERS:
        found += _separating(split, label, features)
        rest = [each for each in features if each not in found]
        for each, distinct in zip(rest, _distinct(split, rest), strict=True):
            few = 1 < distinct <= label_statistics.count / ROWS_PER_VALUE
            if few and _has_one_label_per_value(split, label, each):
                found.append(each)
    return found


def _subject(column: Column, found: Sequence[_Feature]) -> str:
    elements = [str(each.element) for each in found if each.element is not None]
    if len(elements) < len(found):
        return "the length of its list" if column.is_ragged else "it"
    if len(elements) == 1:
        return f"its element {elements[0]} (counted from 0)"
    more = ", ..." if len(elements) > _SHOWN else ""
    return f"each of its elements {', '.join(elements[:_SHOWN])}{more} (counted from 0)"


def _distinct(split: engine.Split, features: Sequence[_Feature]) -> list[int]:
    """Return each feature's number of different values, missing included; for elements, within a few percent."""
    expressions = {
        f"n{index}": each.value.approx_nunique()
        for index, each in enumerate(features)
        if each.distinct is None
    }
    row = split.table.aggregate(**expressions).to_pyarrow().to_pylist()[0] if expressions else {}
    return [
        int(row[f"n{index}"]) + 1 if each.distinct is None else each.distinct
        for index, each in enumerate(features)
    ]


def _linear(split: engine.Split, label: ir.Column, numbers: Sequence[_Feature]) -> list[_Feature]:
    if not numbers:
        return []
    wanted = label.cast("float64")
    expressions = {}
    for index, each in enumerate(numbers):
        value = each.value.cast("float64")
        both = engine.is_present(value, "float64") & (value.abs() < LARGEST)
        both &= wanted.abs() < LARGEST
        expressions[f"r{index}"] = value.corr(wanted, where=both, how="pop")
        expressions[f"n{index}"] = both.sum()
    row = split.table.aggregate(**expressions).to_pyarrow().to_pylist()[0]
    return [
        each
        for index, each in enumerate(numbers)
        if (row[f"n{index}"] or 0) >= MIN_ROWS and abs(row[f"r{index}"] or 0) >= SAME
    ]


def _separating(
    split: engine.Split, label: ir.Column, features: Sequence[_Feature]
) -> Iterator[_Feature]:
    """Return features whose ranges are disjoint between classes; one class may have no value at all."""
    expressions = {}
    for index, each in enumerate(features):
        present = engine.is_present(each.value, each.dtype)
        # No filters for missing numbers, which would cost ten times the rest: a shard holds null for them,
        # and an element that a shorter list does not have is null, too.
        expressions[f"missing{index}"] = (~present).fill_null(True).cast("int64").sum()
        if each.dtype in _NUMBERS:
            expressions |= {f"low{index}": each.value.min(), f"high{index}": each.value.max()}
    counted = split.table.group_by(wanted=label)
    rows = counted.aggregate(rows=split.table.count(), **expressions).to_pyarrow().to_pylist()
    for index, each in enumerate(features):
        missing = [row[f"missing{index}"] or 0 for row in rows]
        present = [row for row, count in zip(rows, missing, strict=True) if not count]
        without = sum(count == row["rows"] for row, count in zip(rows, missing, strict=True))
        if without < 2 and without + len(present) == len(rows):
            is_number = each.dtype in _NUMBERS
            limits = [(row[f"low{index}"], row[f"high{index}"]) for row in present if is_number]
            if len(present) == 1 or _disjoint(limits):
                yield each


def _disjoint(limits: Sequence[tuple[float, float]]) -> bool:
    ordered = sorted(limits)
    return len(ordered) > 1 and all(
        high < low for (_, high), (low, _) in itertools.pairwise(ordered)
    )


def _has_one_label_per_value(split: engine.Split, label: ir.Column, feature: _Feature) -> bool:
    """Return whether all rows with the same value have the same label."""
    table = split.table.select(value=feature.value, wanted=label)
    by_value = table.group_by("value").aggregate(low=table.wanted.min(), high=table.wanted.max())
    mixed = by_value.filter(by_value.low != by_value.high).count()
    return int(mixed.to_pyarrow().as_py()) == 0
