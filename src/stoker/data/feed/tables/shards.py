"""Read and check the row groups of a split's shards; an error names the damaged or changed shard."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, Shard, verify_shard

THREADS = pa.cpu_count()
"""Number of threads that decode and permute; both release the GIL."""

JOB_GROUPS = 4
"""Minimum number of row groups per thread, because opening a shard takes some ms."""

STRING_BYTES = 48
"""Memory of a dictionary's string in addition to its text, as an element of a tensor and while it is made."""

TRAILER_BYTES = 8
"""Number of bytes at the end of a Parquet file: the footer's length, and `PAR1`."""

INGEST_AGAIN = "Run `stoker ingest` again; it writes the shard again from the source."


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """The state of a shard when the split was opened."""

    path: Path
    identity: tuple[int, int, int]
    """Inode, size in bytes and time of the last change, ns; they differ if the file was changed."""

    footer: bytes
    """Hash of the footer. No page checksum covers the footer, and a damaged footer may crash the process."""

    group_rows: tuple[int, ...]


class TableShards:
    """The row groups of one split, numbered across its shards."""

    def __init__(self, dataset: Dataset, split: str, *, columns: Sequence[Column]) -> None:
        """Check every shard's hash and read its footer.

        Args:
            dataset: The ingested dataset.
            split: Name of the split.
            columns: The columns to read; no images.

        Raises:
            DataError: a shard is missing or truncated, or differs from its manifest; the error names it.
        """
        images = [column.name for column in columns if column.dtype == "image"]
        if images:
            raise ValueError(f"images are not read as tables: {images}")
        self.columns = tuple(columns)
        self._texts = [c.name for c in columns if c.dtype == "string" and c.length is None]
        shards = dataset.splits[split]
        with ThreadPoolExecutor(THREADS) as pool:
            self._shards = list(pool.map(lambda s: _open(dataset.root, s, self.columns), shards))
        rows = [count for shard in self._shards for count in shard.group_rows]
        self.group_rows = np.array(rows, np.int64)
        self._first_group = np.cumsum([0, *(len(shard.group_rows) for shard in self._shards)])

    def read(
        self,
        groups: NDArray[np.int64],
        take: Callable[[int, pa.Table], None],
        *,
        pool: Executor,
    ) -> None:
        """Decode row groups in threads, and pass on each group while it is in the CPU cache.

        Args:
            groups: [n] numbers of the row groups, ascending.
            take: Called in the threads with an index into `groups` and the columns of that row group.
                Columns of strings are dictionary-encoded; columns of vectors of strings are not.
            pool: The threads.

        Raises:
            DataError: a shard was changed, truncated or damaged since it was opened; the error names it.
        """
        owners = np.searchsorted(self._first_group, groups, side="right") - 1
        jobs = [
            pool.submit(self._read_some, int(owner), groups, some, take)
            for owner in np.unique(owners)
            for some in _cut(np.flatnonzero(owners == owner))
        ]
        for job in jobs:
            job.result()

    def row_bytes(self) -> int:
        """Return the memory of a row, bytes, measured on the split's first row group."""
        found: list[pa.Table] = []
        with ThreadPoolExecutor(1) as pool:
            self.read(np.zeros(1, np.int64), lambda _, table: found.append(table), pool=pool)
        return max(1, _table_bytes(found[0], self.columns) // max(1, found[0].num_rows))

    def _read_some(
        self,
        owner: int,
        groups: NDArray[np.int64],
        positions: NDArray[np.int64],
        take: Callable[[int, pa.Table], None],
    ) -> None:
        shard, first = self._shards[owner], self._first_group[owner]
        _refuse_changed(shard)
        try:
            if _footer_hash(shard.path) != shard.footer:
                raise _not_as_opened(shard.path, "a different footer")
            with pq.ParquetFile(
                shard.path, page_checksum_verification=True, read_dictionary=self._texts
            ) as file:
                for position in positions.tolist():
                    table = self._group(file, shard, int(groups[position] - first))
                    take(position, table)
        except (pa.ArrowException, OSError) as error:
            _refuse_changed(shard)
            raise _damaged(shard.path, error) from error
        _refuse_changed(shard)

    def _group(self, file: pq.ParquetFile, shard: _Opened, number: int) -> pa.Table:
        # Row groups are decoded in parallel by this module's threads, not columns by Arrow's threads.
        names = [column.name for column in self.columns]
        table = file.read_row_group(number, columns=names, use_threads=False)
        wanted = shard.group_rows[number]
        if table.num_rows != wanted:
            raise _not_as_opened(
                shard.path, f"{table.num_rows} records in a row group that had {wanted}"
            )
        _refuse_missing(shard.path, table, self.columns)
        return table


def _cut(positions: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return np.array_split(positions, min(THREADS, -(-len(positions) // JOB_GROUPS)))


def _open(root: Path, shard: Shard, columns: Sequence[Column]) -> _Opened:
    path = root / shard.file
    try:
        identity = _identity(path) if path.exists() else (0, 0, 0)
        verify_shard(root, shard)
        with pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
        opened = _Opened(
            path=path,
            identity=identity,
            footer=_footer_hash(path),
            group_rows=tuple(
                metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)
            ),
        )
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, error) from error
    _refuse_changed(opened)
    _refuse_other_types(path, schema, columns)
    if sum(opened.group_rows) != shard.rows:
        raise DataError(
            f"shard {path} must hold {shard.rows} records, as its manifest says",
            got=Plain(f"{sum(opened.group_rows)} records"),
            fix=INGEST_AGAIN,
        )
    return opened


def _footer_hash(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-TRAILER_BYTES, os.SEEK_END)
        length = int.from_bytes(file.read(4), "little")
        file.seek(max(0, file.tell() - 4 - length))
        return hashlib.sha256(file.read()).digest()


def _table_bytes(table: pa.Table, columns: Sequence[Column]) -> int:
    numbers = [c.name for c in columns if c.dtype != "string"]
    total = table.select(numbers).nbytes
    for column in columns:
        if column.dtype == "string":
            chunks = table.column(column.name).chunks
            strings = [chunk if column.length is None else chunk.flatten() for chunk in chunks]
            different = pc.unique(pa.chunked_array(strings).cast(pa.string()))
            count = sum(len(part) for part in strings)
            total += 4 * count + different.nbytes + STRING_BYTES * len(different)
    return int(total)


def _identity(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _refuse_changed(shard: _Opened) -> None:
    try:
        identity = _identity(shard.path)
    except OSError as error:
        raise _not_as_opened(shard.path, f"{error.strerror}") from error
    if identity != shard.identity:
        sizes = f"{shard.identity[1]} bytes before, {identity[1]} bytes now"
        raise _not_as_opened(shard.path, f"a changed file ({sizes})")


def _refuse_other_types(path: Path, schema: pa.Schema, columns: Sequence[Column]) -> None:
    for column in columns:
        index = schema.get_field_index(column.name)
        found = schema.field(index).type if index >= 0 else None
        if found != column.arrow_type:
            raise DataError(
                f"shard {path} must hold column {column.name!r} as {column.arrow_type}",
                got=Plain("no such column" if found is None else str(found)),
                fix=INGEST_AGAIN,
            )


def _refuse_missing(path: Path, table: pa.Table, columns: Sequence[Column]) -> None:
    for column in columns:
        if column.dtype in ("int64", "string") and table.column(column.name).null_count:
            raise DataError(
                f"shard {path} must hold a value of column {column.name!r} in every record",
                got=Plain(f"{table.column(column.name).null_count} missing values"),
                fix=INGEST_AGAIN,
            )


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(
        f"shard {path} must be an undamaged Parquet file",
        got=Plain((str(error).splitlines() or [type(error).__name__])[0]),
        fix=INGEST_AGAIN,
    )


def _not_as_opened(path: Path, got: str) -> DataError:
    return DataError(
        f"shard {path} must not change while it is read",
        got=Plain(got),
        fix="Do not change the dataset while a run reads it; `stoker ingest` writes it again.",
    )
