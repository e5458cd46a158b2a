"""s3:// and gs:// sources against real emulators: the same data, bounded, and every fault named."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.small_disk import mounted

from stoker.core.errors import ConfigError, DataError, UserError
from stoker.data.ingest import IngestConfig, ingest, source_fingerprint
from stoker.data.sources.source import list_source, open_source
from stoker.data.sources.stores import store as store_module
from stoker.data.sources.stores.cache import shared_cache

if TYPE_CHECKING:
    from tests.integration.data.conftest import StoreServer

STOKER = str(Path(sys.executable).parent / "stoker")


@pytest.fixture(autouse=True)
def _cold_cache() -> Iterator[None]:
    """No test knows what another's process-wide cache has checked."""
    shared_cache.cache_clear()
    yield
    shared_cache.cache_clear()


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> str:
    """A bucket of the test's own."""
    return "b" + "".join(c for c in request.node.name.lower() if c.isalnum())[:50]


def config(source: str, tmp_path: Path, **options: Any) -> IngestConfig:
    options.setdefault("cache_dir", tmp_path / "cache")
    options.setdefault("store_backoff_s", 0.01)
    return IngestConfig(source=source, **options)


def csv_folder(folder: Path, files: int = 3, rows: int = 200) -> Path:
    folder.mkdir()
    for number in range(files):
        lines = [f"{row},{number},text {row % 7}\n" for row in range(rows)]
        (folder / f"part-{number}.csv").write_text("x,y,z\n" + "".join(lines))
    return folder


def parquet_folder(folder: Path) -> Path:
    folder.mkdir()
    for number in range(2):
        table = pa.table({"x": list(range(300)), "y": [number + 0.5] * 300})
        pq.write_table(table, folder / f"part-{number}.parquet")
    return folder


def image_folder(folder: Path, each: int = 20) -> Path:
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / label).mkdir(parents=True)
        for number in range(each):
            pixels = rng.integers(0, 255, (12, 10, 3), dtype=np.uint8)
            cv2.imwrite(str(folder / label / f"{number}.png"), pixels)
    return folder


def jsonl_folder(folder: Path) -> Path:
    folder.mkdir()
    for number in range(2):
        lines = [f'{{"x": {row}, "y": {number}}}\n' for row in range(100)]
        raw = "".join(lines).encode()
        (folder / f"part-{number}.jsonl.gz").write_bytes(gzip.compress(raw, mtime=0))
    return folder


MAKERS = {
    "csv": csv_folder,
    "jsonl": jsonl_folder,
    "parquet": parquet_folder,
    "images": image_folder,
}


def grow_old(tmp_path: Path) -> None:
    """As if what is cached had been fetched long after it was written."""
    later_s = time.time() + 60
    for path in (tmp_path / "cache").glob("objects/*/*"):
        os.utime(path, (later_s, later_s))


@pytest.mark.parametrize("kind", list(MAKERS))
def test_remote_and_local_files_are_the_same_dataset(
    store: StoreServer, kind: str, tmp_path: Path, bucket: str
) -> None:
    local = MAKERS[kind](tmp_path / "local")
    remote = store.put_folder(local, f"{bucket}/a folder/{kind}")

    here, there = config(str(local), tmp_path), config(remote, tmp_path)

    assert source_fingerprint(here) == source_fingerprint(there)
    first, second = ingest(here, tmp_path / "1"), ingest(there, tmp_path / "2")
    assert first.fingerprint == second.fingerprint
    assert [first.rows(name) for name in first.splits] == [
        second.rows(name) for name in second.splits
    ]


def test_globs_and_single_files_are_found_as_locally(
    store: StoreServer, tmp_path: Path, bucket: str
) -> None:
    local = tmp_path / "local"
    for name in (
        "1.csv",
        "a/2.csv",
        "a/b/3.csv",
        "a/b/3.txt",
        "ä ü+%20.csv",
        ".hid.csv",
        "_SUCCESS",
    ):
        (local / name).parent.mkdir(parents=True, exist_ok=True)
        (local / name).write_text("x\n1\n")
    remote = store.put_folder(local, bucket)

    for pattern in ("**/*.csv", "*.csv", "a/**", "a/*/?.csv", "[12].csv", "a/b/3.csv", "1.csv"):
        found = [f.name for f in list_source(config(f"{remote}/{pattern}", tmp_path)).files]
        assert found == [f.name for f in list_source(config(f"{local}/{pattern}", tmp_path)).files]


