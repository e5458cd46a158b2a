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
"""Ending of a file's name -> the file's format."""


class Place(Protocol):
    """Where a source's files are: on this machine's disk or in an object store."""

    @property
    def is_local(self) -> bool:
        """Whether other processes on this machine can open the files, too."""

    def opened(self, file: SourceFile) -> AbstractContextManager[Path]:
        """Provide the file's content as a local file until the end of the `with` block."""

    def sha256(self, file: SourceFile) -> str:
        """Return the SHA-256 of the file's content, as 64 hexadecimal digits."""

    def statuses(self, files: Sequence[SourceFile]) -> list[tuple[int, int]]:
        """Return the current size, bytes, and modification time, ns, of each file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFile:
    """One file of a source, as it was when the source was listed."""

    location: str
    """Path or URI of the file for messages, without secrets."""

    name: str
    """Path of the file relative to the source's folder, with `/` as separator."""

    size_bytes: int
    """Size of the file, bytes."""

    mtime_ns: int
    """Time of the file's last modification, nanoseconds."""

    place: Place = field(repr=False, compare=False)
    """Where the file is; downloads it if necessary."""

    def opened(self) -> AbstractContextManager[Path]:
        """Provide the file's content as a local file until the end of the `with` block.

        The name of the local file has no meaning: use `name` and the first bytes. Do not open a second file
        inside the block, because both together may exceed the cache.

        Raises:
            DataError: the file was removed or changed since it was listed.
            UserError: the file cannot be downloaded.
        """
        return self.place.opened(self)

    def sha256(self) -> str:
        """Return the SHA-256 of the file's content, as 64 hexadecimal digits; raises the errors of `opened`."""
        return self.place.sha256(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The files of a source, sorted by the bytes of their names."""

    format: Format
    """The format of all files."""

    files: tuple[SourceFile, ...]
    """The files, at least one; all have the same `place`."""

    empty_classes: tuple[str, ...] = ()
    """Sub-folders without an image; they are not classes, because nothing can be learned about them."""

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
    """Make a listing: sort the files, and find their format.

    Args:
        config: The source.
        files: The found files, in any order.
        known: The files' format, if it is known from the folder; None: it is found by their names.
        empty_classes: Sub-folders for classes in which no file was found.

    Raises:
        DataError: `files` is empty.
        ConfigError: the files have different formats, or an unknown format.
    """
    if not files:
        raise DataError(
            f"data.source {config.source} must hold at least one file",
            got=Plain("an empty folder"),
            fix="Set data.source to the folder that holds the data.",
        )
    ordered = sorted(files, key=lambda file: os.fsencode(file.name))
    return Listing(
        format=known or _common_format(config, ordered),
        files=tuple(ordered),
        empty_classes=tuple(empty_classes),
    )


def are_classes(config: IngestConfig, names: Sequence[str], folders: Sequence[str]) -> bool:
    """Return whether the sub-folders of a folder are classes of images.

    Args:
        config: The source.
        names: All entries of the folder.
        folders: The entries that are folders.
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
    """Return whether a file is a mark such as `_SUCCESS` or `_metadata`, which Spark and Hadoop write next to data."""
    return name.startswith("_") and format_of(name) is None


def changed(file: SourceFile) -> DataError:
    """Return the error for a file that has changed since it was listed."""
    return DataError(
        f"{file.location} must not change while it is read",
        got=Plain("a file that was changed or removed"),
        fix="Run the command again when no program writes to the source.",
    )


def no_match(source: str) -> DataError:
    """Return the error for a glob that matches no file."""
    return DataError(
        f"data.source {source} must match at least one file",
        got=Plain("none"),
        fix="Check the bucket or folder, and the pattern.",
    )


def no_record(source: str) -> DataError:
    """Return the error for a source without records."""
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
        fix="Remove it from the source, or set data.source to a glob that matches only the data files.",
    )


def no_class(folder: object, what: str) -> DataError:
    """Return the error for an entry that is next to the sub-folders of the classes."""
    return DataError(
        f"{folder} must hold only a sub-folder of images for each class",
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
            fix="Set data.format, or set data.source to a glob that matches only the data files, such as "
            "data/*.csv.",
        )
    if len(found) > 1:
        raise ConfigError(
            "all files of a source must have the same format",
            got=Plain(", ".join(file.name for file in found.values())),
            fix="Set data.source to a glob that matches the files of one format, such as data/*.csv.",
        )
    (only,) = found
    if only is None or only == "images" or config.format == "images":
        raise ConfigError(
            "images must be in a folder with a sub-folder for each class",
            got=files[0].location,
            fix="Set data.source to the folder that holds the sub-folders of the classes.",
        )
    return only


def format_of(name: str) -> Format | None:
    """Return the format that a file's name shows; None if it shows none."""
    lower = name.lower()
    return next((kind for ending, kind in ENDINGS.items() if lower.endswith(ending)), None)
