"""Assign records that occur more than once to splits, according to the setting `data.duplicates`.

The hashes of all records so far, and a count for each hash, are kept in sorted runs, the largest first, as in
a log-structured merge tree: 12 bytes per distinct record, and 15 bytes while two runs are merged. Above
`MEMORY_BYTES`, the largest runs are moved to files without a name, which do not remain if the process is
killed. Such a file is mapped into memory, and the kernel may evict its pages.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from stoker.data.columns import Column
from stoker.data.ingest.assign import Hashes, SplitRule, hash_rows
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.records import Block

NO_SPLIT = -1
"""Value for a record that is left out, instead of the index of a split."""


class Dealer:
    """Assigns the records of a source's blocks to splits, in the source's order."""

    def __init__(
        self,
        config: IngestConfig,
        rule: SplitRule,
        columns: Sequence[Column],
        *,
        folder: Path,
        ignored: Sequence[str] = (),
    ) -> None:
        """Start without records.

        Args:
            config: Settings of ingest, of which `duplicates` and `split_by` are used.
            rule: Assigns each record to a split by its content.
            columns: The columns of the records.
            folder: Folder for temporary files.
            ignored: Columns in which copies may differ.
        """
        self.dropped = 0
        self._rule = rule
        self._columns = columns
        self._duplicates = config.duplicates_for(column.dtype for column in columns)
        deciding = rule.deciding(columns)
        self._others = [c for c in columns if c not in deciding and c.name not in ignored]
        is_spread = self._duplicates == "spread" and config.split_by is None
        self._counter = None
        if is_spread or self._duplicates == "drop":
            self._counter = CopyCounter(folder)

    def deal(self, block: Block) -> NDArray[np.intp]:
        """Return the index of each record's split, or `NO_SPLIT`: [rows].

        Call it once for each block, in the order of the source.
        """
        content = block.content
        if content is None:
            content = self._rule.content(block.table, self._columns)
        if self._counter is None:
            return self._rule.deal(content)
        if self._duplicates == "spread":
            return self._rule.deal(content, self._counter.number(content))
        # A copy is equal in all columns, not only in those that decide the split.
        whole = content + hash_rows(block.table, self._others)
        is_copy = self._counter.number(whole) > 0
        self.dropped += int(is_copy.sum())
        return np.where(is_copy, NO_SPLIT, self._rule.deal(content))

    def close(self) -> None:
        """Delete the temporary files."""
        if self._counter is not None:
            self._counter.close()


MEMORY_BYTES = 256 << 20
"""Maximum size of all runs in memory, bytes."""

GROWTH = 4
"""Each run is at least this many times as large as the next, so that few runs are searched and few merged."""

CHUNK = 1 << 17
"""Number of entries of a run that are moved at a time while another run is merged into it."""


class CopyCounter:
    """Numbers the records that have the same hash, over all blocks."""

    def __init__(self, folder: Path) -> None:
        """Start without records.

        Args:
            folder: Folder for the files that are created if memory is not sufficient.
        """
        self._folder = folder
        self._runs: list[_Run] = []

    def number(self, content: Hashes) -> NDArray[np.int64]:
        """Return, for each record, the number of records with the same hash that came before it: [rows].

        Args:
            content: [rows] hashes of a block's records, in order.

        Raises:
            OSError: the disk is full.
        """
        parts = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
        return np.concatenate([self._number(part) for part in parts] or [np.zeros(0, np.int64)])

    def close(self) -> None:
        """Free memory and disk."""
        for run in self._runs:
            run.close()
        self._runs = []

    def _number(self, content: Hashes) -> NDArray[np.int64]:
        order = np.argsort(content, kind="stable")
        ordered = content[order]
        starts = np.flatnonzero(np.diff(ordered, prepend=~ordered[:1]))
        times = np.diff(starts, append=len(ordered))
        earlier = self._count(ordered[starts], times)
        numbers = np.empty(len(content), np.int64)
        numbers[order] = np.arange(len(content)) - np.repeat(starts - earlier, times)
        return numbers

    def _count(self, keys: Hashes, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Add hashes and how often they occur; return how often each occurred before.

        Args:
            keys: [keys] distinct hashes, ascending.
            times: [keys] number of records with each hash.
        """
        earlier = np.zeros(len(keys), np.int64)
        unseen = np.arange(len(keys))
        for run in self._runs:
            places, found = run.find(keys[unseen])
            seen = unseen[found]
            earlier[seen] = run.counts[places]
            run.counts[places] += times[seen].astype(np.uint32)
            unseen = unseen[~found]
        if len(unseen):
            self._runs.append(_Run(keys[unseen], times[unseen].astype(np.uint32)))
            self._settle()
        return earlier

    def _settle(self) -> None:
        """Merge runs until each is at least `GROWTH` times as large as the next; keep to the memory limit."""
        while len(self._runs) > 1 and len(self._runs[-2].keys) < GROWTH * len(self._runs[-1].keys):
            last = self._runs.pop()
            self._runs[-1].take_in(last)
            last.close()
        in_memory = [run for run in self._runs if not run.is_on_disk]
        while in_memory and sum(run.size_bytes for run in in_memory) > MEMORY_BYTES:
            in_memory.pop(0).move_to_disk(self._folder)


