"""Identifies processes across reboots and changes of the clock: when one was alive, and whether it still is."""

from __future__ import annotations

import functools
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import Preempted, UserError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """An instant, by two clocks."""

    unix_s: float
    """Time of day, seconds since 1970; it may be changed."""

    boot: str
    """ID of the boot; "" if it is unknown."""

    boot_s: float
    """Seconds since the boot; this clock is never changed."""

    def since(self, earlier: Moment) -> float:
        """Return the seconds since an earlier moment; the time of day is used only after another boot."""
        if self.boot and self.boot == earlier.boot:
            return max(0.0, self.boot_s - earlier.boot_s)
        return max(0.0, self.unix_s - earlier.unix_s)


def now() -> Moment:
    """Return the current instant."""
    return Moment(
        unix_s=time.time(), boot=boot_id(), boot_s=time.clock_gettime(time.CLOCK_BOOTTIME)
    )


@functools.cache
def boot_id() -> str:
    """Return the ID of the boot; "" if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def end_of(error: BaseException | None) -> str:
    """Return how a process ends, as a label: `done`, `preempted`, `error` or `failed`."""
    if error is None:
        return "done"
    if isinstance(error, Preempted | KeyboardInterrupt):
        return "preempted"
    return "error" if isinstance(error, UserError) else "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessId:
    """A process, distinguished from later ones with the same process ID."""

    host: str
    boot: str
    pid: int
    started: str
    """Its start in clock ticks since boot."""

    def is_gone(self) -> bool:
        """Return whether it has ended; False if only another host can know."""
        if self.host != socket.gethostname():
            return False
        return self.boot != boot_id() or self.started != _started(self.pid)


def this_process() -> ProcessId:
    """Return this process."""
    pid = os.getpid()
    return ProcessId(host=socket.gethostname(), boot=boot_id(), pid=pid, started=_started(pid))


def _started(pid: int) -> str:
    """Return field 22 of proc(5)'s stat; "" if the process does not exist or is a zombie."""
    try:
        # The second field is the program's name, which may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
