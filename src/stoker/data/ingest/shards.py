"""Write the records of a split to Parquet shards with page checksums, and hash each column.

Several shards are written in threads while the source is still read. The number and the rows of a shard are
fixed before it is written, so the order of the threads does not change any byte.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stoker.core.files import sha256_file
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, Shard
from stoker.data.ingest.image_index import write_image_index
from stoker.data.sources.records import WORKERS, shard_schema
from stoker.data.sources.workers import InThreads, Workers


class ColumnHash:
    """The SHA-256 of a column's type and values; it does not depend on how the values are cut into chunks."""

    def __init__(self, column: Column) -> None:
        """Start without values."""
        length = "" if column.length is None else f" {column.length}"
        self._values = hashlib.sha256(f"{column.dtype} {column.whole}{length}".encode())
        self._lengths = hashlib.sha256()
        self._lists = hashlib.sha256()
        self._is_ragged = column.is_ragged

    def add(self, values: pa.ChunkedArray) -> None:
        """Add values, in the type in which a shard stores them."""
        for chunk in values.chunks:
            if pa.types.is_list(chunk.type):
                lengths = pc.list_value_length(chunk).to_numpy(zero_copy_only=False)
                self._lists.update(lengths.astype("<i8").tobytes())
            is_single = not pa.types.is_nested(chunk.type)
            self._add(chunk if is_single else chunk.flatten())

    def hexdigest(self) -> str:
        """Return the hash of all values that were added."""
        lists = self._lists.digest() if self._is_ragged else b""
        return hashlib.sha256(self._values.digest() + self._lengths.digest() + lists).hexdigest()

    def _add(self, values: pa.Array) -> None:
        if pa.types.is_string(values.type) or pa.types.is_binary(values.type):
            # Without the lengths, "ab", "c" and "a", "bc" would have the same hash.
            lengths = pc.binary_length(values).to_numpy(zero_copy_only=False)
            self._lengths.update(lengths.astype("<i8").tobytes())
            self._values.update(_content(values))
            return
        if pa.types.is_floating(values.type):
            values = pc.fill_null(values, pa.scalar(np.nan, values.type))
        numbers = values.to_numpy(zero_copy_only=False)
        self._values.update(numbers.astype(numbers.dtype.newbyteorder("<"), copy=False).tobytes())


def _content(values: pa.Array) -> memoryview:
    """Return the bytes of all values, concatenated."""
    _, offsets, content = values.buffers()
    if content is None or not len(values):
        return memoryview(b"")
    ends = np.frombuffer(offsets, np.int32)[[values.offset, values.offset + len(values)]]
    return memoryview(content)[ends[0] : ends[1]]


GROUP_ROWS = 32_768
"""Maximum number of records in a row group. Row groups of 65,536 records are not read faster, and would be
shuffled half as well, because a window of the feed consists of whole row groups. Measured by
`benchmarks/tables/groups.py`."""

GROUP_BYTES = 16 << 20
"""Maximum size of a row group, bytes; only a single larger record exceeds it."""

SHARD_BYTES = 64 << 20
"""Size at which a shard ends, bytes. A shard is in memory until it is written. There is a shard for each split,
and another for each thread that writes: with three splits and two threads, 320 MiB."""


@dataclass(frozen=True, kw_only=True)
class ShardOutput:
    """Where and how the shards of all splits are written."""

    root: Path
    """The dataset's folder."""

    columns: Sequence[Column]
    """The columns of the records."""

    shard_rows: int
    """Maximum number of records in a shard."""

    pool: ThreadPoolExecutor
    """Threads that write the shards."""

    finished: Callable[[str, Shard], None]
    """Called with the split's name and the shard when a shard is on the disk, in the order of the split's shards."""

    workers: Workers = field(default_factory=InThreads)
    """Workers that create the indexes of images."""


