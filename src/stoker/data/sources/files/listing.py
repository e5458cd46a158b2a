"""The files of a source, in an order that does not depend on the machine or the path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from stoker.core.errors import ConfigError, DataError, Plain
from stoker.data.sources.config import Format, IngestConfig

ENDINGS: dict[str, Format] = {
    **dict.fromkeys((".csv", ".tsv", ".txt", ".csv.gz", ".tsv.gz", ".txt.gz"), "csv"),
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz"), "jsonl"),
    **dict.fromkeys((".parquet", ".pq"), "parquet"),
    **dict.fromkeys((".tfrecord", ".tfrecords", ".tfrec"), "tfrecord"),
    **dict.fromkeys((".tfrecord.gz", ".tfrecords.gz", ".tfrec.gz"), "tfrecord"),
    **dict.fromkeys((".png", ".jpg", ".jpeg", ".webp", ".gif"), "images"),
}
"""Ending of a file's name -> its format."""


class Place(Protocol):
    """The place of a source's files: this machine's disk or an object store."""

    @property
    def is_local(self) -> bool:
        """Whether another process of this machine can open the files too."""

    def opened(self, file: SourceFile) -> AbstractContextManager[Path]:
        """The file's content as a local file, as long as the block lasts."""

    def sha256(self, file: SourceFile) -> str:
        """The SHA-256 of its content, as 64 hexadecimal digits."""

    def statuses(self, files: Sequence[SourceFile]) -> list[tuple[int, int]]:
        """The bytes and the time, in nanoseconds, that each file has now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of a source, in the state in which it was found."""

    location: str
    """Its path or URI for messages, without secrets."""

    name: str
    """Its path relative to the source's folder, with `/`."""

    size_bytes: int
    """Its length, bytes."""

    mtime_ns: int
    """Time of its last modification, nanoseconds."""

    place: Place = field(repr=False, compare=False)
    """The store that fetches it, if necessary."""

    def opened(self) -> AbstractContextManager[Path]:
        """A local file with its content, until the block ends.

        The name of that file has no meaning: use `name` and the first bytes. Do not open a second
        file inside the block: both together may exceed the cache.

        Raises:
            DataError: the file is gone, or has changed meanwhile.
            UserError: it cannot be fetched.
        """
        return self.place.opened(self)

    def sha256(self) -> str:
        """The SHA-256 of its content, as 64 hexadecimal digits; raises as `opened`."""
        return self.place.sha256(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The files of a source, sorted by the bytes of their names."""

    format: Format
    """Their format."""

    files: tuple[SourceFile, ...]
    """The files, at least one; all in one place."""

    empty_classes: tuple[str, ...] = ()
    """Sub-folders without an image: they are not classes, as nothing can be learned from them."""

    def check_unchanged(self) -> None:
        """Check that no file was modified since it was listed.

        Raises:
            DataError: a file was modified, so the data may be a mixture.
        """
        now = self.files[0].place.statuses(self.files)
        for file, status in zip(self.files, now, strict=True):
            if status != (file.size_bytes, file.mtime_ns):
                raise changed(file)


def listed(
    config: IngestConfig,
    files: Sequence[SourceFile],
    *,
    known: Format | None = None,
    empty_classes: Sequence[str] = (),
) -> Listing:
    """Sort files.

    Args:
        config: The source.
        files: The found files, in any order.
        known: Their format, if it follows from the folder instead of their names.
        empty_classes: Sub-folders of classes without a file.

    Raises:
        DataError: `files` is empty.
        ConfigError: the files have several formats, or an unknown one.
    """
    if not files:
        raise DataError(
            f"data.source {config.source} must hold at least one file",
            got=Plain("an empty folder"),
            fix="Name the folder that holds the data.",
        )
    ordered = sorted(files, key=lambda file: os.fsencode(file.name))
    return Listing(
        format=known or _common_format(config, ordered),
        files=tuple(ordered),
        empty_classes=tuple(empty_classes),
    )


def are_classes(config: IngestConfig, names: Sequence[str], folders: Sequence[str]) -> bool:
    """Whether the sub-folders of a folder are classes of images; other entries are refused later.

    Args:
        config: The source.
        names: All entries of the folder.
        folders: Those of them that are folders.
    """
    if config.format != "auto":
        return config.format == "images"
    # A README.txt next to the classes does not make the source a table.
    tables = [
        name
        for name in names
        if format_of(name) not in (None, "images") and not name.endswith(".txt")
    ]
    return bool(folders) and not tables


def is_mark(name: str) -> bool:
    """Whether a name is like `_SUCCESS` or `_metadata`, which Spark and Hadoop write next to data."""
    return name.startswith("_") and format_of(name) is None


def changed(file: SourceFile) -> DataError:
    """The error for a file that has changed since it was listed."""
    return DataError(
        f"{file.location} must not change while it is read",
        got=Plain("a file that was written or removed meanwhile"),
        fix="Run it again when nothing writes there any more.",
    )


def no_match(source: str) -> DataError:
    """The error for a glob without a file."""
    return DataError(
        f"data.source {source} must match at least one file",
        got=Plain("none"),
        fix="Check the bucket or folder, and the pattern.",
    )


def no_record(source: str) -> DataError:
    """The error for files without a single record."""
    return DataError(
        f"data.source {source} must hold at least one record",
        got=Plain("none"),
        fix="Check that it is the right file or folder.",
    )


def not_plain(location: object, what: str) -> DataError:
    """Return the error for an entry of a source that is not a plain file."""
    return DataError(
        f"{location} must be a plain file",
        got=Plain(what),
        fix="Remove it from the source, or name the files by a glob in data.source.",
    )


def no_class(folder: object, what: str) -> DataError:
    """Return the error for an entry next to the folders of the classes."""
    return DataError(
        f"{folder} must hold one sub-folder of images for each class",
        got=Plain(what),
        fix="Move it into the folder of its class, or out of the source.",
    )


def _common_format(config: IngestConfig, files: Sequence[SourceFile]) -> Format:
    if config.format != "auto" and config.format != "images":
        return config.format
    found = {format_of(file.name): file for file in files}
    strange = found.pop(None, None)
    if strange is not None:
        raise ConfigError(
            "the name of a data file must end in .csv, .tsv, .txt, .jsonl, .ndjson, .parquet, .pq, "
            ".tfrecord, .tfrecords or .tfrec, with or without .gz",
            got=strange.name,
            fix="Set data.format, or name the files by a glob in data.source, e.g. data/*.csv.",
        )
    if len(found) > 1:
        raise ConfigError(
            "all files of a source must have one format",
            got=Plain(", ".join(file.name for file in found.values())),
            fix="Name those of one format by a glob in data.source, e.g. data/*.csv.",
        )
    (only,) = found
    if only is None or only == "images" or config.format == "images":
        raise ConfigError(
            "images must be in a folder with one sub-folder for each class",
            got=files[0].location,
            fix="Name the folder above the classes in data.source.",
        )
    return only


def format_of(name: str) -> Format | None:
    """The format according to a file's name; None if the name does not show it."""
    lower = name.lower()
    return next((kind for ending, kind in ENDINGS.items() if lower.endswith(ending)), None)
