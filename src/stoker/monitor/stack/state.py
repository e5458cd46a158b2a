"""Records which processes `stoker monitor up` started, so that `down` ends these and no others."""

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
    """One started program."""

    name: str
    """Prometheus or Alertmanager."""

    pid: int

    began: str
    """Its start by the kernel's clock: another process with the same ID has another start."""

    address: str
    """HOST:PORT."""

    log: str
    """File of its output."""

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return bool(self.began) and began(self.pid) == self.began  # empty: it ended at once

    def end(self) -> None:
        """Request its end, wait, and kill it if it does not end."""
        for number, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
            if not self.runs:
                return
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)
            end_s = time.monotonic() + wait_s
            while self.runs and time.monotonic() < end_s:
                time.sleep(0.05)  # it is not this process's child, so it cannot be waited for


def read_started(folder: Path) -> tuple[Started, ...]:
    """Return the processes that were started with this state folder; empty if there are none.

    Raises:
        DataError: the file is damaged, or another version of Stoker wrote it.
    """
    path = folder / FILE
    if not path.is_file():
        return ()
    try:
        return tuple(Started(**each) for each in read_json(path))
    except TypeError as error:
        raise DataError(
            f"{path} must be what this version of `stoker monitor up` writes",
            got=Plain(str(error)),
            fix="End Prometheus and Alertmanager by hand, and delete the file.",
        ) from error


def write_started(folder: Path, started: tuple[Started, ...]) -> None:
    """Record what was started; with nothing, remove the record."""
    if started:
        write_json(folder / FILE, [asdict(each) for each in started])
    else:
        (folder / FILE).unlink(missing_ok=True)
