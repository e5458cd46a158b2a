"""The fault list of tables and files: each is named, none is silent, and no file remains.

TFRecord has a list of its own (`test_data_tfrecord_faults.py`), images too
(`test_data_image_faults.py`), and stores that fail (`test_data_remote.py`).
"""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from stoker.core.errors import DataError
from stoker.data.dataset import Dataset, load_dataset
from stoker.data.ingest import IngestConfig, ingest, source_fingerprint

ROWS = 1000

SEEDS = range(100)


def numbers(path: Path, rows: int = ROWS, **columns: pa.Array) -> Path:
    """A Parquet file with checksums."""
    table = pa.table({"n": range(rows), "s": [f"text {i}" for i in range(rows)], **columns})
    pq.write_table(table, path, write_page_checksum=True)
    return path


def folder_of(path: Path, files: int = 3) -> Path:
    """A folder of CSV files."""
    path.mkdir()
    for number in range(files):
        lines = [f"{number * 100 + i},text {number} {i}" for i in range(100)]
        (path / f"part-{number}.csv").write_text("\n".join(["n,s", *lines]) + "\n")
    return path


def refusal(source: Path, out: Path, *, max_bad_rows: int = 0) -> str:
    """The error of ingest for a source that it refuses without leaving a file."""
    with pytest.raises(DataError) as caught:
        ingest(IngestConfig(source=str(source), max_bad_rows=max_bad_rows), out)
    assert not [path for path in out.rglob("*") if path.is_file()]
    return str(caught.value)


def rows_of(dataset: Dataset) -> int:
    return sum(dataset.rows(split) for split in dataset.splits)


@pytest.mark.parametrize("keep", [0, 3, 100, -1, -4, -8])
def test_a_parquet_file_whose_footer_is_cut_is_named(tmp_path: Path, keep: int) -> None:
    source = numbers(tmp_path / "cut.parquet")
    source.write_bytes(source.read_bytes()[:keep])

    assert "cut.parquet" in refusal(source, tmp_path / "out")


def test_a_parquet_footer_that_claims_gigabytes_is_refused_in_bounded_memory(
    tmp_path: Path,
) -> None:
    source = numbers(tmp_path / "long.parquet")
    raw = bytearray(source.read_bytes())
    raw[-8:-4] = (2**31 - 1).to_bytes(4, "little")
    source.write_bytes(raw)

    assert "long.parquet" in refusal(source, tmp_path / "out")


def test_a_page_flipped_in_a_source_with_checksums_is_found_100_of_100(tmp_path: Path) -> None:
    source = numbers(tmp_path / "flipped.parquet")
    whole = source.read_bytes()
    metadata = pq.read_metadata(source).row_group(0)
    pages = [metadata.column(i) for i in range(metadata.num_columns)]
    first = min(p.dictionary_page_offset or p.data_page_offset for p in pages)
    last = max(
        (p.dictionary_page_offset or p.data_page_offset) + p.total_compressed_size for p in pages
    )

    for seed in SEEDS:
        at = random.Random(seed).randrange(first, last)
        source.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << seed % 8)]) + whole[at + 1 :])
        assert "flipped.parquet" in refusal(source, tmp_path / "out")


def test_a_page_flipped_in_a_shard_is_found_100_of_100(tmp_path: Path) -> None:
    dataset = ingest(IngestConfig(source=str(numbers(tmp_path / "a.parquet"))), tmp_path / "out")
    shard = dataset.paths("train")[0]
    whole = shard.read_bytes()

    for seed in SEEDS:
        at = random.Random(seed).randrange(len(whole))
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << seed % 8)]) + whole[at + 1 :])
        with pytest.raises(DataError, match=r"shard-00000\.parquet"):
            load_dataset(tmp_path / "out").table("train")


def link_out(folder: Path) -> None:
    outside = folder.parent / "outside.csv"
    outside.write_text("n,s\n1,secret\n")
    (folder / "part-9.csv").symlink_to(outside)


def link_up(folder: Path) -> None:
    (folder / "part-9.csv").symlink_to("/")


def link_loop(folder: Path) -> None:
    (folder / "part-9.csv").symlink_to(folder / "part-9.csv")


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "part-9.csv")


def directory(folder: Path) -> None:
    (folder / "part-9.csv").mkdir()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("fault", [link_out, link_up, link_loop, fifo, directory])
def test_a_path_that_is_not_a_file_of_the_folder_is_refused_at_once(
    tmp_path: Path, fault: Callable[[Path], None]
) -> None:
    source = folder_of(tmp_path / "data")
    fault(source)

    said = refusal(source, tmp_path / "out")

    assert "part-9.csv" in said
    assert "secret" not in said


def test_a_file_cut_while_it_is_read_is_an_error_and_no_mixture(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "data")

    def cut(done: int, total: int | None) -> None:
        if total is not None:
            os.truncate(source / "part-2.csv", 300)

    with pytest.raises(DataError, match=r"part-2\.csv must not change while it is read"):
        ingest(IngestConfig(source=str(source)), tmp_path / "out", progress=cut)
    assert not list((tmp_path / "out").rglob("*.parquet"))


def test_a_source_written_while_it_is_hashed_has_no_fingerprint(tmp_path: Path) -> None:
    source = tmp_path / "growing.csv"
    source.write_bytes(b"n\n" + b"1\n" * (32 << 20))
    ended = threading.Event()

    def grow() -> None:
        with source.open("ab", buffering=0) as stream:
            while not ended.wait(0.001):
                stream.write(b"2\n")

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        with pytest.raises(DataError, match=r"growing\.csv must not change while it is read"):
            source_fingerprint(IngestConfig(source=str(source)))
    finally:
        ended.set()
        writer.join()


