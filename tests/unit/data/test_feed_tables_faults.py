from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.core.errors import DataError
from stoker.core.files import sha256_file
from stoker.data.columns import Column
from stoker.data.dataset import Dataset
from stoker.data.feed.tables.rows import table_batches
from stoker.data.feed.tables.windows import TableStream

CutTable = Callable[[pa.Table, Sequence[Column], Sequence[Sequence[int]]], Dataset]

COLUMNS = (
    Column(name="number", dtype="float32"),
    Column(name="count", dtype="int64"),
    Column(name="word", dtype="string"),
)
ROWS = 4000


@pytest.fixture
def dataset(cut_table: CutTable) -> Dataset:
    """Two shards of 20 row groups each."""
    rng = np.random.default_rng(0)
    table = pa.table(
        {
            "number": rng.normal(size=ROWS).astype(np.float32),
            "count": rng.integers(0, 10**9, ROWS),
            "word": [f"word {n}" for n in rng.integers(0, 500, ROWS)],
        }
    )
    return cut_table(table, COLUMNS, [[100] * 20, [100] * 20])


@pytest.fixture
def shard(dataset: Dataset) -> Path:
    """The second shard."""
    return dataset.paths("train")[1]


def opened(dataset: Dataset) -> TableStream:
    return TableStream(dataset, "train", columns=COLUMNS, window_bytes=1)


def read(stream: TableStream) -> int:
    return sum(block.rows for block in stream.shuffled(batch_size=64, seed=0, epochs=range(1)))


def flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def pages_of(path: Path) -> list[tuple[int, int]]:
    """First byte and length of what every column chunk stores, page headers left out."""
    metadata = pq.ParquetFile(path).metadata
    pages = []
    for group in range(metadata.num_row_groups):
        for index in range(metadata.num_columns):
            chunk = metadata.row_group(group).column(index)
            # The last 100 bytes of a chunk of at least 400 are all of its last page.
            pages.append((chunk.data_page_offset + chunk.total_compressed_size // 2, 100))
    return pages


def test_a_bit_that_flips_in_a_page_is_found_by_its_checksum(dataset: Dataset, shard: Path) -> None:
    # As a disk's decay: nothing tells that the file was changed since it was opened.
    stream, pages, before = opened(dataset), pages_of(shard), shard.stat()
    rng = np.random.default_rng(1)
    found = 0
    for _ in range(100):
        first, length = pages[rng.integers(len(pages))]
        at, bit = first + int(rng.integers(length)), int(rng.integers(8))
        flip(shard, at, bit)
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
        with pytest.raises(DataError, match=str(shard)):
            read(stream)
        found += 1
        flip(shard, at, bit)
        os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert found == 100
    assert read(stream) == ROWS


def test_a_bit_that_flips_anywhere_before_opening_is_found(dataset: Dataset, shard: Path) -> None:
    rng = np.random.default_rng(2)
    for _ in range(100):
        at, bit = int(rng.integers(shard.stat().st_size)), int(rng.integers(8))
        flip(shard, at, bit)
        with pytest.raises(DataError, match=f"{shard} must have the hash"):
            opened(dataset)
        flip(shard, at, bit)
    assert read(opened(dataset)) == ROWS


def test_a_footer_that_changes_without_a_trace_is_never_parsed(
    dataset: Dataset, shard: Path
) -> None:
    stream, before = opened(dataset), shard.stat()
    flip(shard, before.st_size - 200, 3)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))

    with pytest.raises(DataError, match="a different footer"):
        read(stream)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def rewrite(path: Path) -> None:
    """The same length and as valid as before: other rows."""
    table = pq.read_table(path)
    content = path.read_bytes()
    pq.write_table(table.take(list(range(len(table)))[::-1]), path, write_page_checksum=True)
    changed = path.read_bytes()
    path.write_bytes(changed[: len(content)].ljust(len(content), b"\0"))


@pytest.mark.parametrize("change", [cut, rewrite, Path.unlink, Path.touch])
def test_a_shard_that_changes_in_the_middle_of_an_epoch_is_named(
    dataset: Dataset, shard: Path, change: Callable[[Path], None]
) -> None:
    blocks = opened(dataset).shuffled(batch_size=64, seed=0, epochs=range(3))
    next(blocks)

    change(shard)

    with pytest.raises(DataError, match=f"shard {shard} must not change while it is read"):
        list(blocks)


