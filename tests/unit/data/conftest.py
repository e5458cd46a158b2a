"""A dataset of one split, its shards and row groups cut as a test says; and peaks of memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.core.files import sha256_file
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, Shard

PeakOf = Callable[[Callable[[], object]], int]

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


@pytest.fixture
def peak_of() -> PeakOf:
    """Bytes by which this process is at most larger while it does something.

    `ru_maxrss` would not tell: an earlier peak, even a parent's, hides whatever is smaller.
    """

    def measure(work: Callable[[], object]) -> int:
        # Source: proc_pid_clear_refs(5): 5 sets the high-water mark back to what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        before = _resident_bytes("VmRSS")
        work()
        return _resident_bytes("VmHWM") - before

    return measure


def _resident_bytes(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def _shard(path: Path, rows: int) -> Shard:
    size = path.stat().st_size
    return Shard(file=path.name, rows=rows, size_bytes=size, sha256=sha256_file(path))
