"""Find the columns of TFRecord and JSON Lines files, and read their records in blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from stoker.data.sources.columns.named_columns import IMAGE, LearnedColumn, NamedColumn
from stoker.data.sources.columns.parsed_block import ParsedBlock
from stoker.data.sources.columns.table import (
    check_names,
    check_same_columns,
    kept_names,
    known_types,
)
from stoker.data.sources.columns.text import missing_texts
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.files.file_kind import reading
from stoker.data.sources.files.listing import Listing, SourceFile
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

Part = TypeVar("Part")


def scan_named(
    blocks: Iterator[ParsedBlock],
    config: IngestConfig,
    *,
    labels: Collection[str],
    in_order: bool,
    progress: Progress,
) -> Scan:
    """Learn each column's kind, length and type from all its values.

    Args:
        blocks: Every record of the source, file by file.
        config: How the source is read.
        labels: The columns that every record must have.
        in_order: Whether columns keep the order that they have in the records; otherwise they are sorted
            by name.
        progress: Called with the number of records done, and None for the unknown total.

    Raises:
        DataError: files differ in their columns, or a column holds values of an unsupported kind.
        ConfigError: `data.types` names a column that does not exist.
    """
    scanner = _Scanner(config, in_order=in_order)
    with ThreadPoolExecutor(WORKERS) as pool:
        for block in blocks:
            scanner.add(block, pool)
            progress(scanner.rows, None)
    scanner.end_file()
    names = kept_names(config, scanner.ordered(scanner.seen))
    known_types(config, names)
    settled = [
        scanner.columns[name].settled(
            rows=scanner.rows, is_label=name in labels, max_bad=config.max_bad_rows
        )
        for name in names
    ]
    assumed = [scanner.columns[each.column.name].assumed(each) for each in settled]
    has_image = any(each.kind == IMAGE for each in settled)
    return Scan(
        columns=tuple(each.column for each in settled),
        readings=tuple(each.how for each in settled),
        kinds=tuple(each.kind for each in settled),
        rows=scanner.rows,
        assumptions=tuple(filter(None, assumed)),
        image=scanner.images.shape(config.images) if has_image else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedFormat(Generic[Part]):
    """A format whose records name their values."""

    title: str
    """Name of the format in messages."""

    split: Callable[[SourceFile, Path], Iterator[Part]]
    """Function that cuts a file, at the path of its local copy, into parts of limited size."""

    parse: Callable[[Part], ParsedBlock]
    """Function that parses one part in a worker; it must be picklable."""

    bytes_of: Callable[[Part], int]
    """Function that returns the memory of a part, bytes."""

    in_order: bool
    """Whether columns keep the order that they have in the records; else they are sorted by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedFiles(Generic[Part]):
    """A source of one or more files in a `NamedFormat`; all files must have the same columns."""

    listing: Listing
    """The files."""

    config: IngestConfig
    """How the files are read."""

    labels: Collection[str]
    """The columns that every record must have."""

    workers: Workers
    """Workers that parse the parts."""

    format: NamedFormat[Part]
    """The format of the files."""

    def scan(self, progress: Progress) -> Scan:
        """Learn each column's kind, length and type from all records.

        Raises:
            DataError: a file has a different format, its columns differ from the first file's, or the
                values of a column are of different kinds.
            ConfigError: `data.types` names a column that does not exist, or images differ in size.
        """
        parsed = self.workers.map(self.format.parse, self._parts(), bytes_of=self.format.bytes_of)
        return scan_named(
            parsed,
            self.config,
            labels=self.labels,
            in_order=self.format.in_order,
            progress=progress,
        )

    def blocks(self, scan: Scan, content: Content | None = None) -> Iterator[Block]:
        """Yield all records in the types of their columns; a record that cannot be read has a fault."""
        reader = NamedReader(
            scan=scan, config=self.config, labels=tuple(self.labels), content=content
        )
        read = functools.partial(_parse_and_read, parse=self.format.parse, reader=reader)
        return self.workers.map(read, self._parts(), bytes_of=self.format.bytes_of)

    def _parts(self) -> Iterator[Part]:
        for file in self.listing.files:
            with file.opened() as path, reading(file.location, self.format.title):
                yield from self.format.split(file, path)


