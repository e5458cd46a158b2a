"""Inspects a source for `stoker init`: how to read it, and which column is the label."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, DataError, Plain
from stoker.data.columns import Column, to_numpy
from stoker.data.ingest import (
    ColumnDescription,
    ImagesConfig,
    IngestConfig,
    SourceDescription,
)
from stoker.data.sources.files.listing import SourceFile
from stoker.data.sources.files.text import text_chunks
from stoker.data.sources.images.headers import BadImage, ImageHeader, read_header
from stoker.data.sources.records import silent
from stoker.data.sources.source import list_source, open_source
from stoker.scaffold.spelling import python_text

TaskKind = Literal["binary", "multiclass", "regression"]
Form = Literal["text", "counted", "as text", "by vocabulary", "quantity"]

LABEL_NAMES = (
    *("label", "labels", "target", "class", "y", "outcome", "species", "diagnosis"),
    *("survived", "churn", "fraud", "is_fraud", "category", "response", "quality", "price"),
)
"""Usual names of labels in public data sets; the first are the most certain."""

MAX_CLASSES = 20
"""A column of numbers with more distinct values than this is a quantity, not a class."""

ROWS_PER_CLASS = 5
"""Minimum number of rows per distinct value, on average, of a column whose values are classes."""

LARGEST_IMAGE = 224
"""Maximum length of the longer side of resized images, pixels: the usual input of image models."""

_HEADER_BYTES = 1 << 16
"""Number of bytes to read first, enough for the header of nearly every image."""

_DELIMITERS = ",;\t|"


@dataclass(frozen=True, kw_only=True, slots=True)
class Label:
    """The column that the model predicts."""

    name: str
    """Name of the column, spelled as in the data's header."""

    task: TaskKind
    """Kind of the model's answer."""

    why: str
    """Why this column was chosen, a clause."""

    form: Form
    """How its values become classes. `text`: each text is a class. `counted`: the numbers 0, 1, 2... are classes
    already. `as text`: other numbers, read as text. `by vocabulary`: other numbers of which some are missing; they
    are numbered by a vocabulary, because "NA" read as text would be a class. `quantity`: a number that a
    regression predicts."""

    classes: int = 0
    """Number of classes; 0 for a regression."""

    missing: int = 0
    """Number of records without a label."""

    scale: float = 1.0
    """Standard deviation of a regression's label."""

    offset: float = 0.0
    """Mean of a regression's label."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnMeasure:
    """Statistics of a column of numbers, without missing values."""

    mean: float
    """Mean of the finite values."""

    deviation: float
    """Standard deviation of the finite values."""

    values: tuple[float, ...]
    """The distinct values in ascending order; empty if there are too many."""


def read_settings(source: str) -> IngestConfig:
    """Return the settings with which to read a source: its delimiter, or the size of its images.

    Args:
        source: An absolute path, or a URI.

    Raises:
        DataError: the source does not exist or cannot be read.
        ConfigError: the format of the files is unknown.
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


