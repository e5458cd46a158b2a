"""An ingest that is killed, or finds the disk full, goes on from the shards that were whole."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.core.errors import UserError
from stoker.data.dataset import SAMPLE, Dataset, load_dataset
from stoker.data.ingest import IngestConfig, ingest
from stoker.data.ingest.journal import JOURNAL

ROWS = 400_000

INGEST = """
import sys
from pathlib import Path
from stoker.data.ingest import IngestConfig, ingest
ingest(IngestConfig(source=sys.argv[1], shard_rows=10_000), Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("resume") / "numbers.parquet"
    # 20 copies of each row, in many blocks: what a killed ingest had counted decides their splits.
    numbers = pa.array([n % 20_000 for n in range(ROWS)])
    texts = pa.array([f"text {n % 20_000 % 97}" for n in range(ROWS)])
    pq.write_table(pa.table({"number": numbers, "text": texts}), path, row_group_size=10_000)
    return path


def config(source: Path) -> IngestConfig:
    return IngestConfig(source=str(source), shard_rows=10_000)


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != JOURNAL
    }


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The output of an ingest that is not killed."""
    return ingest(config(source), tmp_path_factory.mktemp("resume") / "undisturbed")


def kill_once(source: Path, out: Path, *, after: int) -> None:
    """Kill an ingest when more than this many shards exist, complete or not."""
    process = subprocess.Popen([sys.executable, "-c", INGEST, str(source), str(out)])
    deadline_s = time.monotonic() + 600
    while process.poll() is None and len(list(out.glob("train/*.parquet"))) <= after:
        assert time.monotonic() < deadline_s, "the ingest neither ends nor gets that far"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()


def test_an_ingest_killed_again_and_again_ends_as_if_nothing_had_happened(
    source: Path, undisturbed: Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "killed"
    for wanted in (1, 5, 16):
        kill_once(source, out, after=wanted)
    kept = {p: p.stat().st_mtime_ns for p in out.glob("*/*.parquet")}

    dataset = ingest(config(source), out)

    assert dataset.fingerprint == undisturbed.fingerprint
    assert files(out) == files(undisturbed.root)
    untouched = [path for path, mtime_ns in kept.items() if path.stat().st_mtime_ns == mtime_ns]
    assert len(untouched) >= 5


def test_a_shard_damaged_since_the_kill_is_not_gone_on_from(
    source: Path, undisturbed: Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    kill_once(source, out, after=8)
    shard = out / "train" / "shard-00000.parquet"
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)

    ingest(config(source), out)

    assert files(out) == files(undisturbed.root)


def test_what_was_done_with_another_source_is_not_gone_on_from(
    source: Path, tmp_path: Path
) -> None:
    out, other = tmp_path / "out", tmp_path / "other.parquet"
    kill_once(source, out, after=8)
    pq.write_table(pq.read_table(source).slice(1000), other)

    dataset = ingest(config(other), out)

    assert dataset.fingerprint == ingest(config(other), tmp_path / "undisturbed").fingerprint
    assert sum(dataset.rows(split) for split in dataset.splits) == ROWS - 1000


def test_a_finished_ingest_has_nothing_to_do(source: Path, undisturbed: Dataset) -> None:
    shard = undisturbed.paths("train")[0]
    written_ns = shard.stat().st_mtime_ns

    again = ingest(config(source), undisturbed.root)

    assert again == undisturbed
    assert shard.stat().st_mtime_ns == written_ns


@pytest.mark.parametrize("damage", ["missing", "cut", "changed"])
def test_a_damaged_sample_is_written_again_from_the_shards(
    damage: str, source: Path, undisturbed: Dataset, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(undisturbed.root, out)
    first = load_dataset(out)
    whole, sample = files(out), out / SAMPLE
    shard = first.paths("train")[0]
    written_ns = shard.stat().st_mtime_ns
    raw = sample.read_bytes()
    sample.unlink()
    if damage == "cut":
        sample.write_bytes(raw[:-10])
    elif damage == "changed":
        sample.write_bytes(bytes([*raw[:100], raw[100] ^ 1, *raw[101:]]))

    again = ingest(config(source), out)

    assert again == first
    assert files(out) == whole
    assert shard.stat().st_mtime_ns == written_ns


def test_a_full_disk_names_need_and_free_and_the_next_ingest_goes_on(
    source: Path, undisturbed: Dataset, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1200k", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no tmpfs here: {mounted.stderr.decode().strip()}")
    try:
        with pytest.raises(UserError, match=r"bytes free, and about [\d,]+ bytes more"):
            ingest(config(source), disk / "out")
        assert not (disk / "out" / "manifest.json").exists()
        kept = {p: p.stat().st_mtime_ns for p in (disk / "out").glob("*/*.parquet")}
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)

        ingest(config(source), disk / "out")

        assert files(disk / "out") == files(undisturbed.root)
        assert any(p.stat().st_mtime_ns == mtime_ns for p, mtime_ns in kept.items())
    finally:
        os.sync()
        subprocess.run(["umount", str(disk)], check=True)