def test_folders_are_refused_as_locally(store: StoreServer, tmp_path: Path, bucket: str) -> None:
    local = image_folder(tmp_path / "local", each=1)
    remote = store.put_folder(local, bucket)
    assert len(list_source(config(remote, tmp_path)).files) == 2
    with pytest.raises(
        DataError, match=rf"://{bucket}/cat must be a plain file\. Received: a folder"
    ):
        list_source(config(remote, tmp_path, format="csv"))
    store.put(f"{bucket}/stray.png", b"x")
    with pytest.raises(DataError, match=r"only a sub-folder of images for each class.*stray\.png"):
        list_source(config(remote, tmp_path))


@pytest.mark.parametrize("path", ["nothing", "nothing/*.csv", "part-9.csv"])
def test_what_is_not_there_is_named(
    store: StoreServer, tmp_path: Path, bucket: str, path: str
) -> None:
    remote = store.put_folder(csv_folder(tmp_path / "local"), bucket)
    for base in (remote, f"{store.scheme}://no-such-bucket-at-all"):
        with pytest.raises(DataError, match=rf"{base}/.*must (exist|match)"):
            list_source(config(f"{base}/{path}", tmp_path))


def test_a_run_fetches_every_object_once_and_the_next_one_none(
    store: StoreServer, tmp_path: Path, bucket: str
) -> None:
    remote = store.put_folder(csv_folder(tmp_path / "local"), bucket)
    there = config(remote, tmp_path)
    source_fingerprint(there)
    ingest(there, tmp_path / "1")
    assert store.faults.contents() == 3

    grow_old(tmp_path)
    shared_cache.cache_clear()
    source_fingerprint(there)
    ingest(there, tmp_path / "2")
    assert store.faults.contents() == 3


def test_data_larger_than_the_cache_is_read_within_the_bound(
    store: StoreServer, tmp_path: Path, bucket: str
) -> None:
    local = csv_folder(tmp_path / "local", files=8, rows=500)
    remote = store.put_folder(local, bucket)
    size = (local / "part-0.csv").stat().st_size
    there = config(remote, tmp_path, cache_bytes=3 * size)

    def watched(_: str) -> None:
        held = sum(p.stat().st_size for p in (tmp_path / "cache").glob("objects/*/*"))
        assert held <= 3 * size

    store.faults.before = watched
    expected = ingest(config(str(local), tmp_path), tmp_path / "1").fingerprint
    assert ingest(there, tmp_path / "2").fingerprint == expected

    with pytest.raises(
        UserError, match=rf"part-0\.csv must not be larger than.*{size - 1:,}.*{size:,} bytes"
    ):
        ingest(config(remote, tmp_path, cache_bytes=size - 1), tmp_path / "3")


