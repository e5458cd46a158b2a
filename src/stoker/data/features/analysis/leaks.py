"""Find columns that alone decide the label: copies of it, or values that are known only after it.

The statistics of each column are known already. This takes one query for all columns of numbers, and
one for each column with few distinct values. `analyze` checks labels that are raw columns; `transform`
checks the labels that `preprocessing_fn` makes. Vectors are not checked; of lists of varying length only
the length is.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ibis
import ibis.expr.types as ir
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stoker.cluster.limits import usable_cores
from stoker.core.files import sha256_file
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, Shard
from stoker.data.features import engine
from stoker.data.features.analysis.anomalies import Anomaly
from stoker.data.features.analysis.measure import compute_statistics
from stoker.data.features.analysis.schema import TRAIN
from stoker.data.features.analysis.statistics import ColumnStatistics, Statistics
from stoker.data.features.spec import LabelSpec

LEAST_ROWS = 100
"""With fewer training rows a column may decide the label by chance."""

LEAST_OTHERS = 10
"""With fewer rows outside the most common class, too."""

ROWS_PER_VALUE = 10
"""With fewer rows per distinct value, on average, it means little that each value has a single label."""

SAME = 1 - 1e-6
"""A column with at least this correlation to a numeric label is a linear copy of it. A copy that is
rounded to a hundredth of the standard deviation has less, and is not found."""

LARGEST = 1e100
"""Larger numbers are left out: they may be marks of missing values, and DuckDB fails if their squares
overflow."""

_NUMBERS = ("int64", "float32", "float64")


def find_leaks(
    dataset: Dataset, statistics: Statistics, labels: Collection[str]
) -> Iterator[Anomaly]:
    """Find the columns that alone decide a label in every row of the training split.

    Args:
        dataset: Shards whose hashes were checked, by `compute_statistics`.
        statistics: The dataset's.
        labels: The raw columns that are labels.
    """
    if statistics.rows.get(TRAIN, 0) < LEAST_ROWS:
        return
    by_column = {column.name: column for column in statistics.splits[TRAIN]}
    names = [column.name for column in dataset.columns]
    features = [column for column in dataset.columns if column.name not in labels]
    with engine.connection(threads=usable_cores()) as backend:
        split = _read(backend, dataset)
        for name in labels:
            if name in names and _is_whole(by_column[name]):
                yield from _deciding(split, split.value(name), by_column[name], by_column, features)


def _is_whole(label: ColumnStatistics) -> bool:
    return not label.missing and label.length is None


class MadeLabels:
    """The labels of the training split as `preprocessing_fn` makes them, in a temporary file."""

    def __init__(self, folder: Path, labels: Iterable[LabelSpec]) -> None:
        """Create the file in an empty folder. Labels with several values per row are left out."""
        single = {each.name: each for each in labels if each.shape in ((), (1,))}
        dtypes: dict[str, Any] = {name: each.dtype for name, each in single.items()}
        self._columns = tuple(Column(name=name, dtype=dtype) for name, dtype in dtypes.items())
        self._path = folder / f"{TRAIN}.parquet"
        schema = pa.schema([(column.name, column.arrow_type) for column in self._columns])
        self._file, self._rows = pq.ParquetWriter(self._path, schema), 0

    def __enter__(self) -> Self:
        """Accept labels."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        made_from: Collection[Column],
        served: Iterable[Column],
    ) -> Iterator[Anomaly]:
        """Find the columns that decide a label, as `find_leaks` does. The file must be closed.

        If the labels are made from a single column, a column that decides that one decides the labels,
        too: for example a copy of `price`, if the label is the logarithm of `price`.

        Args:
            dataset: The dataset that the labels were made from.
            statistics: The dataset's.
            made_from: Raw columns that the labels are made from; they are not checked.
            served: Raw columns that the model sees.
        """
        if self._rows < LEAST_ROWS:
            return
        size_bytes, digest = self._path.stat().st_size, sha256_file(self._path)
        shard = Shard(file=self._path.name, rows=self._rows, size_bytes=size_bytes, sha256=digest)
        made = Dataset(
            root=self._path.parent,
            columns=self._columns,
            splits={TRAIN: (shard,)},
            column_hashes={},
        )
        by_column = {column.name: column for column in statistics.splits[TRAIN]}
        abouts = compute_statistics(made).splits[TRAIN]
        features = [column for column in served if column not in made_from]
        with engine.connection(threads=usable_cores()) as backend:
            read = (_read(backend, each) for each in (dataset, made))
            split, labels = engine.side_by_side(backend, *read)
            found: list[Anomaly] = []
            for about in abouts:
                found += _deciding(split, labels.value(about.name), about, by_column, features)
            for source in made_from if len(made_from) == 1 else ():
                about = replace(by_column[source.name], name=abouts[0].name)
                if _is_whole(about) and source.name not in {each.name for each in abouts}:
                    found += _deciding(split, split.value(source.name), about, by_column, features)
        yield from dict.fromkeys(found)


