"""A process that waits for a lock says who holds it: the holder is a real process, suspended by SIGSTOP."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from stoker.app.experiment import load_experiment, prepare_source
from stoker.app.run_folder import Resume, open_run
from stoker.core import lock_file
from stoker.core.errors import BusyError
from stoker.core.files import alone
from stoker.registry.repository import Repository

HOLDER = """
import os, signal, sys
from pathlib import Path
from typing import IO
from stoker.core.files import alone
with alone(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGSTOP)
"""


class Holder:
    """A suspended process that holds a lock file."""

    def __init__(self, lock: Path) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)])
        self.pid = self._process.pid
        os.waitid(os.P_PID, self.pid, os.WSTOPPED)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture
def holds(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], Holder]]:
    monkeypatch.setattr(lock_file, "NOTICE_S", 0.2)
    started: list[Holder] = []

    def hold(lock: Path) -> Holder:
        started.append(Holder(lock))
        return started[-1]

    yield hold
    for each in started:
        each.end()


def saved_model(folder: Path) -> Path:
    folder.mkdir()
    (folder / "saved_model.pb").write_bytes(b"graph")
    return folder


def prepare(folder: Path) -> None:
    (folder / "stoker.yaml").write_text(
        "name: a\ndata: {source: data.csv, prepare: 'module:make'}\nmodel: module:make\nlabel: y\n"
    )
    (folder / "module.py").write_text("def make(path):\n    path.write_text('x,y')\n")
    prepare_source(load_experiment(folder), print)
    assert (folder / "data.csv").read_text() == "x,y"


def push(folder: Path) -> None:
    assert Repository(folder / "models").push(saved_model(folder / "m"), "taxi").version == 1


@contextmanager
def at_notice(act: Callable[[], None]) -> Iterator[list[str]]:
    """Act at the first line that says who holds a lock, and collect the lines."""
    said: list[str] = []

    class Acts(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())
            act()

    handler = Acts()
    logging.getLogger("stoker").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("stoker").removeHandler(handler)


@pytest.mark.parametrize(
    ("lock", "work"), [(".data.csv.lock", prepare), ("models/taxi/.push.lock", push)]
)
def test_the_wait_for_a_suspended_holder_names_it_and_ends_with_it(
    tmp_path: Path,
    holds: Callable[[Path], Holder],
    lock: str,
    work: Callable[[Path], None],
) -> None:
    holder = holds(tmp_path / lock)

    with at_notice(holder.go_on) as said:
        work(tmp_path)

    (line,) = said
    assert line.startswith(f"waiting for {tmp_path / lock}: pid {holder.pid} on ")
    assert f"s and is suspended; continue it by `kill -CONT {holder.pid}`" in line


def test_a_run_is_not_opened_while_a_suspended_process_opens_one(
    tmp_path: Path, holds: Callable[[Path], Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = holds(tmp_path / ".lock")
    monkeypatch.setattr("stoker.app.run_folder.OPEN_S", 0.3)
    opened = open_run(tmp_path, identity={}, settings={}, resume=Resume())

    with pytest.raises(BusyError, match=f"pid {holder.pid} on .* is suspended"), opened:
        pass

    assert [each.name for each in tmp_path.iterdir()] == [".lock"], "nothing was written"


def test_the_lock_of_a_machine_that_is_gone_can_be_deleted(
    tmp_path: Path, holds: Callable[[Path], Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = tmp_path / "lock"
    holds(lock)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")

    with at_notice(lock.unlink) as said, alone(lock):
        assert lock.read_text() == f"pid {os.getpid()} on elsewhere\n"

    assert said[0].endswith("; if that machine is gone, delete the file")


def test_a_file_that_is_deleted_while_it_is_locked_is_not_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, flock, deleted = tmp_path / "lock", fcntl.flock, list[bool]()

    def delete_and_lock(stream: IO[str], operation: int) -> None:
        if not deleted:
            lock.unlink()
            deleted.append(True)
        flock(stream, operation)

    monkeypatch.setattr(fcntl, "flock", delete_and_lock)
    with lock_file.take_lock(lock) as stream:
        assert os.path.samestat(os.fstat(stream.fileno()), lock.stat())
