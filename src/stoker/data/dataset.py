"""The dataset: shards, and the manifest with their lengths and hashes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from stoker.core.errors import DataError, Plain
from stoker.core.files import read_json, sha256_file, write_json
from stoker.core.fingerprint import fingerprint
from stoker.data.columns import Column

MANIFEST = "manifest.json"
"""File name of the manifest. It is written last: a folder without a manifest is not a dataset."""

BATCH_ROWS = 8192
"""Default number of rows that are read at a time: a few MB for a wide table."""

SAMPLE = "sample.parquet"
"""File with the training split's first records."""

SAMPLE_ROWS = 17
"""Number of records in the sample: small, and unlikely to equal another dimension of a tensor, so that a check finds
tensors without one row per record."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One Parquet file of a split, with page checksums."""

    file: str
    """Relative to the dataset's folder, e.g. `train/shard-00000.parquet`."""

    rows: int
    """Number of records in the shard."""

    size_bytes: int
    """Length of the file, bytes."""

    sha256: str
    """Hash of the file."""

    index: str | None = None
    """File with the position of each image, relative to the dataset's folder; None for tables."""

    index_sha256: str | None = None
    """Hash of the index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageShape:
    """The form to which every image is converted before the model sees it."""

    height: int
    """Height, pixels."""

    width: int
    """Width, pixels."""

    channels: int
    """1 (gray) or 3 (RGB)."""

    fit: Literal["stretch", "crop"] = "stretch"
    """Whether the whole image or only its middle is used; see the setting `data.images.fit`."""

    crop: float = 0.875
    """Side of the box that `fit: crop` cuts out, relative to the largest box in the image's middle."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A record that ingest left out, and its position."""

    file: str
    """The source file."""

    row: int
    """Record number in that file, counted from 1 without the header; 1 for an image."""

    column: str
    """The column with the error; "" if the whole row is bad."""

    reason: str
    """What is wrong with the value or row."""


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The output of ingest: shards by split, and everything needed to check them.

    Attributes:
        root: The folder that holds `manifest.json` and the shards.
        columns: Every raw column, in the source's order.
        splits: Split name -> its shards, in reading order.
        column_hashes: Split -> column name -> SHA-256 of that column's values and type, so that a
            stage can depend on just the columns that it reads.
        image: The shape that all images are converted to; None for tables.
        image_store: How the training split's images are stored, and why, in one line; None for
            tables.
        bad_rows: The records that were left out (at most `data.max_bad_rows`).
        copies_dropped: Copies of records that were left out (`data.duplicates: drop`).
        warnings: What ingest assumed about the source, or found doubtful; one line for each.
        sample: File with the training split's first records, on which a transform is tested; None:
            they are read from the split's first shard.
    """

    root: Path
    columns: tuple[Column, ...]
    splits: dict[str, tuple[Shard, ...]]
    column_hashes: dict[str, dict[str, str]]
    image: ImageShape | None = None
    image_store: str | None = None
    bad_rows: tuple[BadRow, ...] = field(default=())
    copies_dropped: int = 0
    warnings: tuple[str, ...] = ()
    sample: Shard | None = None

    @property
    def fingerprint(self) -> str:
        """Hash of rows, splits and order; it does not depend on the folder."""
        return self.fingerprint_of([column.name for column in self.columns])

    def fingerprint_of(self, names: Sequence[str]) -> str:
        """Fingerprint of the named columns only."""
        return fingerprint(
            {
                split: {name: hashes[name] for name in sorted(names) if name in hashes}
                for split, hashes in self.column_hashes.items()
            }
            | {"image": self.image}
        )

    def column(self, name: str) -> Column:
        """The column of that name.

        Raises:
            KeyError: the column does not exist.
        """
        return next(column for column in self.columns if column.name == name)

    def rows(self, split: str) -> int:
        """Number of records in a split."""
        return sum(shard.rows for shard in self.splits[split])

    def paths(self, split: str) -> list[Path]:
        """The split's Parquet files, in reading order."""
        return [self.root / shard.file for shard in self.splits[split]]

    def verify(self) -> None:
        """Check length and hash of every shard.

        Raises:
            DataError: a shard is missing, truncated or changed; the error names it.
        """
        for shards in self.splits.values():
            for shard in shards:
                verify_shard(self.root, shard)

    def batches(
        self,
        split: str,
        *,
        columns: Sequence[str] | None = None,
        rows: int = BATCH_ROWS,
        whole: bool = True,
    ) -> Iterator[pa.RecordBatch]:
        """Read a split in order; each shard's length, hash and page checksums are checked.

        Args:
            split: Name of the split.
            columns: Names of the columns to read; all by default.
            rows: Maximum number of records in a batch.
            whole: False checks only the file's length and the checksums of the pages that are
                read; this is faster if a few columns are read from shards with large images.

        Raises:
            DataError: a shard is missing, truncated or changed; the error names it.
        """
        for shard in self.splits[split]:
            (verify_shard if whole else verify_length)(self.root, shard)
            path, seen = self.root / shard.file, 0
            for batch in _read_shard(path, columns, rows):
                seen += batch.num_rows
                yield batch
            if seen != shard.rows:
                raise DataError(
                    f"shard {path} must hold {shard.rows} records, as its manifest says",
                    got=Plain(f"{seen} records"),
                    fix=_MAKE_AGAIN,
                )

    def first_rows(self, columns: Sequence[str]) -> pa.RecordBatch:
        """Return at most the first `SAMPLE_ROWS` training records, from the sample if it exists.

        Raises:
            DataError: the file to read is missing, truncated or changed, or the split is empty.
        """
        found = next(self._first_batches(columns), None)
        if found is None:
            raise DataError("split 'train' must hold at least one record", got=0)
        return found

    def _first_batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        if self.sample is None:
            return self.batches("train", columns=columns, rows=SAMPLE_ROWS)
        verify_shard(self.root, self.sample)
        return _read_shard(self.root / self.sample.file, columns, SAMPLE_ROWS)

    def table(self, split: str, *, columns: Sequence[str] | None = None) -> pa.Table:
        """Read a whole split into memory, with the checks of `batches`."""
        names = [column.name for column in self.columns] if columns is None else list(columns)
        batches = list(self.batches(split, columns=names))
        if not batches:
            raise DataError(f"split {split!r} must hold at least one record", got=0)
        return pa.Table.from_batches(batches)