def measure_column(config: IngestConfig, column: Column, *, most: int) -> ColumnMeasure:
    """Read one column of numbers and return its statistics.

    Args:
        config: How to read the source.
        column: The column; missing values are left out.
        most: Maximum number of distinct values to keep.

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
        new = len(values)
        if new:
            mean = float(values.mean())
            shift = mean - total / count if count else 0.0
            squares += float(np.square(values - mean).sum())
            squares += shift * shift * count * new / (count + new)
            count, total = count + new, total + float(values.sum())
    if not count:
        raise DataError(f"column {column.name!r} must have at least one number", got=Plain("none"))
    kept = tuple(sorted(distinct)) if len(distinct) <= most else ()
    return ColumnMeasure(mean=total / count, deviation=math.sqrt(squares / count), values=kept)


def _delimiter(file: SourceFile) -> str:
    with file.opened() as path:
        head = next(text_chunks(path, location=file.location), b"")
    header = head.decode("utf-8", "replace").partition("\n")[0]
    return max(_DELIMITERS, key=lambda mark: (mark == "," and mark in header, header.count(mark)))


def _common_size(files: Sequence[SourceFile]) -> tuple[int, int] | None:
    """Return the size to which to resize images; None if all have the same size and it is small enough."""
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


def find_label(seen: SourceDescription, config: IngestConfig, wanted: str | None) -> Label:
    """Find the label: the requested column or a guess, and the kind of its values.

    Raises:
        ConfigError: the requested column does not exist or cannot be a label, or no column can be one.
    """
    column, why = _chosen(seen, wanted)
    name, distinct = column.column.name, _present(column)
    reason = _why_impossible(column)
    if reason:
        raise ConfigError(
            f"column {name!r} must be usable as the label",
            got=Plain(reason),
            fix="Name another column with --label.",
        )
    if column.column.dtype == "string":
        assert distinct is not None
        task: TaskKind = "binary" if distinct == 2 else "multiclass"
        return Label(
            name=name, task=task, why=why, form="text", classes=distinct, missing=column.missing
        )
    return _label_of_numbers(column, config, rows=seen.rows, why=why)


def _chosen(seen: SourceDescription, wanted: str | None) -> tuple[ColumnDescription, str]:
    by_name = {column.column.name: column for column in seen.columns}
    if wanted is not None:
        if wanted not in by_name:
            raise ConfigError(
                "--label must name a column of the data", got=wanted, fix=nearest(wanted, by_name)
            )
        return by_name[wanted], "given by --label"
    usable = [column for column in seen.columns if not _why_unlikely(column, seen.rows)]
    skipped = ""
    for known in LABEL_NAMES:
        for column in seen.columns:
            if column.column.name.strip().lower() == known:
                if column in usable:
                    return column, f"by its name{skipped}"
                name, reason = python_text(column.column.name), _why_unlikely(column, seen.rows)
                skipped += f"; {name} is not taken: {reason}"
    if not usable:
        raise ConfigError(
            "at least one column must be usable as the label: numbers, or text with few different values",
            got=Plain(f"columns {', '.join(by_name)}"),
            fix="Name the label's column with --label.",
        )
    which = "" if usable[-1] is seen.columns[-1] else " that can be one"
    return usable[-1], f"as the last column{which}{skipped}"


def _present(column: ColumnDescription) -> int | None:
    """Number of distinct values, not counting missing values; None if there are too many to count."""
    return None if column.distinct is None else column.distinct - (column.missing > 0)


def _why_unlikely(column: ColumnDescription, rows: int) -> str:
    """Return why a column is not guessed as the label; "" if it may be guessed."""
    distinct = _present(column) or 0
    is_rare = column.column.dtype == "string" and distinct > max(2, rows / ROWS_PER_CLASS)
    return _why_impossible(column) or (
        f"{distinct} different texts in {rows} rows" if is_rare else ""
    )


def _why_impossible(column: ColumnDescription) -> str:
    """Return why a column cannot be a label even if requested; "" if it can."""
    distinct = _present(column)
    if column.column.dtype == "image":
        return "a column of images"
    if column.column.is_ragged:
        return "a column of lists of varying length"
    if column.column.length is not None:
        return f"a column of vectors of length {column.column.length}"
    if distinct is None and column.column.dtype == "string":
        return "more than 1000 different texts"
    return f"{distinct} different values" if distinct is not None and distinct < 2 else ""


def _label_of_numbers(
    column: ColumnDescription, config: IngestConfig, *, rows: int, why: str
) -> Label:
    measured = measure_column(config, column.column, most=MAX_CLASSES)
    name, values = column.column.name, measured.values
    if not _are_class_ids(values, rows):
        deviation = measured.deviation or 1.0
        return Label(
            name=name,
            task="regression",
            why=why,
            form="quantity",
            missing=column.missing,
            scale=deviation,
            offset=measured.mean,
        )
    counted = values == tuple(range(len(values)))
    other: Form = "by vocabulary" if column.missing else "as text"
    return Label(
        name=name,
        task="binary" if len(values) == 2 else "multiclass",
        why=why,
        classes=len(values),
        form="counted" if counted else other,
        missing=column.missing,
    )


def _are_class_ids(values: Sequence[float], rows: int) -> bool:
    whole = all(value == int(value) for value in values)
    return whole and len(values) > 1 and (len(values) == 2 or len(values) * ROWS_PER_CLASS <= rows)
