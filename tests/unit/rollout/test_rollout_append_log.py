"""Lines that several processes write and that survive what ends a process."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.rollout.ab.append_log import LogReader, LogWriter, objects_of


def lines(*numbers: int) -> list[bytes]:
    return [json.dumps({"n": number}).encode() for number in numbers]


def numbers_of(reader: LogReader) -> list[int]:
    return [line["n"] for block in reader.blocks() for line in objects_of(block)]


def test_a_reader_goes_on_where_it_was_in_the_files_of_all_writers(tmp_path: Path) -> None:
    one, two = LogWriter(tmp_path, "log-one"), LogWriter(tmp_path, "log-two")
    reader = LogReader(tmp_path, "log-*")
    assert numbers_of(reader) == []

    one.append(lines(1, 2))
    two.append(lines(10))
    assert numbers_of(reader) == [1, 2, 10]
    one.append(lines(3))
    two.append(lines(11))
    assert [*reader.blocks(but="log-two-")] == [b'{"n": 3}\n']
    assert numbers_of(reader) == [11]
    assert numbers_of(reader) == []


def test_files_have_a_largest_size_and_a_writer_goes_on_in_the_last_one(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, "log-one", file_bytes=30)
    for number in range(10):
        writer.append(lines(number))
    writer.close()
    again = LogWriter(tmp_path, "log-one", file_bytes=30)
    again.append(lines(10))

    sizes = [path.stat().st_size for path in sorted(tmp_path.iterdir())]
    assert len(sizes) == 3
    assert max(sizes) < 30 + 9
    assert numbers_of(LogReader(tmp_path, "log-*")) == [*range(11)]


def test_cut_and_damaged_lines_are_left_out(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, "log-one")
    writer.append([*lines(1), b"{", b"[1]", b"\xff\xfe", *lines(2)])
    writer.close()
    path = next(tmp_path.iterdir())
    with path.open("ab") as file:
        file.write(b'{"n": 3')
    reader = LogReader(tmp_path, "log-*")
    assert (numbers_of(reader), reader.cut) == ([1, 2], 1)

    # The next writer of this name does not lengthen the line that was cut.
    LogWriter(tmp_path, "log-one").append(lines(4))
    assert (numbers_of(reader), reader.cut) == ([4], 0)
    later = LogReader(tmp_path, "log-*")
    assert (numbers_of(later), later.cut) == ([1, 2, 4], 0)


def test_lines_that_do_not_fit_leave_no_bytes(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path, "log-one")
    writer.append(lines(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.append(lines(*range(2, 60)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.append(lines(60))

    assert numbers_of(LogReader(tmp_path, "log-*")) == [1, 60]


WRITES = """
import sys
from pathlib import Path
from stoker.rollout.ab.append_log import LogWriter
writer = LogWriter(Path(sys.argv[1]), "log-one", file_bytes=2_000)
number = 0
while True:
    number += 1
    writer.append([b'{"n": %d}' % number])
    print(number, flush=True)
"""


def test_a_killed_writer_loses_no_line_that_it_has_written(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITES, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout:
        said = [int(process.stdout.readline()) for _ in range(2_000)]
        process.send_signal(signal.SIGKILL)
        process.wait()

    reader = LogReader(tmp_path, "log-*")
    found = numbers_of(reader)
    assert found[:2_000] == said
    assert reader.cut == 0