def test_a_shard_written_over_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    source = numbers(tmp_path / "a.parquet", 50_000)
    dataset = ingest(IngestConfig(source=str(source), shard_rows=10_000), tmp_path / "out")
    batches = dataset.batches("train", rows=1000)
    next(batches)
    dataset.paths("train")[2].write_bytes(dataset.paths("train")[1].read_bytes())

    with pytest.raises(DataError, match=r"shard-00002\.parquet must"):
        list(batches)


def test_the_same_file_twice_is_warned_of_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = folder_of(tmp_path / "data")
    (source / "part-9.csv").write_bytes((source / "part-1.csv").read_bytes())

    with caplog.at_level(logging.WARNING):
        dataset = ingest(IngestConfig(source=str(source)), tmp_path / "out")

    assert "part-9.csv is a copy of part-1.csv" in caplog.text
    assert rows_of(dataset) == 400


def test_copies_that_stay_together_are_never_in_train_and_in_eval(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "data")
    (source / "part-9.csv").write_bytes((source / "part-1.csv").read_bytes())

    dataset = ingest(IngestConfig(source=str(source), duplicates="together"), tmp_path / "out")

    train, held_out = (set(dataset.table(s)["s"].to_pylist()) for s in ("train", "eval"))
    assert len(train) + len(held_out) == 300
    assert not train & held_out


@pytest.mark.parametrize(
    ("header", "named"),
    [("n", "no 's'"), ("n,s,t", "additional 't'"), ("n,u", "no 's' and additional 'u'")],
    ids=["missing", "extra", "renamed"],
)
def test_columns_that_differ_between_files_are_listed(
    tmp_path: Path, header: str, named: str
) -> None:
    source = folder_of(tmp_path / "data")
    fields = header.count(",") + 1
    (source / "part-2.csv").write_text("\n".join([header, ",".join(["1"] * fields)]) + "\n")

    said = refusal(source, tmp_path / "out")

    assert "part-2.csv" in said
    assert named in said


def test_reordered_columns_are_the_same_data(tmp_path: Path) -> None:
    source, other = folder_of(tmp_path / "data"), folder_of(tmp_path / "other")
    lines = [line.split(",") for line in (other / "part-1.csv").read_text().splitlines()]
    (other / "part-1.csv").write_text("".join(f"{s},{n}\n" for n, s in lines))

    first = ingest(IngestConfig(source=str(source)), tmp_path / "first")
    second = ingest(IngestConfig(source=str(other)), tmp_path / "second")

    assert first.fingerprint == second.fingerprint


def test_invalid_utf8_is_named_with_file_row_and_column_and_its_neighbors_are_kept(
    tmp_path: Path,
) -> None:
    source = folder_of(tmp_path / "data")
    lines = (source / "part-1.csv").read_bytes().splitlines()
    lines[42] = b"141,\xff\xfe"
    (source / "part-1.csv").write_bytes(b"\n".join(lines) + b"\n")

    said = refusal(source, tmp_path / "out")
    dataset = ingest(IngestConfig(source=str(source), max_bad_rows=1), tmp_path / "permitted")

    assert "part-1.csv row 42, column 's'" in said
    (bad,) = dataset.bad_rows
    assert (bad.file, bad.row, bad.column) == ("part-1.csv", 42, "s")
    kept = {n for split in dataset.splits for n in dataset.table(split)["n"].to_pylist()}
    assert kept == set(range(300)) - {141}


def test_an_empty_file_among_the_files_is_named(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "data")
    (source / "part-1.csv").write_bytes(b"")

    assert "part-1.csv" in refusal(source, tmp_path / "out")


def test_files_made_in_another_order_under_another_locale_are_the_same_dataset(
    tmp_path: Path,
) -> None:
    names = ["Iz", "iz", "\u0131z", "\u0130z", "a", "B"]
    prints = []
    for locale, order in (("C.UTF-8", names), ("tr_TR.UTF-8", names[::-1])):
        source = tmp_path / locale
        source.mkdir()
        for name in order:
            (source / f"{name}.csv").write_text(f"n,s\n1,{name}\n2,more {name}\n3,x{name}\n")
        code = (
            "import sys; from pathlib import Path; from stoker.data.ingest import *;"
            "print(ingest(IngestConfig(source=sys.argv[1]), Path(sys.argv[2])).fingerprint)"
        )
        ran = subprocess.run(
            [sys.executable, "-c", code, str(source), str(tmp_path / f"out-{locale}")],
            env=os.environ | {"LC_ALL": locale},
            capture_output=True,
            check=True,
        )
        prints.append(ran.stdout)

    assert prints[0] == prints[1]


MEASURED = """
import re, sys
from pathlib import Path
from stoker.data.ingest import IngestConfig, ingest
ingest(IngestConfig(source=sys.argv[1]), Path(sys.argv[2]))
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


def test_a_million_small_rows_stay_within_a_gibibyte(tmp_path: Path) -> None:
    source = tmp_path / "many.csv"
    i = np.arange(1_000_000)
    texts = pa.array([f"text {n}" for n in range(1013)]).take(pa.array(i % 1013))
    pyarrow.csv.write_csv(
        pa.table({"a": i, "b": i % 97, "c": (i / 7).round(4), "d": texts}), source
    )

    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, str(source), str(tmp_path / "out")],
        capture_output=True,
        check=True,
    )

    assert int(ran.stdout) < 1 << 20
    assert rows_of(load_dataset(tmp_path / "out")) == 1_000_000


def test_no_thread_is_left_by_an_ingest_that_failed(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "data")
    (source / "part-1.csv").write_text("n,s\n1\n")
    before = threading.active_count()

    refusal(source, tmp_path / "out")

    assert threading.active_count() == before