def _read(backend: ibis.backends.duckdb.Backend, dataset: Dataset) -> engine.Split:
    """The training split, with the length of each list of varying length instead of the list."""
    split = engine.read_split(backend, dataset, TRAIN)
    lists = [column.name for column in dataset.columns if column.is_ragged]
    lengths = {split.names[name]: split.value(name).length() for name in lists}
    return replace(split, table=split.table.mutate(**lengths))


def _deciding(
    split: engine.Split,
    label: ir.Column,
    about: ColumnStatistics,
    by_column: Mapping[str, ColumnStatistics],
    columns: Sequence[Column],
) -> Iterator[Anomaly]:
    """The columns that decide a label in the same table.

    Args:
        split: The table.
        label: The label's column in it.
        about: The label's statistics.
        by_column: Name of a column -> its statistics.
        columns: The columns to check; images and vectors are left out.
    """
    single = [replace(c, dtype="int64", length=None) if c.is_ragged else c for c in columns]
    features = [c for c in single if c.dtype != "image" and c.length is None]
    found: set[str] = set()
    if (about.distinct or 0) > 2 and about.dtype in _NUMBERS:
        found.update(_linear(split, label, [c for c in features if c.dtype in _NUMBERS]))
    counts = [top.count for top in about.top]
    are_classes = len(counts) == about.distinct
    if are_classes and sum(counts) - max(counts, default=0) >= LEAST_OTHERS:
        found.update(_apart(split, label, features))
        for column in features:
            few = 1 < _distinct(by_column[column.name]) <= about.count / ROWS_PER_VALUE
            if few and column.name not in found and _pure(split, label, column):
                found.add(column.name)
    for column in features:
        if column.name in found:
            subject = (
                "it" if by_column[column.name].list_lengths is None else "the length of its list"
            )
            yield Anomaly(
                split=TRAIN,
                column=column.name,
                kind="decides_label",
                severity="warning",
                message=f"{subject} alone decides the label {about.name!r} in every row",
            )


def _distinct(column: ColumnStatistics) -> int:
    """The number of different values, the missing one included; of lists the most lengths there can be."""
    lengths = column.list_lengths
    if lengths is None:
        return (column.distinct or 0) + (column.missing > 0)
    return (lengths.max or 0) - (lengths.min or 0) + 1


def _linear(split: engine.Split, label: ir.Column, numbers: Sequence[Column]) -> list[str]:
    if not numbers:
        return []
    wanted = label.cast("float64")
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


def _apart(split: engine.Split, label: ir.Column, features: Sequence[Column]) -> Iterator[str]:
    """Columns in which the classes have separate ranges of numbers, or one class has no value at all."""
    asked = {}
    for index, column in enumerate(features):
        value = split.value(column.name)
        present = engine.is_present(value, column.dtype)
        # Without filters, which cost ten times the rest: a shard holds null for a missing number.
        asked[f"missing{index}"] = (~present).cast("int64").sum()
        if column.dtype in _NUMBERS:
            asked |= {f"low{index}": value.min(), f"high{index}": value.max()}
    counted = split.table.group_by(wanted=label)
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


def _pure(split: engine.Split, label: ir.Column, column: Column) -> bool:
    """Whether rows of equal value have equal labels."""
    table = split.table.select(value=split.value(column.name), wanted=label)
    by_value = table.group_by("value").aggregate(low=table.wanted.min(), high=table.wanted.max())
    mixed = by_value.filter(by_value.low != by_value.high).count()
    return int(mixed.to_pyarrow().as_py()) == 0