def verify_shard(root: Path, shard: Shard) -> None:
    """Check one shard's length and hash, and its index.

    Raises:
        DataError: the shard is missing, truncated or changed.
    """
    verify_index(root, shard)
    verify_length(root, shard)
    path = root / shard.file
    if sha256_file(path) != shard.sha256:
        raise DataError(
            f"shard {path} must have the hash in its manifest",
            got=Plain("different content: it was changed or damaged after ingest"),
            fix=_MAKE_AGAIN,
        )


_MAKE_AGAIN = "Run `stoker ingest` again; it writes the shard again from the source."


def verify_length(root: Path, shard: Shard) -> None:
    """Check that one shard exists and has the length in its manifest.

    Raises:
        DataError: the shard is missing or truncated.
    """
    path = root / shard.file
    if not path.is_file():
        raise DataError(f"shard {path} must exist", got=Plain("no such file"), fix=_MAKE_AGAIN)
    size = path.stat().st_size
    if size != shard.size_bytes:
        raise DataError(
            f"shard {path} must be {shard.size_bytes} bytes long, as its manifest says",
            got=Plain(f"{size} bytes"),
            fix=_MAKE_AGAIN,
        )


def verify_once(root: Path, shard: Shard) -> None:
    """Check a shard, unless this process has checked it since the file was last written.

    Consecutive stages that read the same shards hash them only once. The page checksums are checked at
    every read.

    Raises:
        DataError: the shard is missing, truncated or changed.
    """
    path = root / shard.file
    if path.is_file() and (_status(path), shard.sha256) in _verified:
        return
    status = _status(path) if path.is_file() else None
    verify_shard(root, shard)
    if len(_verified) >= _MAX_VERIFIED:
        _verified.clear()
    _verified.add((status, shard.sha256))


