"""Every line of a log is read exactly once, through rotation and while the log grows."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.core.errors import ConfigError
from stoker.jobs.logs import GrowingLog, job_lines, workers_of


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    return folder


def rotate(folder: Path) -> None:
    (folder / "task-0.log.1").replace(folder / "task-0.log.2")
    (folder / "task-0.log").replace(folder / "task-0.log.1")


def test_parts_come_in_the_order_in_which_they_were_written(logs: Path) -> None:
    for number, name in enumerate(("task-0.log.10", "task-0.log.2", "task-0.log.1", "task-0.log")):
        (logs / name).write_text(f"{number}\n")
    (logs / "task-0.log.tmp").write_text("not a part\n")

    assert list(job_lines(logs.parent, worker=0)) == ["0", "1", "2", "3"]


def test_all_workers_come_with_their_names_and_with_the_last_line_without_an_end(
    logs: Path,
) -> None:
    (logs / "task-10.log").write_text("late\n")
    (logs / "task-2.log").write_bytes(b"first\nbro\xffken")
    (logs / "supervisor.log").write_text("start\n")
    (logs / "notes.txt").write_text("no log\n")

    assert list(job_lines(logs.parent, worker=None)) == [
        "[supervisor] start",
        "[worker 2] first",
        "[worker 2] bro\ufffdken",
        "[worker 10] late",
    ]


def test_a_worker_without_a_log_is_one_line_with_those_that_have_one(logs: Path) -> None:
    (logs / "task-1.log").write_text("a\n")

    with pytest.raises(ConfigError, match=r"Received: 7; workers with logs: 1\."):
        job_lines(logs.parent, worker=7)

    assert workers_of(logs.parent) == [1]


def test_a_log_that_rotates_twice_between_two_looks_loses_and_repeats_no_line(logs: Path) -> None:
    (logs / "task-0.log.1").write_text("0\n")
    (logs / "task-0.log").write_text("1\n2\nha")
    log = GrowingLog(logs, "task-0.log")
    assert list(log.lines()) == ["0", "1", "2"]

    with (logs / "task-0.log").open("a") as stream:
        stream.write("lf\n")
    rotate(logs)
    (logs / "task-0.log").write_text("4\n")
    (logs / "task-0.log.2").replace(logs / "task-0.log.3")
    (logs / "task-0.log.1").replace(logs / "task-0.log.2")
    (logs / "task-0.log").replace(logs / "task-0.log.1")
    (logs / "task-0.log").write_text("5\n")

    assert list(log.lines()) == ["half", "4", "5"]
    assert list(log.lines()) == []


def test_a_log_that_was_emptied_in_place_is_read_from_its_beginning(logs: Path) -> None:
    (logs / "task-0.log").write_text("a long line\n")
    log = GrowingLog(logs, "task-0.log")
    assert list(log.lines()) == ["a long line"]

    os.truncate(logs / "task-0.log", 0)
    with (logs / "task-0.log").open("a") as stream:
        stream.write("new\n")

    assert list(log.lines()) == ["new"]


def test_following_ends_with_the_job_and_has_what_was_written_last(logs: Path) -> None:
    over = threading.Event()

    def write() -> None:
        for number in range(5):
            with (logs / "task-0.log").open("a") as stream:
                stream.write(f"{number}\n")
            time.sleep(0.1)  # the reader follows line by line
        (logs / "task-1.log").write_text("late\n")
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    is_over: Callable[[], bool] = over.is_set
    found = list(job_lines(logs.parent, worker=None, until=is_over))
    writer.join()

    assert found == [*(f"[worker 0] {number}" for number in range(5)), "[worker 1] late"]