def test_a_damaged_copy_is_fetched_again(s3: StoreServer, tmp_path: Path, bucket: str) -> None:
    remote = s3.put_folder(csv_folder(tmp_path / "local", files=1), bucket)
    there = config(remote, tmp_path)
    before = source_fingerprint(there)
    grow_old(tmp_path)
    (copy,) = (tmp_path / "cache").glob("objects/*/*")
    raw = bytearray(copy.read_bytes())
    raw[len(raw) // 2] ^= 4
    copy.write_bytes(raw)
    grow_old(tmp_path)

    shared_cache.cache_clear()
    assert source_fingerprint(there) == before
    assert s3.faults.contents() == 2


def test_a_store_that_answers_503_gets_the_request_again(
    store: StoreServer, tmp_path: Path, bucket: str
) -> None:
    local = csv_folder(tmp_path / "local")
    remote = store.put_folder(local, bucket)
    store.faults.answer_503 = 3
    assert source_fingerprint(config(remote, tmp_path)) == source_fingerprint(
        config(str(local), tmp_path)
    )
    assert store.faults.answer_503 == 0


def test_connections_that_break_in_the_body_cost_a_piece_and_not_the_file(
    store: StoreServer, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = csv_folder(tmp_path / "local", files=1, rows=3000)
    remote = store.put_folder(local, bucket)
    size = (local / "part-0.csv").stat().st_size
    monkeypatch.setattr(store_module, "PIECE_BYTES", size // 5)
    store.faults.cut_bodies = 3
    assert source_fingerprint(config(remote, tmp_path)) == source_fingerprint(
        config(str(local), tmp_path)
    )
    assert store.faults.cut_bodies == 0
    if store.scheme == "s3":  # five pieces and a rest, three of them twice
        assert store.faults.contents() == 6 + 3


def test_a_slow_store_is_waited_for(s3: StoreServer, tmp_path: Path, bucket: str) -> None:
    local = csv_folder(tmp_path / "local", files=2)
    remote = s3.put_folder(local, bucket)
    s3.faults.pause_s = 1.5
    assert source_fingerprint(config(remote, tmp_path)) == source_fingerprint(
        config(str(local), tmp_path)
    )


def test_a_store_that_goes_on_failing_is_named_after_the_attempts(
    store: StoreServer, tmp_path: Path, bucket: str
) -> None:
    remote = store.put_folder(csv_folder(tmp_path / "local", files=1), bucket)
    store.faults.answer_503 = 10**6
    with pytest.raises(
        UserError, match=r"part-0\.csv must be readable.*after 1 attempts"
    ) as failed:
        source_fingerprint(config(remote, tmp_path, store_attempts=1))
    assert "Run the command again" in str(failed.value)
    assert not list((tmp_path / "cache").glob("parts/*"))


def test_a_store_that_does_not_answer_is_named(
    s3: StoreServer, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"must be readable.*connect"):
        list_source(config(f"s3://{bucket}/a.csv", tmp_path, store_attempts=2))


def test_credentials_that_end_in_mid_ingest_are_named_and_what_was_fetched_is_kept(
    store: StoreServer, tmp_path: Path, bucket: str
) -> None:
    local = csv_folder(tmp_path / "local", files=6)
    remote = store.put_folder(local, bucket)
    list_source(config(remote, tmp_path))
    store.faults.deny_after = 2
    store.faults.seen.clear()

    with pytest.raises(UserError, match=r"must be readable\. Received: access denied \(403\)"):
        ingest(config(remote, tmp_path), tmp_path / "out")
    until_s = time.monotonic() + 300
    while len(kept := list((tmp_path / "cache").glob("objects/*/*"))) < 2:
        assert time.monotonic() < until_s  # requests ahead of need are still under way
        time.sleep(0.05)
    assert not any(b"hunter2" in p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())

    store.faults.deny_after = None
    store.faults.seen.clear()
    expected = ingest(config(str(local), tmp_path), tmp_path / "1").fingerprint
    assert ingest(config(remote, tmp_path), tmp_path / "out").fingerprint == expected
    assert store.faults.contents() == 6 - len(kept)


@pytest.mark.parametrize("content", [b"x,y,z\n1,2,3\n", b"same"])
def test_an_object_that_changes_while_it_is_read_is_an_error(
    store: StoreServer, tmp_path: Path, bucket: str, content: bytes
) -> None:
    local = csv_folder(tmp_path / "local")
    remote = store.put_folder(local, bucket)
    source = open_source(config(remote, tmp_path), labels=())
    scan = source.scan(lambda done, total: None)
    blocks = source.blocks(scan)
    next(blocks)
    time.sleep(1.1)  # S3 tells times to the second
    same = (local / "part-2.csv").read_bytes().swapcase()
    store.put(f"{bucket}/part-2.csv", same if content == b"same" else content)

    def read_on() -> None:
        list(blocks)
        source.listing.check_unchanged()

    with pytest.raises(DataError, match=r"part-2\.csv must not change while it is read"):
        read_on()


def test_an_object_that_changes_between_two_pieces_is_an_error(
    s3: StoreServer, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = csv_folder(tmp_path / "local", files=1, rows=3000)
    raw = (local / "part-0.csv").read_bytes()
    remote = s3.put_folder(local, bucket)
    monkeypatch.setattr(store_module, "PIECE_BYTES", len(raw) // 5)
    written: list[str] = []

    def overwrite(what: str) -> None:
        if s3.faults.contents() == 3 and not written:
            written.append(what)
            s3.put(f"{bucket}/part-0.csv", raw.swapcase())

    listing = list_source(config(remote, tmp_path))
    s3.faults.before = overwrite
    with pytest.raises(DataError, match=r"part-0\.csv must not change while it is read"):
        listing.files[0].sha256()
    assert written
    assert not list((tmp_path / "cache").glob("objects/*/*"))


def test_small_objects_are_fetched_side_by_side(
    s3: StoreServer, tmp_path: Path, bucket: str
) -> None:
    remote = s3.put_folder(image_folder(tmp_path / "local", each=30), bucket)
    requested: list[str] = []
    four_wait = threading.Event()
    in_time: list[bool] = []

    def hold_until_four_wait(what: str) -> None:
        if s3.faults.is_content(*what.split(" ", 1)):
            requested.append(what)
            if len(requested) == 4:
                four_wait.set()
            in_time.append(four_wait.wait(timeout=20))

    s3.faults.before = hold_until_four_wait
    source_fingerprint(config(remote, tmp_path))
    assert len(in_time) >= 60
    assert all(in_time)


@pytest.mark.parametrize("variable", [None, "SLURM_TMPDIR", "TMPDIR"])
def test_a_full_disk_is_named_with_need_and_free_space(
    s3: StoreServer,
    tmp_path: Path,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    variable: str | None,
) -> None:
    """That of `data.cache_dir`, or the local disk of a job's machine."""
    remote = s3.put_folder(csv_folder(tmp_path / "local", files=1, rows=20_000), bucket)
    disk, options = tmp_path / "cache", {}
    if variable is not None:
        options = {"cache_dir": None}
        (tmp_path / "job" / "incarnations").mkdir(parents=True)
        (tmp_path / "job" / "incarnations" / "1").touch()
        monkeypatch.setenv("STOKER_INCARNATION", f"{tmp_path}/job:1")
        monkeypatch.delenv("SLURM_TMPDIR", raising=False)
        monkeypatch.setenv("TMPDIR", str(tmp_path / "not-there"))
        monkeypatch.setenv(variable, str(disk))
    with mounted(disk, size="64k") as why_not:
        if why_not:
            pytest.skip(why_not)
        with pytest.raises(UserError) as caught:
            source_fingerprint(config(remote, tmp_path, **options))
        assert not [p for p in disk.glob("**/objects/**/*") if p.is_file()]
        assert not list(disk.glob("**/*.part"))
    line = caught.value.line()
    assert re.search(r"part-0\.csv.*bytes needed, .* bytes free.*cache_dir", line)
    assert str(disk) in line
    assert "\n" not in line


def command(
    store: StoreServer, tmp_path: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [STOKER, *arguments],
        env=os.environ | store.environment() | {"XDG_CACHE_HOME": str(tmp_path / "xdg")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=3000,
    )


def test_the_commands_read_a_bucket_and_end_cleanly(
    store: StoreServer, tmp_path: Path, bucket: str
) -> None:
    remote = store.put_folder(csv_folder(tmp_path / "local"), bucket)

    made = command(store, tmp_path, "init", "--from", remote, "made", "--label", "y")
    assert (made.returncode, made.stderr) == (0, "")
    assert f"source: '{remote}'" in (tmp_path / "made" / "stoker.yaml").read_text()
    done = command(store, tmp_path, "ingest", "made")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "xdg" / "stoker").glob("objects/*/*"))

    refused = command(store, tmp_path, "ingest", "made", "--set", f"data.source={remote}/none")
    assert refused.returncode == 2
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "must exist" in refused.stderr


FETCHES_FOR_EVER = """
import sys
from pathlib import Path
from stoker.data.ingest import IngestConfig, source_fingerprint
print("begun", flush=True)
config = IngestConfig(source=sys.argv[1], cache_dir=Path(sys.argv[2]))
print(source_fingerprint(config), flush=True)
"""


def test_kill_9_while_fetching_loses_nothing(s3: StoreServer, tmp_path: Path, bucket: str) -> None:
    local = csv_folder(tmp_path / "local")
    remote = s3.put_folder(local, bucket)
    s3.faults.pause_s = 2.0
    process = subprocess.Popen(
        [sys.executable, "-c", FETCHES_FOR_EVER, remote, str(tmp_path / "cache")],
        env=os.environ | s3.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    while not s3.faults.contents():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list((tmp_path / "cache").glob("parts/*"))

    s3.faults.pause_s = 0
    assert source_fingerprint(config(remote, tmp_path)) == source_fingerprint(
        config(str(local), tmp_path)
    )
    assert not list((tmp_path / "cache").glob("parts/*"))


def test_two_processes_fetch_every_object_once(
    s3: StoreServer, tmp_path: Path, bucket: str
) -> None:
    local = csv_folder(tmp_path / "local", files=5)
    remote = s3.put_folder(local, bucket)
    time.sleep(3)  # what is younger is not trusted by another process
    arguments = [sys.executable, "-c", FETCHES_FOR_EVER, remote, str(tmp_path / "cache")]
    both = [
        subprocess.Popen(
            arguments, env=os.environ | s3.environment(), stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    answers = {process.communicate(timeout=300)[0].split()[-1] for process in both}
    assert answers == {source_fingerprint(config(str(local), tmp_path))}
    assert s3.faults.contents() == 5


def test_options_in_the_uri_reach_the_store(
    s3: StoreServer, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = s3.put_folder(csv_folder(tmp_path / "local", files=1), bucket)
    endpoint = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    there = config(f"{remote}?endpoint_override={endpoint}&scheme=http", tmp_path)
    assert [each.location for each in list_source(there).files] == [f"{remote}/part-0.csv"]
    with pytest.raises(ConfigError, match=r"Received: 'secret_key'"):
        config(f"{remote}?secret_key=x", tmp_path)
