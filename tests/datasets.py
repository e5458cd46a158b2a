"""Tables as a dataset, as ingest leaves one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stoker.core.files import sha256_file
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, Shard, write_manifest


def write_dataset(
    root: Path,
    columns: Sequence[Column],
    tables: Mapping[str, Sequence[pa.Table]],
    *,
    row_group_size: int | None = None,
    column_hash: str = "0",
    **more: Any,
) -> Dataset:
    """Write shards and their manifest.

    Args:
        root: The dataset's folder.
        columns: The columns of all tables.
        tables: Split -> the table of each shard.
        row_group_size: Rows of a row group.
        column_hash: Takes the place of each column's hash.
        more: Other fields of the dataset.
    """
    splits = {}
    for split, parts in tables.items():
        (root / split).mkdir(parents=True, exist_ok=True)
        splits[split] = tuple(
            _write_shard(root, f"{split}/shard-{number:05}.parquet", table, row_group_size)
            for number, table in enumerate(parts)
        )
    hashes = {split: {column.name: column_hash for column in columns} for split in splits}
    dataset = Dataset(
        root=root, columns=tuple(columns), splits=splits, column_hashes=hashes, **more
    )
    write_manifest(dataset)
    return dataset


def _write_shard(root: Path, file: str, table: pa.Table, row_group_size: int | None) -> Shard:
    path = root / file
    pq.write_table(table, path, write_page_checksum=True, row_group_size=row_group_size)
    size = path.stat().st_size
    return Shard(file=file, rows=table.num_rows, size_bytes=size, sha256=sha256_file(path))