def _parse_and_read(
    part: Part, *, parse: Callable[[Part], ParsedBlock], reader: NamedReader
) -> Block:
    with ThreadPoolExecutor(1) as pool:
        return reader.block(parse(part), pool=pool)


@dataclass(frozen=True, kw_only=True)
class NamedReader:
    """Converts parsed records to the types of their columns; picklable."""

    scan: Scan
    """The result of `scan_named`."""

    config: IngestConfig
    """How the source is read."""

    labels: tuple[str, ...]
    """The columns that every record must have."""

    content: Content | None
    """Function for an additional value of each row, which is computed with each block; None: not computed."""

    def block(self, block: ParsedBlock, *, pool: ThreadPoolExecutor) -> Block:
        """Convert a block's records to the types of their columns; list the faults of bad records.

        Args:
            block: The records.
            pool: Threads that check images.
        """
        return block_of(
            self.scan.columns,
            [self._read(each, block, pool) for each in self._columns],
            RowNumbers(
                file=block.file.name,
                rows=block.rows,
                broken=block.broken,
                broken_count=len(block.broken),
            ),
            max_bad_rows=self.config.max_bad_rows,
            content=self.content,
        )

    @functools.cached_property
    def _columns(self) -> list[NamedColumn]:
        scan, types = self.scan, self.config.types
        return [
            NamedColumn(column=column, how=how, kind=kind, override=types.get(column.name))
            for column, how, kind in zip(scan.columns, scan.readings, scan.kinds, strict=True)
        ]

    def _read(self, each: NamedColumn, block: ParsedBlock, pool: ThreadPoolExecutor) -> Cells:
        cells = each.cells(block, missing_texts(self.config.missing_values))
        if each.how == "image":
            channels = None if self.scan.image is None else self.scan.image[2]
            cells = checked_images(cells, self.config.images, channels=channels, pool=pool)
        return require_label(cells) if each.column.name in self.labels else cells


class _Scanner:
    """Collects what is known about columns and images, block by block."""

    def __init__(self, config: IngestConfig, *, in_order: bool) -> None:
        self.columns: dict[str, LearnedColumn] = {}
        self.seen: dict[str, None] = {}
        self.images = ImageTally()
        self.rows = 0
        self._config = config
        self._in_order = in_order
        self._missing = missing_texts(config.missing_values)
        self._file: ParsedBlock | None = None
        self._names: dict[str, None] = {}
        self._first: tuple[str, Sequence[str]] | None = None

    def add(self, block: ParsedBlock, pool: ThreadPoolExecutor) -> None:
        """Add the next block."""
        if self._file is None or block.file != self._file.file:
            self.end_file()
            self._file, self._names = block, {}
        self.seen.update(dict.fromkeys(block.columns))
        kept = [name for name in block.columns if name not in self._config.columns.exclude]
        self._names.update(dict.fromkeys(kept))
        self.rows += len(block.rows)
        for name in kept:
            column = self.columns.get(name)
            if column is None:
                column = LearnedColumn(
                    name=name,
                    override=self._config.types.get(name),
                    varies=name in self._config.columns.lists,
                )
                self.columns[name] = column
            column.add(block, self._missing)
        if needs_headers(self._config.images):
            self._add_images(block, kept, pool)

    def _add_images(
        self, block: ParsedBlock, kept: Sequence[str], pool: ThreadPoolExecutor
    ) -> None:
        for name in kept:
            for values in block.columns[name]:
                if values.kind == IMAGE:
                    tally_images(
                        self.images, values.flat, self._config.images, name=name, pool=pool
                    )

    def ordered(self, names: Iterable[str]) -> list[str]:
        """Return column names in the records' order, or sorted if that order is random, as in protobuf's maps."""
        return list(names) if self._in_order else sorted(names)

    def end_file(self) -> None:
        """Check that the current file has the columns of the first file; files without records are skipped."""
        if self._file is None or not self._names:
            return
        file, names = self._file.file, self.ordered(self._names)
        check_names(names, location=file.location)
        if self._first is None:
            self._first = file.name, names
        check_same_columns(self._first[1], names, first=self._first[0], other=file)
