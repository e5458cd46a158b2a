"""Full passes over a split: Ibis expressions that DuckDB runs on all cores.

Each floating-point sum is computed by a single thread, so that its order is fixed and its result is the
same in every run; several columns are summed in parallel. Results that do not depend on an order (counts,
distinct values, ranks) are computed by all threads together.
"""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import ibis
import ibis.expr.types as ir
import pyarrow.parquet as pq

from stoker.cluster.limits import usable_cores
from stoker.core.errors import DataError
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, verify_once
from stoker.data.sources.workers import InThreads

Item = TypeVar("Item")
Result = TypeVar("Result")

Progress = Callable[[int, int, str], None]
"""Called with the rows (or columns) done, their total number, and the name of the work."""


def no_progress(done: int, total: int, what: str) -> None:
    """Do nothing: the default for `progress`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A split as a table; its columns are found by their raw names."""

    table: ir.Table
    """The table; its column names are DuckDB's, so use `value` to find a raw column."""

    names: dict[str, str]
    """Raw name -> name in the table (they can differ: for DuckDB, `A` and `a` are the same name)."""

    def value(self, column: str) -> ir.Column:
        """Return the raw column of this name."""
        return self.table[self.names[column]]

    def values(self, column: Column) -> ir.Table:
        """Return a table with the single column `value`: one row per value; vectors and lists are unnested."""
        value = self.value(column.name)
        return self.table.select(value=value if column.length is None else value.unnest())

    def present_values(self, column: Column) -> ir.Table:
        """Return the table of `values` without the missing values."""
        values = self.values(column)
        return values.filter(is_present(values.value, column.dtype))


def is_present(value: ir.Column, dtype: str) -> ir.BooleanValue:
    """Return which rows hold a value: not null, not NaN, not the empty string."""
    if dtype in ("float32", "float64"):
        return value.notnull() & ~value.isnan()
    return value != "" if dtype == "string" else value.notnull()


@contextlib.contextmanager
def connection(*, threads: int = 1) -> Iterator[ibis.backends.duckdb.Backend]:
    """Open a DuckDB database in memory.

    Args:
        threads: Number of threads; with more than one, sums of floats differ from run to run.
    """
    backend = ibis.duckdb.connect(threads=threads)
    try:
        yield backend
    finally:
        backend.disconnect()


def in_parallel(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Run as many queries at a time as there are cores; return results in order.

    Each query must open a connection of its own with one thread.
    """
    return list(InThreads(usable_cores()).map(work, items))


def read_parquet(backend: ibis.backends.duckdb.Backend, paths: Sequence[Path]) -> Split:
    """Open Parquet files that have the same schema as one table, in the given order."""
    names = pq.read_schema(paths[0]).names
    table = backend.read_parquet([glob.escape(str(path)) for path in paths])
    return Split(table=table, names=dict(zip(names, table.columns, strict=True)))


def read_split(backend: ibis.backends.duckdb.Backend, dataset: Dataset, split: str) -> Split:
    """Open a split's shards. Call `verify_split` first: DuckDB would read damaged bytes as values."""
    return read_parquet(backend, dataset.paths(split))


def side_by_side(backend: ibis.backends.duckdb.Backend, *splits: Split) -> list[Split]:
    """Join tables with equally many rows, row by row; return each split with its columns in the joined table."""
    names = [
        {raw: f"c{place}_{index}" for index, raw in enumerate(split.names)}
        for place, split in enumerate(splits)
    ]
    parts = [
        backend.compile(split.table.select(**{new: split.value(raw) for raw, new in each.items()}))
        for split, each in zip(splits, names, strict=True)
    ]
    table = backend.sql(f"FROM ({') POSITIONAL JOIN ('.join(parts)})")
    return [Split(table=table, names=each) for each in names]


def verify_split(dataset: Dataset, split: str) -> None:
    """Check the hash of each of a split's shards.

    Raises:
        DataError: the split is empty; a shard is missing, truncated or changed.
    """
    if not dataset.splits[split] or dataset.rows(split) == 0:
        raise DataError(
            f"split {split!r} must hold at least one record",
            got=0,
            fix="Give the split a larger share under data.splits, and ingest again.",
        )
    verified = InThreads().map(partial(verify_once, dataset.root), dataset.splits[split])
    for _ in verified:
        pass
