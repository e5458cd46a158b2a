"""Identifies processes and moments across reboots and changes of the clock."""

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
    """A point in time on two clocks."""

    unix_s: float
    """Time of day, seconds since 1970; this clock may be set."""

    boot: str
    """ID of the machine's boot; "" if unknown."""

    boot_s: float
    """Seconds since the boot; this clock cannot be set."""

    def since(self, earlier: Moment) -> float:
        """Return the seconds since an earlier moment; after a reboot, or with unknown boots, by the time of day."""
        if self.boot and self.boot == earlier.boot:
            return max(0.0, self.boot_s - earlier.boot_s)
        return max(0.0, self.unix_s - earlier.unix_s)


def now() -> Moment:
    """Return the current moment."""
    return Moment(
        unix_s=time.time(), boot=boot_id(), boot_s=time.clock_gettime(time.CLOCK_BOOTTIME)
    )


@functools.cache
def boot_id() -> str:
    """Return the ID of the machine's current boot; "" if the system has none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def end_of(error: BaseException | None) -> str:
    """Return how a process ends with this error, as a label: `done`, `preempted`, `error` or `failed`."""
    if error is None:
        return "done"
    if isinstance(error, Preempted | KeyboardInterrupt):
        return "preempted"
    return "error" if isinstance(error, UserError) else "failed"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessId:
    """Identifies a process, even if a later process gets the same process ID."""

    host: str
    boot: str
    pid: int
    started: str
    """Start of the process in clock ticks since boot; "" if unknown."""

    def is_gone(self) -> bool:
        """Return whether the process has ended; False if it runs on another host, since this host cannot know."""
        if self.host != socket.gethostname():
            return False
        return self.boot != boot_id() or self.started != _started(self.pid)


def this_process() -> ProcessId:
    """Return the identity of this process."""
    pid = os.getpid()
    return ProcessId(host=socket.gethostname(), boot=boot_id(), pid=pid, started=_started(pid))


def _started(pid: int) -> str:
    """Return the start time of a process (stat, field 22, in proc(5)); "" if it does not exist or is a zombie."""
    try:
        # The second field is the program's name, which may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
