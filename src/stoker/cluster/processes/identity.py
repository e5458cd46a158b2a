"""Identifies a process: its number is used again after its end, and after a restart of the machine."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path


def began(pid: int) -> str:
    """Return when a process started, in ticks since boot; empty if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """One process, of this or of another machine, unambiguous forever."""

    host: str
    boot: str
    """Identifies the start of the machine."""

    pid: int
    began: str
    """Its start, in ticks since boot."""

    @property
    def is_here(self) -> bool:
        """Whether it was started on this machine."""
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Whether it runs, on this machine."""
        return self.is_here and self.boot == _boot() and began(self.pid) == self.began != ""


def identity_of(pid: int) -> ProcessIdentity:
    """Return the identity of a process that runs here."""
    return ProcessIdentity(host=socket.gethostname(), boot=_boot(), pid=pid, began=began(pid))


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