class SplitWriter:
    """Writes the records of one split to shards, in the order in which they are added."""

    def __init__(self, split: str, output: ShardOutput) -> None:
        """Create the split's folder.

        Args:
            split: The name of the split and of its folder.
            output: The location and format of the shards.
        """
        self.split = split
        self.rows = 0
        self.shards: list[Shard] = []
        self._output = output
        self._hashes = {column.name: ColumnHash(column) for column in output.columns}
        self._waiting: list[pa.Table] = []
        self._waiting_rows = self._waiting_bytes = 0
        self._started = 0
        self._to_skip = 0
        # One thread, because values must be hashed in their order.
        self._hasher = ThreadPoolExecutor(1)
        self._writing: deque[tuple[Future[Shard], Future[None]]] = deque()
        (output.root / split).mkdir(parents=True, exist_ok=True)

    def resume(self, shards: Sequence[Shard], *, rows: int) -> None:
        """Continue from the shards of a killed ingest.

        Args:
            shards: The split's first shards, which are complete.
            rows: Number of records in these shards that the caller does not pass to `add` again. It passes
                the shards' other records again, and `add` skips them.

        Raises:
            DataError: a shard is missing, truncated or damaged.
        """
        kept = Dataset(
            root=self._output.root,
            columns=tuple(self._output.columns),
            splits={self.split: tuple(shards)},
            column_hashes={},
        )
        for batch in kept.batches(self.split):
            self._hash(pa.Table.from_batches([batch]))
        self.shards = list(shards)
        self._started = len(shards)
        self.rows = rows
        self._to_skip = sum(shard.rows for shard in shards) - rows

    def add(self, table: pa.Table) -> None:
        """Add records; they are written when a shard is full."""
        self.rows += table.num_rows
        skipped = min(self._to_skip, table.num_rows)
        self._to_skip -= skipped
        table = table.slice(skipped)
        while table.num_rows:
            room = self._output.shard_rows - self._waiting_rows
            part, table = table.slice(0, room), table.slice(room)
            self._waiting.append(part)
            self._waiting_rows += part.num_rows
            self._waiting_bytes += part.nbytes
            if self._waiting_rows >= self._output.shard_rows or self._waiting_bytes >= SHARD_BYTES:
                self._begin_shard()

    def close(self) -> tuple[Shard, ...]:
        """Write the remaining records, and return all shards."""
        if self._waiting_rows:
            self._begin_shard()
        while self._writing:
            self._take_oldest()
        self._hasher.shutdown()
        return tuple(self.shards)

    def hashes(self) -> dict[str, str]:
        """Return column -> hash of its values; it does not depend on the division into shards."""
        return {name: each.hexdigest() for name, each in self._hashes.items()}

    def abandon(self) -> None:
        """Cancel the shards that are not yet written."""
        for shard, _ in self._writing:
            shard.cancel()
        self._hasher.shutdown(cancel_futures=True)

    def _begin_shard(self) -> None:
        table = pa.concat_tables(self._waiting)
        name = f"{self.split}/shard-{self._started:05d}.parquet"
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        self._started += 1
        shard = self._output.pool.submit(write_shard, self._output, name, table)
        self._writing.append((shard, self._hasher.submit(self._hash, table)))
        if len(self._writing) > WORKERS:
            self._take_oldest()

    def _take_oldest(self) -> None:
        written, hashed = self._writing.popleft()
        shard = written.result()
        hashed.result()
        self.shards.append(shard)
        self._output.finished(self.split, shard)

    def _hash(self, table: pa.Table) -> None:
        for column in self._output.columns:
            self._hashes[column.name].add(table.column(column.name))


def write_shard(output: ShardOutput, file: str, table: pa.Table) -> Shard:
    """Write one shard, and flush it to the disk.

    Args:
        output: The location and format.
        file: The shard's name in the dataset's folder.
        table: The records.

    Raises:
        OSError: the disk is full or not writable.
    """
    shard = write_table(output.root, file, table, columns=output.columns)
    images = [column for column in output.columns if column.dtype == "image"]
    if not images:
        return shard
    index = output.workers.call(partial(write_image_index, columns=images), output.root / file)
    name = index.relative_to(output.root).as_posix()
    return replace(shard, index=name, index_sha256=sha256_file(index))


def write_table(root: Path, file: str, table: pa.Table, *, columns: Sequence[Column]) -> Shard:
    """Write records to a shard without an index of images.

    Raises:
        OSError: as in `write_shard`.
    """
    path = root / file
    _write(path, table, columns)
    size_bytes, sha256 = path.stat().st_size, sha256_file(path)
    return Shard(file=file, rows=table.num_rows, size_bytes=size_bytes, sha256=sha256)


def _write(path: Path, table: pa.Table, columns: Sequence[Column]) -> None:
    group_rows = max(1, min(GROUP_ROWS, table.num_rows * GROUP_BYTES // max(1, table.nbytes)))
    # The file is opened here: on a full disk, the writer would not close a file that it opened itself.
    with path.open("wb") as stream:
        with pq.ParquetWriter(stream, shard_schema(columns), **_options(columns)) as writer:
            writer.write_table(table, row_group_size=group_rows)
        stream.flush()
        os.fsync(stream.fileno())


def _options(columns: Sequence[Column]) -> dict[str, object]:
    # LZ4 needs a little more space than ZSTD, and is much faster to read; a JPEG is already compressed.
    codecs = {_leaf(c): "NONE" if c.dtype == "image" else "LZ4" for c in columns}
    return {
        "write_page_checksum": True,
        "write_page_index": True,
        "compression": codecs,
        # A dictionary would double the size of floats, which rarely repeat.
        "use_dictionary": [_leaf(c) for c in columns if c.dtype in ("int64", "string")],
    }


def _leaf(column: Column) -> str:
    """Return the path of a column's values in a Parquet file. Source: the Parquet format, "Lists"."""
    return column.name if column.length is None else f"{column.name}.list.element"
