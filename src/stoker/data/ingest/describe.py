"""Describe the content of a source for `stoker init --from`; nothing is written."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from stoker.data.columns import Column
from stoker.data.sources.config import Format, IngestConfig
from stoker.data.sources.images.folder import ImageFolder
from stoker.data.sources.records import Assumption, silent
from stoker.data.sources.source import Source, list_source, open_source, workers_for

MAX_DISTINCT = 1000
"""Maximum number of distinct values that are counted; a column with more does not hold categories."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnDescription:
    """One column, and its number of different values."""

    column: Column
    """The column's name and type."""

    distinct: int | None
    """Number of different values; a missing value counts as one. In vectors and lists, the elements are
    counted. None for images, and if there are more than `MAX_DISTINCT` values."""

    missing: int
    """Number of records without a value; for vectors and lists, number of missing elements."""

    lengths: int = 1
    """Number of different lengths of the column's lists; 1 if it does not hold lists of varying length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceDescription:
    """The content of a source."""

    format: Format
    """The format of the source's files."""

    columns: tuple[ColumnDescription, ...]
    """The columns, in the source's order."""

    rows: int
    """Number of valid records."""

    bad: int
    """Number of invalid records."""

    classes: dict[str, int]
    """Class -> number of files, for a folder of images; else empty."""

    assumptions: tuple[Assumption, ...] = ()
    """Assumptions about how columns are read; the user is warned about them."""


def describe_source(config: IngestConfig) -> SourceDescription:
    """Read a whole source and describe its content.

    Args:
        config: The source and how to read it; `max_bad_rows` is ignored, bad records are only counted.

    Raises:
        DataError: a file cannot be read at all.
        ConfigError: the configuration does not fit the data.
    """
    listing = list_source(config)
    with workers_for(config, listing) as workers:
        source = open_source(config, labels=(), listing=listing, workers=workers)
        return _described(source)


def _described(source: Source) -> SourceDescription:
    scan = source.scan(silent)
    counts = [_Values(column) for column in scan.columns]
    rows = bad = 0
    for block in source.blocks(scan):
        for count in counts:
            count.add(block.table.column(count.column.name))
        rows, bad = rows + block.table.num_rows, bad + block.bad
    return SourceDescription(
        format=source.listing.format,
        columns=tuple(count.described() for count in counts),
        rows=rows,
        bad=bad,
        classes=source.classes() if isinstance(source, ImageFolder) else {},
        assumptions=scan.assumptions,
    )


class _Values:
    """Counts the different values of one column, up to `MAX_DISTINCT`, and the missing values."""

    def __init__(self, column: Column) -> None:
        self.column = column
        self._missing = 0
        self._lengths: set[int] = set()
        self._distinct: pa.ChunkedArray | None = None
        self._many = column.dtype == "image"

    def add(self, values: pa.ChunkedArray) -> None:
        if self.column.is_ragged:
            self._lengths.update(pc.unique(pc.list_value_length(values)).to_pylist())
        if self.column.length is not None:
            values = pc.list_flatten(values)
        missing = pc.equal(values, "") if self.column.dtype == "string" else values.is_null()
        self._missing += pc.sum(missing).as_py() or 0
        if self._many:
            return
        found = pa.chunked_array([pc.unique(values)])
        if self._distinct is not None:
            found = pa.chunked_array([*self._distinct.chunks, *found.chunks])
        self._distinct = pa.chunked_array([pc.unique(found)])
        self._many = len(self._distinct) > MAX_DISTINCT

    def described(self) -> ColumnDescription:
        count = None if self._many else len(self._distinct or ())
        return ColumnDescription(
            column=self.column,
            distinct=count,
            missing=self._missing,
            lengths=max(1, len(self._lengths)),
        )
