"""The journal of an ingest, from which the next ingest continues if this one is killed.

The journal is next to the shards. It has a fingerprint of the source and settings, the complete shards, and
the number of blocks of the source whose records are all in these shards: reading continues after these blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.core.errors import DataError
from stoker.core.files import read_json, write_json
from stoker.core.fingerprint import fingerprint, library_versions
from stoker.data.columns import Column
from stoker.data.dataset import Shard
from stoker.data.ingest.image_store import ChosenStore
from stoker.data.sources.config import REACH_KEYS, IngestConfig
from stoker.data.sources.files.listing import Listing
from stoker.data.sources.records import Assumption, Fault, Scan

JOURNAL = "journal.json"
"""File name of the journal. It is written before the first shard, and again after each shard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """The state of an ingest after some blocks were assigned to splits."""

    blocks: int
    """Number of blocks of the source that were processed."""

    done: int
    """Number of records in these blocks, including bad records."""

    rows: Mapping[str, int]
    """Split -> number of good records in these blocks."""

    bad: int
    """Number of bad records in these blocks."""

    faults: tuple[Fault, ...]
    """The first bad records; their number is limited."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """The result of an earlier ingest: its shards, which must still be verified, and where to continue."""

    scan: Scan
    """Result of the first pass over the source."""

    mark: Mark
    """The last state whose records are all in the shards."""

    shards: dict[str, tuple[Shard, ...]]
    """Split -> its complete shards."""

    store: ChosenStore | None
    """How the training split's images are stored; None for tables."""


class Journal:
    """The journal. It is written each time that a shard is on the disk."""

    def __init__(self, out_dir: Path, *, identity: str, splits: Sequence[str]) -> None:
        """Start an empty journal.

        Args:
            out_dir: The dataset's folder.
            identity: Result of `identity_of`; a journal with a different identity is ignored.
            splits: Names of the splits.
        """
        self._path = out_dir / JOURNAL
        self._identity = identity
        self._splits = tuple(splits)
        self._shards: dict[str, list[Shard]] = {}
        self._scan: Scan | None = None
        self._store: ChosenStore | None = None
        self._marks: list[Mark] = []

    def start(self, scan: Scan, store: ChosenStore | None) -> Checkpoint:
        """Record the result of the first pass over the source; no shard is written yet."""
        rows = dict.fromkeys(self._splits, 0)
        state = Checkpoint(
            scan=scan,
            mark=Mark(blocks=0, done=0, rows=rows, bad=0, faults=()),
            shards=dict.fromkeys(self._splits, ()),
            store=store,
        )
        self.resume(state)
        self._write()
        return state

    @property
    def size_bytes(self) -> int:
        """Total size of the shards that are on the disk, bytes."""
        return sum(shard.size_bytes for shard in itertools.chain(*self._shards.values()))

    def dealt(self, mark: Mark) -> None:
        """Record that the next block was assigned to splits; it is written to the disk with the next shard."""
        self._marks.append(mark)

    def finished(self, split: str, shard: Shard) -> None:
        """Record that the next shard of a split is on the disk, and write the journal."""
        self._shards[split].append(shard)
        rows = {name: sum(each.rows for each in done) for name, done in self._shards.items()}
        within = [m for m in self._marks if all(m.rows[name] <= rows[name] for name in rows)]
        self._marks = self._marks[len(within) - 1 :]
        self._write()

    def resume(self, state: Checkpoint) -> None:
        """Continue from the state of an earlier ingest."""
        self._scan, self._store = state.scan, state.store
        self._marks = [state.mark]
        self._shards = {name: list(shards) for name, shards in state.shards.items()}

    def load(self) -> Checkpoint | None:
        """Return the state of an earlier ingest with the same identity; None without a usable journal."""
        if not self._path.is_file():
            return None
        try:
            raw = read_json(self._path)
            if raw["identity"] != self._identity:
                return None
            shards = {name: tuple(Shard(**s) for s in raw["shards"][name]) for name in self._splits}
            store = None if raw["store"] is None else ChosenStore(**raw["store"])
            return Checkpoint(
                scan=_scan(raw["scan"]), mark=_mark(raw["mark"]), shards=shards, store=store
            )
        except (DataError, KeyError, TypeError):
            return None

    def _write(self) -> None:
        if self._scan is None:
            raise RuntimeError("call `start` or `resume` before the journal is written")
        write_json(
            self._path,
            {
                "identity": self._identity,
                "scan": dataclasses.asdict(self._scan),
                "store": None if self._store is None else dataclasses.asdict(self._store),
                "mark": dataclasses.asdict(self._marks[0]),
                "shards": {
                    name: [dataclasses.asdict(shard) for shard in shards]
                    for name, shards in self._shards.items()
                },
            },
        )


def identity_of(
    config: IngestConfig, listing: Listing, *, label: str | Mapping[str, str] | None
) -> str:
    """Return a fingerprint of source and settings; an ingest continues an earlier one only if both are equal.

    Args:
        config: The source, and how to read it.
        listing: The files, with their sizes and times.
        label: The column that every record must have, or such a column for each output.
    """
    files = [[file.name, file.size_bytes, file.mtime_ns] for file in listing.files]
    settings = dataclasses.asdict(config)
    for key in REACH_KEYS:
        del settings[key]
    return fingerprint(
        {"config": settings, "files": files, "label": label, "versions": library_versions()}
    )


def _scan(raw: dict[str, Any]) -> Scan:
    return Scan(
        columns=tuple(Column(**column) for column in raw["columns"]),
        readings=tuple(raw["readings"]),
        rows=raw["rows"],
        image=None if raw["image"] is None else tuple(raw["image"]),
        kinds=tuple(raw["kinds"]),
        assumptions=tuple(Assumption(**each) for each in raw["assumptions"]),
    )


def _mark(raw: dict[str, Any]) -> Mark:
    return Mark(**(raw | {"faults": tuple(Fault(**fault) for fault in raw["faults"])}))
