"""Ingest by worker processes: the same bytes for any number; nothing lost, no process left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.core.errors import DataError, UserError
from stoker.data.ingest import IngestConfig, describe_source, ingest
from stoker.data.ingest.journal import JOURNAL
from stoker.data.sources.images import folder as image_folder

IMAGES = 600
BAD = (7, 250, 251, 599)
ROWS = 40_000

INGEST = """
import sys
from pathlib import Path
from stoker.data.ingest import IngestConfig, ingest
from stoker.data.sources.images import folder
folder.BLOCK_FILES = 25
ingest(IngestConfig(source=sys.argv[1], shard_rows=20, max_bad_rows=9, workers=2), Path(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes of small JPEGs, four of them damaged."""
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        path = root / f"class{number % 2}" / f"{number:04d}.jpg"
        path.parent.mkdir(exist_ok=True)
        data = cv2.imencode(".jpg", rng.integers(0, 256, (24, 32, 3), np.uint8))[1].tobytes()
        path.write_bytes(data[:200] if number in BAD else data)
    return root


def write_jsonl(path: Path) -> Path:
    rows = [json.dumps({"a": n % 50, "b": n % 50 / 7, "c": f"text {n % 97}"}) for n in range(ROWS)]
    rows[123], rows[20_000], rows[-1] = '{"a": 1', '{"a": "x", "b": 1, "c": "d"}', "[1]"
    path.write_text("\n".join(rows) + "\n")
    return path


def write_csv(path: Path) -> Path:
    rows = [f"{n % 50},{n % 50 / 7:.3f},text {n % 97}" for n in range(ROWS)]
    rows[123], rows[20_000], rows[-1] = "1,2", "one,2,3", "1,2,3,4"
    path.write_text("a,b,c\n" + "\n".join(rows) + "\n")
    return path


def write_parquet(path: Path) -> Path:
    numbers = pa.array([1e300 if n == 20_000 else n % 50 / 7 for n in range(ROWS)])
    texts = pa.array([f"text {n % 97}" for n in range(ROWS)])
    pq.write_table(pa.table({"a": numbers, "c": texts}), path, row_group_size=3000)
    return path


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != JOURNAL
    }


def workers_of(pid: int) -> set[int]:
    """The worker processes that a process has started."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid and b"worker_process" in command:
            found.add(int(folder.name))
    return found


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def begun(source: Path, out: Path, *, shards: int) -> subprocess.Popen[bytes]:
    """An ingest that has written so many shards and has two workers."""
    process = subprocess.Popen([sys.executable, "-c", INGEST, str(source), str(out)])
    deadline_s = time.monotonic() + 120
    while len(list(out.glob("*/*.parquet"))) < shards or len(workers_of(process.pid)) < 2:
        assert process.poll() is None, "the ingest was done before it could be ended"
        assert time.monotonic() < deadline_s, "the ingest does not get that far"
        time.sleep(0.001)
    return process


def gone(pids: set[int]) -> bool:
    """Whether all have ended, within some seconds."""
    deadline_s = time.monotonic() + 20
    while any(map(is_running, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return not any(map(is_running, pids))


def config(source: Path, workers: int | None) -> IngestConfig:
    return IngestConfig(
        source=str(source), shard_rows=4000, max_bad_rows=9, missing_values=(), workers=workers
    )


def test_images_give_the_same_bytes_with_1_2_and_5_workers(images: Path, tmp_path: Path) -> None:
    made = {n: ingest(config(images, n), tmp_path / str(n)) for n in (1, 2, 5)}

    assert files(tmp_path / "1") == files(tmp_path / "2") == files(tmp_path / "5")
    expected = sorted(f"class{number % 2}/{number:04d}.jpg" for number in BAD)
    assert [bad.file for bad in made[5].bad_rows] == expected
    assert {bad.row for bad in made[5].bad_rows} == {1}
    assert workers_of(os.getpid()) == set()


@pytest.mark.parametrize("write", [write_jsonl, write_csv, write_parquet])
def test_tables_give_the_same_bytes_with_1_2_and_5_workers(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    source = write(tmp_path / f"rows.{write.__name__.removeprefix('write_')}")

    made = {n: ingest(config(source, n), tmp_path / str(n)) for n in (1, 2, 5)}

    assert files(tmp_path / "1") == files(tmp_path / "2") == files(tmp_path / "5")
    found = [(bad.row, bad.column, bad.reason) for bad in made[1].bad_rows]
    assert found == [(bad.row, bad.column, bad.reason) for bad in made[5].bad_rows]
    assert [row for row, _, _ in found][:2] == ([20_001] if len(found) == 1 else [124, 20_001])


def test_the_error_of_too_many_bad_images_is_the_same(images: Path, tmp_path: Path) -> None:
    lines = set()
    for workers in (1, 2):
        with pytest.raises(DataError, match="4 bad records") as caught:
            ingest(IngestConfig(source=str(images), workers=workers), tmp_path / str(workers))
        lines.add(caught.value.line())

    assert len(lines) == 1


def test_a_description_is_the_same_by_processes(images: Path) -> None:
    assert describe_source(config(images, 2)) == describe_source(config(images, 1))


@pytest.mark.parametrize("blocks", [1, 6])
def test_a_killed_worker_is_one_error_and_the_next_ingest_goes_on(
    images: Path, tmp_path: Path, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_folder, "BLOCK_FILES", 25)
    settings = IngestConfig(source=str(images), shard_rows=20, max_bad_rows=9, workers=2)
    dealt: list[int] = []

    def kill_one(done: int, total: int | None) -> None:
        if total is not None:
            dealt.append(done)
            if len(dealt) == blocks:
                os.kill(min(workers_of(os.getpid())), signal.SIGKILL)

    with pytest.raises(
        UserError, match=r"worker process ended .* killed by SIGKILL.* continues after"
    ):
        ingest(settings, tmp_path / "out", progress=kill_one)

    assert workers_of(os.getpid()) == set()
    assert not (tmp_path / "out" / "manifest.json").exists()
    kept = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").glob("*/*.parquet")}
    ingest(settings, tmp_path / "out")
    ingest(settings, tmp_path / "undisturbed")
    assert files(tmp_path / "out") == files(tmp_path / "undisturbed")
    if blocks > 1:
        assert any(path.stat().st_mtime_ns == mtime_ns for path, mtime_ns in kept.items())


def test_a_killed_ingest_leaves_no_worker_and_goes_on(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    for shards in (2, 9):
        process = begun(images, out, shards=shards)
        workers = workers_of(process.pid)
        process.kill()
        process.wait()
        assert gone(workers)

    settings = IngestConfig(source=str(images), shard_rows=20, max_bad_rows=9, workers=1)
    monkeypatch.setattr(image_folder, "BLOCK_FILES", 25)
    ingest(settings, out)
    ingest(settings, tmp_path / "undisturbed")
    assert files(out) == files(tmp_path / "undisturbed")


def test_ctrl_c_ends_the_workers(images: Path, tmp_path: Path) -> None:
    process = begun(images, tmp_path / "out", shards=2)
    workers = workers_of(process.pid)

    process.send_signal(signal.SIGINT)

    assert process.wait(30) != 0
    assert gone(workers)