class _Run:
    """Sorted hashes, and the number of records with each hash."""

    def __init__(self, keys: Hashes, counts: NDArray[np.uint32]) -> None:
        """Use these arrays; they will be changed."""
        self.keys, self.counts = keys, counts
        self._files: list[IO[bytes]] = []

    @property
    def is_on_disk(self) -> bool:
        return bool(self._files)

    @property
    def size_bytes(self) -> int:
        return self.keys.nbytes + self.counts.nbytes

    def find(self, keys: Hashes) -> tuple[NDArray[np.intp], NDArray[np.bool_]]:
        """Return the positions in this run of the keys that it contains; and [keys] whether it contains each."""
        places = np.searchsorted(self.keys, keys)
        found = self.keys[np.minimum(places, len(self.keys) - 1)] == keys
        return places[found], found

    def take_in(self, other: _Run) -> None:
        """Insert the entries of a smaller run; this run must not contain any of its keys."""
        places = np.searchsorted(self.keys, other.keys)
        size = len(self.keys)
        self._resize(size + len(other.keys))
        _insert(self.keys, size, places, other.keys)
        _insert(self.counts, size, places, other.counts)

    def move_to_disk(self, folder: Path) -> None:
        """Move the entries to files, which the kernel deletes when this process ends."""
        keys, counts = self.keys, self.counts
        with contextlib.ExitStack() as opened:
            files: list[IO[bytes]] = [
                opened.enter_context(tempfile.TemporaryFile(dir=folder)) for _ in range(2)
            ]
            self.keys = _mapped(files[0], keys.dtype, len(keys))
            self.counts = _mapped(files[1], counts.dtype, len(counts))
            self.keys[:], self.counts[:] = keys, counts
            self._files = files
            opened.pop_all()

    def close(self) -> None:
        """Close the files, which deletes them."""
        for file in self._files:
            file.close()

    def _resize(self, size: int) -> None:
        if self._files:
            self.keys = _mapped(self._files[0], self.keys.dtype, size)
            self.counts = _mapped(self._files[1], self.counts.dtype, size)
            return
        # Resize in place: a second copy of a large run would double the memory.
        self.keys.resize(size, refcheck=False)
        self.counts.resize(size, refcheck=False)


def _mapped(file: IO[bytes], dtype: np.dtype[Any], size: int) -> NDArray[Any]:
    """Map a file into memory as an array.

    Blocks of the disk are reserved first: on a full disk, writing to a page without a block would be SIGBUS.
    """
    os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
    return np.memmap(file, dtype, "r+", shape=(size,))


def _insert(array: NDArray[Any], size: int, places: NDArray[np.intp], values: NDArray[Any]) -> None:
    """Insert values into an array as `np.insert` does, but in place: chunk by chunk, from the end.

    Args:
        array: [size + values] entries, of which the first `size` are set.
        size: Number of entries that are set.
        places: [values] ascending indices; each value is inserted before the entry at its index.
        values: [values] the values to insert.
    """
    stop, until = size, len(values)
    while until:
        start = max(0, stop - CHUNK)
        first = int(np.searchsorted(places, start)) if start else 0
        part = np.insert(array[start:stop], places[first:until] - start, values[first:until])
        array[start + first : stop + until] = part
        stop, until = start, first
