"""A dataset of one split whose shards and row groups are cut as a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.core.files import sha256_file
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, Shard

CutTable = Callable[[pa.Table, Sequence[Column], Sequence[Sequence[int]]], Dataset]


@pytest.fixture
def cut_table(tmp_path_factory: pytest.TempPathFactory) -> CutTable:
    """Write a table as the split `train`; the cuts are rows of each row group, by shard."""

    def write(table: pa.Table, columns: Sequence[Column], cuts: Sequence[Sequence[int]]) -> Dataset:
        root = tmp_path_factory.mktemp("cut")
        shards, start = [], 0
        for number, cut in enumerate(cuts):
            path = root / f"shard-{number:05d}.parquet"
            with pq.ParquetWriter(path, table.schema, write_page_checksum=True) as writer:
                for rows in cut:
                    writer.write_table(table.slice(start, rows))
                    start += rows
            shards.append(_shard(path, sum(cut)))
        assert start == table.num_rows
        return Dataset(
            root=root, columns=tuple(columns), splits={"train": tuple(shards)}, column_hashes={}
        )

    return write


def _shard(path: Path, rows: int) -> Shard:
    size = path.stat().st_size
    return Shard(file=path.name, rows=rows, size_bytes=size, sha256=sha256_file(path))
