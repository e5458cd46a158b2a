"""What `stoker init` must know of the data beyond the description of its columns."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker.core.errors import DataError, Plain
from stoker.data.columns import Column, to_numpy
from stoker.data.ingest import ImagesConfig, IngestConfig
from stoker.data.sources.files.listing import SourceFile
from stoker.data.sources.files.text import text_chunks
from stoker.data.sources.images.headers import BadImage, ImageHeader, read_header
from stoker.data.sources.records import silent
from stoker.data.sources.source import list_source, open_source

LARGEST_IMAGE = 224
"""Longest side, in pixels, to which larger images are brought: what image models usually see."""

_HEADER_BYTES = 1 << 16
"""Where nearly every image's header, and every table's, ends."""

_DELIMITERS = ",;\t|"


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """The values of a column of numbers, over the records that have one."""

    mean: float
    """Of the finite ones."""

    deviation: float
    """Standard deviation of the finite ones."""

    values: tuple[float, ...]
    """The different values in order; empty where there are many."""


def reading_of(source: str) -> IngestConfig:
    """How a source is to be read: its delimiter, or the size of its images.

    Args:
        source: An absolute path, or a URI.

    Raises:
        DataError: there is nothing there, or nothing that can be read.
        ConfigError: the files are of no known format.
    """
    plain = IngestConfig(source=source)
    listing = list_source(plain)
    if listing.format == "csv":
        delimiter = _delimiter(listing.files[0])
        return IngestConfig(source=plain.source, delimiter=delimiter)
    if listing.format == "images":
        images = ImagesConfig(size=_common_size(listing.files))
        return IngestConfig(source=plain.source, images=images)
    return plain


def measure(config: IngestConfig, column: Column, *, most: int) -> Spread:
    """Read the values of one column of numbers.

    Args:
        config: How the source is read.
        column: The column; records without a value in it are left out.
        most: Most different values that are kept.

    Raises:
        DataError: no value is a finite number.
    """
    source = open_source(config, labels=(column.name,))
    scan = source.scan(silent)
    stored = next(each for each in scan.columns if each.name == column.name)
    count, total, squares = 0, 0.0, 0.0
    distinct: set[float] = set()
    for block in source.blocks(scan):
        values = to_numpy(stored, block.table.column(column.name)).astype(np.float64)
        values = values[np.isfinite(values)]
        if len(distinct) <= most:
            distinct.update(np.unique(values).tolist())
        added = len(values)
        if added:
            mean = float(values.mean())
            away = mean - total / count if count else 0.0
            squares += float(np.square(values - mean).sum())
            squares += away * away * count * added / (count + added)
            count, total = count + added, total + float(values.sum())
    if not count:
        raise DataError(f"column {column.name!r} must have a number", got=Plain("none"))
    kept = tuple(sorted(distinct)) if len(distinct) <= most else ()
    return Spread(mean=total / count, deviation=math.sqrt(squares / count), values=kept)


def _delimiter(file: SourceFile) -> str:
    with file.opened() as path:
        head = next(text_chunks(path, location=file.location), b"")
    header = head.decode("utf-8", "replace").partition("\n")[0]
    return max(_DELIMITERS, key=lambda mark: (mark == "," and mark in header, header.count(mark)))


def _common_size(files: Sequence[SourceFile]) -> tuple[int, int] | None:
    """The size to bring images to; None where all have one that is small enough already."""
    headers = [header for file in files if (header := _header(file)) is not None]
    sizes = {(header.height, header.width) for header in headers}
    if len(sizes) <= 1 and all(max(size) <= LARGEST_IMAGE for size in sizes):
        return None
    height = statistics.median(header.height for header in headers)
    width = statistics.median(header.width for header in headers)
    shrink = min(1.0, LARGEST_IMAGE / max(height, width))
    return max(1, round(height * shrink)), max(1, round(width * shrink))


def _header(file: SourceFile) -> ImageHeader | None:
    for size in (_HEADER_BYTES, -1):
        try:
            with file.opened() as path, path.open("rb") as stream:
                return read_header(stream.read(size))
        except BadImage:
            continue
    return None
