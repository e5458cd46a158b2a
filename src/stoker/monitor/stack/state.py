"""Records the processes that `stoker monitor up` started, so that `down` ends only these processes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from stoker.cluster.processes.identity import began
from stoker.core.errors import DataError, Plain
from stoker.core.files import read_json, write_json

FILE = "started.json"

GRACE_S = 15.0
"""Time for a program to write its data before it is killed, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """A program that was started."""

    name: str
    """Prometheus or Alertmanager."""

    pid: int

    began: str
    """Start time of the process on the kernel's clock; a later process with the same ID has another start time."""

    address: str
    """Address on which it listens, HOST:PORT."""

    log: str
    """File with its output."""

    @property
    def runs(self) -> bool:
        """Whether the program is still running."""
        # "": it ended before its start was read
        return bool(self.began) and began(self.pid) == self.began

    def end(self) -> None:
        """Send SIGTERM, wait, and kill the program if it does not end."""
        for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            if not self.runs:
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            end_s = time.monotonic() + wait_s
            while self.runs and time.monotonic() < end_s:
                time.sleep(0.05)  # not a child of this process, so it cannot be waited for


def read_started(folder: Path) -> tuple[Started, ...]:
    """Return the programs that were started with this state folder; empty if none were.

    Raises:
        DataError: The record is damaged, or another version of Stoker wrote it.
    """
    path = folder / FILE
    if not path.is_file():
        return ()
    try:
        return tuple(Started(**each) for each in read_json(path))
    except TypeError as error:
        raise DataError(
            f"{path} must be a record that this version of `stoker monitor up` wrote",
            got=Plain(str(error)),
            fix="End Prometheus and Alertmanager yourself, and delete the file.",
        ) from error


def write_started(folder: Path, started: tuple[Started, ...]) -> None:
    """Record the programs that were started; if none were, remove the record."""
    if started:
        write_json(folder / FILE, [asdict(each) for each in started])
    else:
        (folder / FILE).unlink(missing_ok=True)
