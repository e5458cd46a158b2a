"""Full passes over a split: Ibis expressions on DuckDB, one thread, so that sums have one order."""

from __future__ import annotations

import contextlib
import glob
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ibis
import ibis.expr.types as ir
import pyarrow.parquet as pq

from stoker.core.errors import DataError
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, verify_shard

Progress = Callable[[int, int, str], None]
"""Called with rows (or columns) done, how many there are, and what is being done."""


def unseen(done: int, total: int, what: str) -> None:
    """Report progress to nobody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """A split as a table that can be asked; its columns are reached by their raw names."""

    table: ir.Table
    """The columns under DuckDB's names, see `value`."""

    names: dict[str, str]
    """Raw name -> name in the table (DuckDB knows no difference between `A` and `a`)."""

    def value(self, column: str) -> ir.Column:
        """The values of the raw column of that name."""
        return self.table[self.names[column]]

    def values(self, column: Column) -> ir.Table:
        """A table of one column, `value`: a row each; of vectors all that they hold, in order."""
        value = self.value(column.name)
        return self.table.select(value=value if column.length is None else value.unnest())

    def only(self, column: Column) -> ir.Table:
        """The same without the missing values."""
        values = self.values(column)
        return values.filter(is_present(values.value, column.dtype))


def is_present(value: ir.Column, dtype: str) -> ir.BooleanValue:
    """Which rows hold a value: not null, not NaN, not the empty string."""
    if dtype in ("float32", "float64"):
        return value.notnull() & ~value.isnan()
    return value != "" if dtype == "string" else value.notnull()


@contextlib.contextmanager
def connection() -> Iterator[ibis.backends.duckdb.Backend]:
    """A DuckDB in memory with one thread: sums in several threads differ from run to run."""
    backend = ibis.duckdb.connect(threads=1)
    try:
        yield backend
    finally:
        backend.disconnect()


def read_parquet(backend: ibis.backends.duckdb.Backend, paths: Sequence[Path]) -> Split:
    """Parquet files of one schema, in the order given, as one table."""
    names = pq.read_schema(paths[0]).names
    table = backend.read_parquet([glob.escape(str(path)) for path in paths])
    return Split(table=table, names=dict(zip(names, table.columns, strict=True)))


def read_split(backend: ibis.backends.duckdb.Backend, dataset: Dataset, split: str) -> Split:
    """A split's shards, their hashes checked first: DuckDB would read damage as values.

    Raises:
        DataError: the split is empty; a shard is missing, cut or changed.
    """
    if not dataset.splits[split] or dataset.rows(split) == 0:
        raise DataError(
            f"split {split!r} must hold at least one record",
            got=0,
            fix="Give it more of the data under data.splits, and ingest again.",
        )
    for shard in dataset.splits[split]:
        verify_shard(dataset.root, shard)
    return read_parquet(backend, dataset.paths(split))