_verified: set[tuple[tuple[object, ...] | None, str]] = set()
"""Status and hash of files that passed `verify_once`."""

_MAX_VERIFIED = 100_000
"""Maximum number of files in `_verified`; then it is emptied."""


def _status(path: Path) -> tuple[object, ...]:
    """Return path, inode, size and times; they change whenever a file is written or replaced."""
    found = path.stat()
    return str(path), found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def verify_index(root: Path, shard: Shard) -> None:
    """Check the index of a shard's images, if it has one.

    Raises:
        DataError: the index is missing or changed.
    """
    if shard.index is None:
        return
    path = root / shard.index
    if not path.is_file() or sha256_file(path) != shard.index_sha256:
        raise DataError(
            f"{path} must have the hash in its manifest",
            got=Plain("different content" if path.is_file() else "no such file"),
            fix=_MAKE_AGAIN,
        )


def write_manifest(dataset: Dataset) -> None:
    """Write `manifest.json`; call it last, when every shard is on the disk."""
    write_json(dataset.root / MANIFEST, _to_json(dataset))


def one_shard(path: Path, split: str, *, rows: int, columns: Sequence[Column]) -> Dataset:
    """Return a dataset of one Parquet file as its only split, without column hashes."""
    shard = Shard(
        file=path.name, rows=rows, size_bytes=path.stat().st_size, sha256=sha256_file(path)
    )
    return Dataset(
        root=path.parent, columns=tuple(columns), splits={split: (shard,)}, column_hashes={}
    )


def load_dataset(root: Path) -> Dataset:
    """Read a dataset's manifest; the shards are verified when they are read.

    Raises:
        DataError: the manifest is missing or damaged.
    """
    raw = read_json(root / MANIFEST)
    try:
        dataset = _from_json(root, raw)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{root / MANIFEST} must be a manifest",
            got=Plain(f"{type(error).__name__}: {error}"),
            fix="Run `stoker ingest` again.",
        ) from error
    if dataset.fingerprint != raw["fingerprint"]:
        raise DataError(
            f"{root / MANIFEST} must match its own fingerprint",
            got=Plain("a different fingerprint: the file was changed"),
            fix="Run `stoker ingest` again.",
        )
    return dataset


def _read_shard(path: Path, columns: Sequence[str] | None, rows: int) -> Iterator[pa.RecordBatch]:
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield from file.iter_batches(
                batch_size=rows, columns=None if columns is None else list(columns)
            )
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"shard {path} must be an undamaged Parquet file",
            got=Plain(str(error).splitlines()[0]),
            fix=_MAKE_AGAIN,
        ) from error


def _to_json(dataset: Dataset) -> dict[str, Any]:
    return {
        "fingerprint": dataset.fingerprint,
        "columns": [asdict(column) for column in dataset.columns],
        "splits": {
            split: [asdict(shard) for shard in shards] for split, shards in dataset.splits.items()
        },
        "column_hashes": dataset.column_hashes,
        "image": None if dataset.image is None else asdict(dataset.image),
        "image_store": dataset.image_store,
        "sample": None if dataset.sample is None else asdict(dataset.sample),
        "bad_rows": [asdict(row) for row in dataset.bad_rows],
        "copies_dropped": dataset.copies_dropped,
        "warnings": dataset.warnings,
    }


def _from_json(root: Path, raw: dict[str, Any]) -> Dataset:
    return Dataset(
        root=root,
        columns=tuple(Column(**column) for column in raw["columns"]),
        splits={
            split: tuple(Shard(**shard) for shard in shards)
            for split, shards in raw["splits"].items()
        },
        column_hashes=raw["column_hashes"],
        image=None if raw["image"] is None else ImageShape(**raw["image"]),
        image_store=raw["image_store"],
        bad_rows=tuple(BadRow(**row) for row in raw["bad_rows"]),
        copies_dropped=raw.get("copies_dropped", 0),
        warnings=tuple(raw.get("warnings", ())),
        sample=None if raw.get("sample") is None else Shard(**raw["sample"]),
    )
