"""Workers: results in the order of the parts, buffers in shared memory, errors as they were."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import importlib
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from stoker.cluster.limits import cpu_limit, usable_cores
from stoker.core.errors import ConfigError, DataError, Plain, UserError
from stoker.data.ingest import IngestConfig
from stoker.data.sources import workers
from stoker.data.sources.formats import csv_files, jsonl_files, parquet_files
from stoker.data.sources.records import silent
from stoker.data.sources.source import open_source
from stoker.data.sources.uri import parse_uri
from stoker.data.sources.worker_process import receive, send
from stoker.data.sources.workers import (
    MAX_BYTES,
    MIN_BYTES,
    InProcesses,
    InThreads,
    Workers,
    max_part_bytes,
    started,
)


def doubled(number: int) -> int:
    return 2 * number


def refused(number: int) -> int:
    raise DataError(f"number {number} must be even", got=Plain("an odd one"), fix="Add 1.")


def open_files(_: int) -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="module")
def processes() -> Iterator[Workers]:
    """Given functions of other modules only: another process cannot import this file."""
    with started(2, processes=True) as workers:
        yield workers


@pytest.mark.parametrize(
    "message",
    [
        None,
        {"a": [1, "b"]},
        np.arange(100_000),
        np.zeros(0),
        pa.table({"x": pa.array([b"1", None, b"333"]), "y": [1.5, 2.5, None]}),
        pa.table({"x": pa.array([], pa.binary())}),
        [np.arange(3), np.ones((4, 5)), b"bytes"],
    ],
    ids=["none", "dict", "array", "empty array", "table", "empty table", "several"],
)
def test_a_message_arrives_as_it_was_sent(message: object) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30)
        send(ours, message)
        ours.close()
        found = receive(theirs)

    assert repr(found) == repr(message)


def test_no_file_stays_open_after_the_last_buffer_of_a_message() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        gc.collect()  # closes what other tests have left open
        before = open_files(0)
        for text in ("abc", "", "x" * 1000):
            send(ours, [pa.array(list(text)), np.arange(7)])
            found, numbers = receive(theirs)
            assert found.to_pylist() == list(text)
            assert numbers.tolist() == list(range(7))
        # A mapping keeps its file open as long as the mapping exists.
        del found, numbers
        # Other tests may have left files that were closed since.
        assert open_files(0) <= before


@contextlib.contextmanager
def open_files_limit(soft: int) -> Iterator[None]:
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def test_a_message_for_which_no_descriptor_is_left_is_said_to_be_that() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30)
        send(ours, np.arange(1000))
        with (
            open_files_limit(1),
            pytest.raises(OSError, match=os.strerror(errno.EMFILE)) as caught,
        ):
            receive(theirs)

    assert caught.value.errno == errno.EMFILE


def test_without_descriptors_for_the_results_the_limit_is_named() -> None:
    with contextlib.closing(InProcesses(1)) as workers:
        assert workers.call(abs, -1) == 1
        with open_files_limit(1), pytest.raises(UserError, match=r"more open files.*ulimit -n"):
            workers.call(np.arange, 1000)


def test_workers_raise_the_limit_of_open_files_as_far_as_they_need() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with open_files_limit(200):
        with started(2, processes=True) as workers:
            assert workers.call(abs, -1) == 1
        found, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    assert (found, hard) == (256 + 2 * 6, before)


def test_a_closed_connection_is_the_end_of_the_messages() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs)


def test_results_come_in_the_order_of_the_parts(processes: Workers) -> None:
    assert list(processes.map(abs, range(-50, 50))) == [abs(n) for n in range(-50, 50)]
    assert list(InThreads(3).map(doubled, range(50))) == [2 * n for n in range(50)]


def test_an_error_of_a_worker_is_raised_as_it_was(processes: Workers) -> None:
    with pytest.raises(ConfigError) as here:
        parse_uri("s3:///x")
    with pytest.raises(ConfigError) as there:
        processes.call(parse_uri, "s3:///x")

    assert there.value.line() == here.value.line()
    assert "In a worker process" in there.value.__notes__[0]
    with pytest.raises(ZeroDivisionError):
        processes.call(functools.partial(divmod, 1), 0)
    assert processes.call(abs, -1) == 1


@pytest.mark.parametrize(("size", "one_at_a_time"), [(0, False), (MAX_BYTES // 2 + 1, True)])
def test_large_parts_are_worked_on_one_at_a_time(size: int, one_at_a_time: bool) -> None:
    lock, running, seen = threading.Lock(), 0, 0

    def work(number: int) -> int:
        nonlocal running, seen
        with lock:
            running += 1
            seen = max(seen, running)
        time.sleep(0.02)  # so that runs overlap
        with lock:
            running -= 1
        return number

    found = list(InThreads(4).map(work, range(20), bytes_of=lambda _: size))

    assert found == list(range(20))
    assert (seen == 1) is one_at_a_time


@pytest.mark.parametrize(("gib", "expected"), [(1, MIN_BYTES), (16, 1 << 30), (2000, MAX_BYTES)])
def test_a_machine_with_more_memory_works_on_more_bytes(gib: int, expected: int) -> None:
    assert max_part_bytes(gib << 30) == expected


def write_table(path: Path) -> Path:
    table = pa.table({"a": range(100), "b": [f"text {n}" for n in range(100)]})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    elif path.suffix == ".csv":
        pa.csv.write_csv(table, path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return path


@pytest.mark.parametrize(
    ("suffix", "module", "limit", "drawing"),
    [
        ("parquet", parquet_files, ("BATCH_ROWS", 10), "_batches"),
        ("csv", csv_files, ("BLOCK_BYTES", 200), "_batches"),
        ("jsonl", jsonl_files, ("BLOCK_LINES", 10), "_line_blocks"),
    ],
)
def test_a_table_is_read_no_further_ahead_than_its_bytes_allow(
    suffix: str,
    module: ModuleType,
    limit: tuple[str, int],
    drawing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn, draw = 0, getattr(module, drawing)

    def counted(*arguments: Any) -> Iterator[Any]:
        nonlocal drawn
        for each in draw(*arguments):
            drawn += 1
            yield each

    monkeypatch.setattr(workers, "MIN_BYTES", 1)
    monkeypatch.setattr(workers, "MAX_BYTES", 1)
    monkeypatch.setattr(module, *limit)
    monkeypatch.setattr(module, drawing, counted)
    config = IngestConfig(source=str(write_table(tmp_path / f"data.{suffix}")), workers=4)
    source = open_source(config, labels=[], workers=InThreads(4))
    scan, drawn = source.scan(silent), 0
    blocks = source.blocks(scan)

    first = next(blocks)

    assert drawn == 2
    rows = [first, *blocks]
    assert len(rows) > 5
    assert sum(block.table.num_rows for block in rows) == 100


ODD = """
class OddError(Exception):
    def __init__(self, *, reason):
        super().__init__()
        self.reason = reason

    def __str__(self):
        return self.reason