def test_a_shard_that_changes_stops_a_pipeline_with_the_same_words(
    dataset: Dataset, shard: Path
) -> None:
    stream = opened(dataset)

    def train() -> None:
        with table_batches(
            lambda: stream.shuffled(batch_size=64, seed=0, epochs=range(3)), columns=COLUMNS
        ) as batches:
            for step, _ in enumerate(batches.prefetch(2)):
                if step == 0:
                    cut(shard)

    with pytest.raises(DataError, match=f"shard {shard} must not change while it is read"):
        train()


def test_a_shard_that_is_not_there_is_named(dataset: Dataset, shard: Path) -> None:
    shard.unlink()

    with pytest.raises(DataError, match=f"shard {shard} must exist"):
        opened(dataset)


def test_a_shard_with_other_rows_than_its_manifest_says_is_named(
    dataset: Dataset, shard: Path
) -> None:
    first, second = dataset.splits["train"]
    wrong = replace(dataset, splits={"train": (first, replace(second, rows=1999))})

    with pytest.raises(DataError, match=f"shard {shard} must hold 1999 records"):
        opened(wrong)


def test_a_shard_with_another_type_of_column_is_named(dataset: Dataset, shard: Path) -> None:
    table = pq.read_table(shard)
    pq.write_table(table.set_column(1, "count", table["count"].cast("int32")), shard)
    first, second = dataset.splits["train"]
    facts = {"size_bytes": shard.stat().st_size, "sha256": sha256_file(shard)}
    other = replace(dataset, splits={"train": (first, replace(second, **facts))})  # type: ignore[arg-type]  # mypy cannot check **

    with pytest.raises(DataError, match=f"shard {shard} must hold column 'count' as int64"):
        opened(other)


def test_a_run_that_goes_on_reads_no_window_before_its_step(dataset: Dataset) -> None:
    stream = opened(dataset)
    windows = stream._windows(0, 0)
    assert len(windows) == 2
    before = windows[0].groups
    shard = dataset.paths("train")[int(before[0]) // 20]
    pages = pages_of(shard)
    flip(shard, pages[3 * (int(before[0]) % 20)][0], 1)
    now = sha256_file(shard)
    shards = tuple(
        replace(s, sha256=now) if dataset.root / s.file == shard else s
        for s in dataset.splits["train"]
    )
    damaged = opened(replace(dataset, splits={"train": shards}))

    with pytest.raises(DataError, match=str(shard)):
        read(damaged)
    step = windows[0].rows // 50
    rest = damaged.shuffled(batch_size=50, seed=0, epochs=range(1), first_step=step)
    assert sum(block.rows for block in rest) == windows[1].rows


MEMORY = """
import re, sys
from pathlib import Path
import numpy as np, pyarrow as pa, pyarrow.parquet as pq
from stoker.core.files import sha256_file
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, Shard
from stoker.data.feed.tables.windows import TableStream
root, rows, groups = Path(sys.argv[1]), 20_000, 250
columns = [Column(name=f"f{n}", dtype="float32") for n in range(10)]
rng = np.random.default_rng(0)
path = root / "shard.parquet"
schema = pa.schema([(c.name, pa.float32()) for c in columns])
with pq.ParquetWriter(path, schema, write_page_checksum=True, use_dictionary=False,
                      compression="none") as writer:
    for _ in range(groups):
        values = [rng.random(rows, np.float32) for _ in columns]
        writer.write_table(pa.table(values, names=[c.name for c in columns]))
shard = Shard(file=path.name, rows=rows * groups, size_bytes=path.stat().st_size,
              sha256=sha256_file(path))
dataset = Dataset(root=root, columns=tuple(columns), splits={"train": (shard,)}, column_hashes={})
# A peak of the writing above, or of the parent, would hide the one that is looked for.
Path("/proc/self/clear_refs").write_text("5")
resident = lambda what: int(re.search(what + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = resident("VmRSS")
stream = TableStream(dataset, "train", columns=columns, window_bytes=16 << 20)
read = sum(b.rows for b in stream.shuffled(batch_size=4096, seed=0, epochs=range(1)))
after = resident("VmHWM")
print(read, path.stat().st_size >> 20, (after - before) >> 10)
"""


@pytest.mark.soak
def test_memory_is_bounded_by_the_window_and_not_by_the_split(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, check=True
    )
    rows, split_mib, grown_mib = map(int, done.stdout.split())

    assert rows == 5_000_000
    assert split_mib >= 190
    # Three windows of 16 MiB, the order of one, the row groups being decoded, and what the
    # allocators keep of those before (73 to 99 MiB in all); the split does not fit in it.
    assert grown_mib < 128
