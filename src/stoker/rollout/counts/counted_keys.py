"""The keys that have counted in a stage, so that a user counts once, whichever worker process answers.

The workers of a server map one file: a table of 64-bit numbers, in which the search for a key starts at the slot of its
hash. It has no lock: a key is counted twice only if two processes write into one slot at the same moment.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from enum import IntEnum
from pathlib import Path

_SLOTS_BITS = 21
SLOTS = 1 << _SLOTS_BITS
"""Slots of the table, 8 bytes each: enough for a million keys."""

PROBES = 64
"""Slots that are searched for a key; a key that finds none free is not counted."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
"""Source: Knuth, The Art of Computer Programming, volume 3, multiplicative hashing."""


class Once(IntEnum):
    """What a key counts for; it counts once for each."""

    BAD = 1
    SLOW = 2
    PREDICTED = 3
    BASELINE_BAD = 4
    """A key in a shadow stage, where both versions answer it."""


class StageKeys:
    """The keys of one stage; used by one thread of a process at a time."""

    def __init__(self, path: Path | None = None) -> None:
        """Open the keys that other processes have counted.

        Args:
            path: file of the stage, in a folder of its own; None: no other process counts the same keys.
        """
        self._path = path
        self._table: memoryview | None = None

    def is_first(self, key: int | None, once: Once) -> bool:
        """Whether a key counts now: only its first request does. A request without a key always counts."""
        if key is None:
            return True
        place, found = self._find(key, once)
        if place is None or found:
            return False
        self._places()[place] = _number(key, once)
        return True

    def has(self, key: int, once: Once) -> bool:
        """Whether a key has already counted, or cannot count."""
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
        if self._table is None:  # created only now: most rollouts have no key
            self._table = memoryview(_mapped(self._path)).cast("Q")
        return self._table


def _number(key: int, once: Once) -> int:
    return (key << 3 | once) & _MASK


def _mapped(path: Path | None) -> mmap.mmap:
    """Map the file into memory; if that fails, use memory of this process only."""
    if path is not None:
        with contextlib.suppress(OSError):  # the disk is full
            path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                # Reserve the space first: writing into a hole of a mapped file on a full disk would kill the process.
                os.posix_fallocate(file, 0, SLOTS * 8)
                for other in path.parent.iterdir():
                    if other != path:
                        other.unlink(missing_ok=True)
                return mmap.mmap(file, SLOTS * 8)
            finally:
                os.close(file)
    return mmap.mmap(-1, SLOTS * 8)