def refuse(number):
    raise OddError(reason=f"number {number} is odd")
"""


def test_an_error_that_cannot_be_sent_comes_as_its_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "odd_code.py").write_text(ODD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    refuse = importlib.import_module("odd_code").refuse

    with contextlib.closing(InProcesses(1)) as workers:
        with pytest.raises(RuntimeError, match=r"(?s)In a worker process.*OddError: number 3"):
            workers.call(refuse, 3)
        assert workers.call(abs, -1) == 1


def test_a_result_that_does_not_fit_in_memory_is_an_error_of_that_part_alone() -> None:
    limit, (_, hard) = resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.closing(InProcesses(1)) as workers:
        workers.call(functools.partial(resource.setrlimit, limit), (4096, hard))
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)) as caught:
            workers.call(np.arange, 100_000)
        assert "In a worker process" in caught.value.__notes__[0]
        assert workers.call(np.arange, 3).tolist() == [0, 1, 2]


def test_an_error_while_parts_are_drawn_comes_after_the_results_before_it() -> None:
    def parts() -> Iterator[int]:
        yield from range(3)
        raise DataError("the parts must go on", got=3)

    results = InThreads(2).map(doubled, parts())

    assert [next(results) for _ in range(3)] == [0, 2, 4]
    with pytest.raises(DataError, match="must go on"):
        next(results)


def test_an_earlier_parts_error_is_raised_before_a_later_one() -> None:
    def parts() -> Iterator[int]:
        yield 1
        raise DataError("the parts must go on", got=3)

    with pytest.raises(DataError, match="number 1 must be even"):
        list(InThreads(5).map(refused, parts()))


def test_closed_workers_are_gone() -> None:
    workers = InProcesses(2)
    pids = [worker.pid for worker in workers._workers]
    workers.close()

    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_a_number_of_workers_that_cannot_be_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=r"data\.workers must be at"):
        IngestConfig(source="data.csv", workers=count)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2.0),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({}, None),
    ],
)
def test_the_containers_limit_of_cores_is_read(
    files: dict[str, str], expected: float | None, tmp_path: Path
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)

    assert cpu_limit(tmp_path) == expected
    cores = len(os.sched_getaffinity(0))
    assert usable_cores(tmp_path) == (min(cores, 2) if expected else cores)
