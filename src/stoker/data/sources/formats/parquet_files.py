"""Read Parquet files. Columns have types, so values are scanned only if the type does not decide how to read them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stoker.data.sources.columns.column_typing import ColumnTyping, item_type, plain
from stoker.data.sources.columns.table import (
    check_names,
    check_same_columns,
    kept_names,
    known_types,
)
from stoker.data.sources.columns.text import missing_texts
from stoker.data.sources.columns.vectors import list_cells
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.files.file_kind import reading
from stoker.data.sources.files.listing import Listing, SourceFile, no_record
from stoker.data.sources.images.batches import (
    ImageTally,
    checked_images,
    needs_headers,
    tally_images,
)
from stoker.data.sources.records import (
    WORKERS,
    Block,
    Cells,
    Content,
    Progress,
    RowNumbers,
    Scan,
    block_of,
    require_label,
)
from stoker.data.sources.workers import Workers

BATCH_ROWS = 65_536
"""Maximum number of records of a table that are read at a time."""

BATCH_VALUES = 1 << 22
"""Maximum number of values that are read at a time, if a table has vectors: 32 MiB of float64."""

IMAGE_BATCH_ROWS = 256
"""Number of records that are read at a time, if a column holds images."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetFiles:
    """One or more Parquet files with the same columns."""

    listing: Listing
    """The files."""

    config: IngestConfig
    """How the files are read."""

    labels: Collection[str]
    """The columns in which every record must have a value."""

    workers: Workers
    """The workers that read the files."""

    def scan(self, progress: Progress) -> Scan:
        """Find how each column is read, from the files' types and, if they do not decide it, from the values.

        Raises:
            DataError: a file is damaged, its columns differ from the first file's, or a column has a type
                that cannot be read.
            ConfigError: `data.types` names a column that does not exist, or images differ in size.
        """
        learned, rows = self._schema()
        if not rows:
            raise no_record(self.config.source)
        images = ImageTally()
        self._scan_values(learned, images, progress)
        readings = tuple(each.reading(is_label=each.name in self.labels) for each in learned)
        columns = tuple(
            each.column(how, max_bad=self.config.max_bad_rows)
            for each, how in zip(learned, readings, strict=True)
        )
        if needs_headers(self.config.images):
            for each, how in zip(learned, readings, strict=True):
                if how == "image":
                    each.require_some_image()
        return Scan(
            columns=columns,
            readings=readings,
            rows=rows,
            assumptions=tuple(
                filter(None, (e.assumed(c) for e, c in zip(learned, columns, strict=True)))
            ),
            image=images.shape(self.config.images) if "image" in readings else None,
        )

    def blocks(self, scan: Scan, content: Content | None = None) -> Iterator[Block]:
        """Yield all records in the types of their columns; a record that cannot be read has a fault."""
        learned, _ = self._schema()
        has_image = any(how == "image" for how in scan.readings)
        with ThreadPoolExecutor(WORKERS) as pool:

            def block(part: tuple[SourceFile, int, pa.RecordBatch]) -> Block:
                file, row, batch = part
                return block_of(
                    scan.columns,
                    self._typed(batch, scan, learned, pool),
                    RowNumbers(file=file.name, rows=np.arange(row, row + batch.num_rows)),
                    max_bad_rows=self.config.max_bad_rows,
                    content=content,
                )

            names = [each.name for each in learned] if self.config.columns.exclude else None
            parts = self._numbered(names, images=has_image)
            yield from self.workers.map(block, parts, bytes_of=lambda part: part[2].nbytes)

    def _numbered(
        self, names: Sequence[str] | None, *, images: bool
    ) -> Iterator[tuple[SourceFile, int, pa.RecordBatch]]:
        """Yield each file's batches, each with the number in the file of its first record."""
        for file in self.listing.files:
            row = 1
            for batch in _batches(file, names, images):
                yield file, row, batch
                row += batch.num_rows

    def _schema(self) -> tuple[list[ColumnTyping], int]:
        first, *_ = self.listing.files
        learned: list[ColumnTyping] = []
        rows = 0
        for file in self.listing.files:
            with (
                file.opened() as path,
                reading(file.location, "Parquet"),
                pq.ParquetFile(path) as opened,
            ):
                schema = opened.schema_arrow
                added = opened.metadata.num_rows
            kept = [n for n in schema.names if n not in self.config.columns.exclude]
            if file is first:
                kept = kept_names(self.config, schema.names)
                check_names(kept, location=file.location)
                overrides = known_types(self.config, kept)
                lists = self.config.columns.lists
                learned = [
                    ColumnTyping(name=n, override=overrides.get(n), varies=n in lists) for n in kept
                ]
            names = [each.name for each in learned]
            check_same_columns(names, kept, first=first.name, other=file)
            for each in learned:
                each.note_type(schema.field(each.name).type, file, rows=added)
            rows += added
        return learned, rows

    def _scan_values(
        self, learned: Sequence[ColumnTyping], images: ImageTally, progress: Progress
    ) -> None:
        """Scan the values of columns whose type in the schema does not decide how they are read."""
        by_headers = needs_headers(self.config.images)
        open_ones = [
            each for each in learned if each.is_open or (each.family == "image" and by_headers)
        ]
        missing, rows = missing_texts(self.config.missing_values), 0
        with ThreadPoolExecutor(WORKERS) as pool:
            for file in self.listing.files if open_ones else ():
                names = [each.name for each in open_ones]
                for batch in _batches(file, names, any(e.family == "image" for e in open_ones)):
                    for each in open_ones:
                        values = batch.column(each.name)
                        if each.is_open:
                            each.add_values(values, missing)
                        else:
                            encoded = plain(values).values
                            each.add_images(encoded)
                            tally_images(
                                images, encoded, self.config.images, name=each.name, pool=pool
                            )
                    rows += batch.num_rows
                    progress(rows, None)

    def _typed(
        self,
        batch: pa.RecordBatch,
        scan: Scan,
        learned: Sequence[ColumnTyping],
        pool: ThreadPoolExecutor,
    ) -> list[Cells]:
        missing = missing_texts(self.config.missing_values)
        typed = []
        for column, how, each in zip(scan.columns, scan.readings, learned, strict=True):
            values = batch.column(column.name)
            read_values = partial(
                each.typed, how=how, wide=column.dtype == "float64", missing=missing
            )
            if how == "image":
                channels = None if scan.image is None else scan.image[2]
                read = checked_images(
                    plain(values), self.config.images, channels=channels, pool=pool
                )
            elif column.length is not None:
                read = list_cells(values, length=column.length, read=read_values)
            else:
                read = read_values(values)
            typed.append(require_label(read) if column.name in self.labels else read)
        return typed


def _batches(
    file: SourceFile, names: Sequence[str] | None, images: bool
) -> Iterator[pa.RecordBatch]:
    with (
        file.opened() as path,
        reading(file.location, "Parquet"),
        pq.ParquetFile(path, page_checksum_verification=True) as opened,
    ):
        rows = IMAGE_BATCH_ROWS if images else _batch_rows(opened)
        yield from opened.iter_batches(batch_size=rows, columns=names)


def _batch_rows(opened: pq.ParquetFile) -> int:
    if not any(item_type(kind) is not None for kind in opened.schema_arrow.types):
        return BATCH_ROWS
    file = opened.metadata
    groups = [file.row_group(index) for index in range(file.num_row_groups)]
    values = sum(g.column(index).num_values for g in groups for index in range(file.num_columns))
    return max(1, min(BATCH_ROWS, BATCH_VALUES * file.num_rows // max(values, 1)))
