"""The files of a request log: bounded, complete, and never removed while they are written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.serve.request_log.writer import UNFINISHED, RecordFile, make_room
from stoker.serve.servables.prediction_logs import framed, read_records

RECORD = framed(b"x" * 100)
KIB = 1 << 10
RECORDS = 500
"""Of each of several writers: six times as many bytes as the log may have."""

WRITERS = """
import json, os, signal, sys
from stoker.serve.servables.prediction_logs import framed
from stoker.serve.request_log.writer import RecordFile, make_room


def write(prefix, name, count):
    file = RecordFile(prefix)
    for number in range(count):
        record = framed(name.encode() + b"%06d" % number + b"x" * 100)
        if file.size > 2048:
            file.close()
            file = RecordFile(prefix)
        file.flush()
        assert make_room(prefix, max_bytes=32768, needed=1024)
        file.write(record)
    file.flush()
    os.write(1, b"%d\\n" % os.getpid())
    signal.sigwait({signal.SIGTERM})
    file.close()


signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
for line in sys.stdin:
    prefix, names, count = json.loads(line)
    children = []
    for name in names:
        children.append(os.fork())
        if not children[-1]:
            try:
                write(prefix, name, count)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os.write(1, b"0\\n")
                os._exit(1)
            os._exit(0)
    ended = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    os.write(1, json.dumps(ended).encode() + b"\\n")
"""
"""Forks a writer for each name of a line; each prints its number when it has written, and waits for SIGTERM."""


class Writers:
    """Processes that write one log; TensorFlow is imported once for all of them."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITERS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, prefix: Path, names: str, count: int) -> list[int]:
        """Start one for each letter; their numbers, once each has written so many records."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([str(prefix), names, count]) + "\n")
        self._process.stdin.flush()
        pids = [int(self._line()) for _ in names]
        assert all(pids)
        return pids

    def codes(self) -> list[int]:
        """The exit codes of those that were started last."""
        found: list[int] = json.loads(self._line())
        return found

    def close(self) -> None:
        self._process.communicate("", timeout=60)

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@pytest.fixture(scope="module")
def writers() -> Iterator[Writers]:
    made = Writers()
    yield made
    made.close()


def whole(prefix: Path, records: int) -> Path:
    file = RecordFile(str(prefix))
    for _ in range(records):
        file.write(RECORD)
    before = set(prefix.parent.iterdir())
    file.close()
    (made,) = set(prefix.parent.iterdir()) - before
    return made


def test_the_oldest_files_are_removed_first_and_only_as_many_as_necessary(tmp_path: Path) -> None:
    files = [whole(tmp_path / "m", 10) for _ in range(5)]
    size = files[0].stat().st_size

    assert make_room(str(tmp_path / "m"), max_bytes=5 * size, needed=size + 1)

    assert sorted(tmp_path.iterdir()) == files[2:]
    assert {path.stat().st_size for path in files[2:]} == {size}


def test_nothing_is_removed_for_what_would_not_fit_into_an_empty_log(tmp_path: Path) -> None:
    files = [whole(tmp_path / "m", 10) for _ in range(3)]

    assert not make_room(str(tmp_path / "m"), max_bytes=KIB, needed=KIB + 1)

    assert sorted(tmp_path.iterdir()) == files


def test_files_of_others_stay_whatever_they_are_called(tmp_path: Path) -> None:
    stamp = "20200101T000000000000"
    others = [
        f"m-2-{stamp}-1.tfrecord",
        f"mm-{stamp}-1.tfrecord",
        f"m-{stamp}-1.tfrecord.copy",
        f"m-{stamp}-one.tfrecord",
        f"m-{stamp[1:]}-1.tfrecord",
        "m-notes",
    ]
    for name in others:
        (tmp_path / name).write_bytes(b"x" * KIB)
    own = tmp_path / f"m-{stamp}-1.tfrecord"
    own.write_bytes(b"x" * KIB)

    assert make_room(str(tmp_path / "m"), max_bytes=KIB, needed=KIB)

    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)


@pytest.mark.parametrize("prefix", ["m", "m/", "deep/er/m"])
def test_a_prefix_may_be_a_folder(tmp_path: Path, prefix: str) -> None:
    for _ in range(3):
        file = RecordFile(f"{tmp_path}/{prefix}")
        file.write(RECORD)
        file.close()

    assert make_room(f"{tmp_path}/{prefix}", max_bytes=KIB, needed=KIB)

    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_file_that_is_being_written_stays_and_new_records_are_dropped(tmp_path: Path) -> None:
    file = RecordFile(str(tmp_path / "m"))
    file.write(RECORD)
    file.flush()

    assert not make_room(str(tmp_path / "m"), max_bytes=KIB, needed=KIB)

    file.close()
    (path,) = tmp_path.iterdir()
    assert list(read_records(path)) == [b"x" * 100]


def test_what_a_killed_writer_left_is_removed_and_that_of_a_living_one_is_not(
    tmp_path: Path, writers: Writers
) -> None:
    prefix = tmp_path / "m"
    (killed,) = writers.start(prefix, "a", 1)
    (left,) = tmp_path.iterdir()
    assert left.name.endswith(UNFINISHED)
    assert not make_room(str(prefix), max_bytes=KIB, needed=KIB)
    assert left.exists()

    os.kill(killed, signal.SIGKILL)
    assert writers.codes() == [-signal.SIGKILL]

    assert make_room(str(prefix), max_bytes=KIB, needed=KIB)
    assert not left.exists()


def test_several_processes_keep_one_limit_and_lose_no_record_of_a_file_that_stays(
    tmp_path: Path, writers: Writers
) -> None:
    """32 KiB are allowed; each reserves 1 KiB before it writes, so that what two others add meanwhile is small."""
    prefix = tmp_path / "m"
    for writer in writers.start(prefix, "abc", RECORDS):
        os.kill(writer, signal.SIGTERM)

    assert writers.codes() == [0, 0, 0]
    files = sorted(tmp_path.iterdir())
    assert all(path.name.endswith(".tfrecord") for path in files)
    assert 16 * KIB < sum(path.stat().st_size for path in files) <= 33 * KIB
    found: dict[str, list[int]] = {}
    for path in files:
        for raw in read_records(path):
            found.setdefault(raw[:1].decode(), []).append(int(raw[1:7]))
    for numbers in found.values():
        assert sorted(numbers) == list(range(min(numbers), RECORDS))
    assert max(len(numbers) for numbers in found.values()) < RECORDS
