"""The keys that were counted in a stage: a user is counted once, whichever worker process answers.

The workers of a server map the same file, a hash table of 64-bit numbers with linear probing. The table has no lock: a
key is counted twice only if two processes write to the same slot at the same moment.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from enum import IntEnum
from pathlib import Path

_SLOTS_BITS = 21
SLOTS = 1 << _SLOTS_BITS
"""Number of slots of the table, 8 bytes each: enough for a million keys."""

PROBES = 64
"""Number of slots that are searched for a key; if none of them is free, the key is not counted."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""Multiplier of the hash. Source: Knuth, The Art of Computer Programming, volume 3, multiplicative hashing."""


class Once(IntEnum):
    """Counters that count a key at most once."""

    BAD = 1
    SLOW = 2
    PREDICTED = 3
    BASELINE_BAD = 4
    """Bad answers of the baseline in a shadow stage, where both versions answer a key."""


class StageKeys:
    """The counted keys of one stage; used by one thread of a process at a time."""

    def __init__(self, path: Path | None = None) -> None:
        """Open the keys that other processes have counted.

        Args:
            path: File of the stage's keys; None: no other process counts the same keys.
        """
        self._path = path
        self._table: memoryview | None = None

    def is_first(self, key: int | None, once: Once) -> bool:
        """Return whether to count a request: the first one of its key. A request without a key always counts."""
        if key is None:
            return True
        place, found = self._find(key, once)
        if place is None or found:
            return False
        self._places()[place] = _number(key, once)
        return True

    def has(self, key: int, once: Once) -> bool:
        """Return whether a key was counted already, or cannot be counted because its slots are full."""
        place, found = self._find(key, once)
        return place is None or found

    def _find(self, key: int, once: Once) -> tuple[int | None, bool]:
        """Return the slot of a key (None if none is free), and whether the slot already has the key."""
        table, number = self._places(), _number(key, once)
        first = (number * _GOLDEN & _MASK) >> (64 - _SLOTS_BITS)
        for at in range(first, first + PROBES):
            place = at % SLOTS
            there = table[place]
            if not there or there == number:
                return place, bool(there)
        return None, False

    def _places(self) -> memoryview:
        if self._table is None:  # created when needed, because most rollouts have no key
            self._table = memoryview(_mapped(self._path)).cast("Q")
        return self._table


def _number(key: int, once: Once) -> int:
    return (key << 3 | once) & _MASK


def _mapped(path: Path | None) -> mmap.mmap:
    """Map the file into memory; if that fails, use memory that other processes do not see."""
    if path is not None:
        with contextlib.suppress(OSError):  # the disk is full
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                # Reserve the disk space first: on a full disk, a write to a hole of a mapped file would kill the
                # process.
                os.posix_fallocate(file, 0, SLOTS * 8)
                for other in path.parent.iterdir():
                    if other != path:
                        other.unlink(missing_ok=True)
                return mmap.mmap(file, SLOTS * 8)
            finally:
                os.close(file)
    return mmap.mmap(-1, SLOTS * 8)
