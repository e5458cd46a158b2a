"""Identifies a process by more than its process ID, which the kernel uses again after the process has ended."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path


def began(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; empty if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessIdentity:
    """Identifies a process, on this or another machine; no other process ever has the same identity."""

    host: str
    boot: str
    """ID of the machine's start (boot)."""

    pid: int
    began: str
    """Start of the process, in clock ticks since boot."""

    @property
    def is_here(self) -> bool:
        """Whether the process was started on this machine."""
        return self.host == socket.gethostname()

    @property
    def lives(self) -> bool:
        """Whether the process is running on this machine."""
        return self.is_here and self.boot == _boot() and began(self.pid) == self.began != ""


def identity_of(pid: int) -> ProcessIdentity:
    """Return the identity of a process that runs here."""
    return ProcessIdentity(host=socket.gethostname(), boot=_boot(), pid=pid, began=began(pid))


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
