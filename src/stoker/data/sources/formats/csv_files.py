"""Read CSV files in two passes with bounded memory: one to find the types, one for the records."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.csv
from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.data.columns import Column
from stoker.data.sources.columns.table import (
    bad_names,
    check_names,
    check_same_columns,
    kept_names,
    known_types,
    no_lists,
    stored_column,
)
from stoker.data.sources.columns.text import Tally, assumed_of, clean, missing_texts, read_text
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.files.file_kind import reading
from stoker.data.sources.files.listing import Listing, SourceFile
from stoker.data.sources.files.text import EndMarked, text_chunks, unescaped
from stoker.data.sources.records import (
    SHOWN_FAULTS,
    WORKERS,
    Assumption,
    Block,
    Cells,
    Content,
    Fault,
    Progress,
    Reading,
    RowNumbers,
    Scan,
    block_of,
    require_label,
)
from stoker.data.sources.workers import Workers

BLOCK_BYTES = 16 << 20
"""Amount of text that is parsed at a time, bytes. No record may be longer. Parsing needs a few times this memory."""

HEADER_BYTES = 4 << 20
"""Maximum length of the header line, bytes: a hundred thousand columns with names of forty characters."""

_JSON = re.compile(r"\s*(\[\s*)?\{\s*[\"}]")
"""Beginning of JSON objects. A CSV header cannot begin so, because it has quotes only at the start of a field."""

_LAST = b"\x00end\x00"
"""Value in the additional line at the end; in all other lines, a NUL is followed by two hexadecimal digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chunk:
    """Some records of one file; their values are still bytes."""

    numbers: RowNumbers
    columns: list[pa.Array]


def _size_bytes(chunk: _Chunk) -> int:
    return sum(column.nbytes for column in chunk.columns)


@dataclass(slots=True)
class _Numbering:
    """Assigns numbers to the parsed records of one file; the header is record 0.

    The parser leaves out records with too few or too many fields, and reports them. It may report such a record
    before it returns the records that precede it.
    """

    file: str
    limit: int
    next_row: int = 0
    last_row: int = 0
    faults: list[Fault] = field(default_factory=list)
    left_out: list[int] = field(default_factory=list)
    counted: int = 0
    is_escaped: bool = False

    def leave_out(self, record: pa.csv.InvalidRow) -> str:
        """Note a record that the parser leaves out, because it has the wrong number of fields."""
        row, expected, got = record.number - 1, record.expected_columns, record.actual_columns
        self.left_out.append(row)
        self.last_row = max(self.last_row, row)
        self.counted += 1
        if len(self.faults) < self.limit:
            few = "few" if got < expected else "many"
            reason = f"too {few} fields: {got}, but the header has {expected}"
            self.faults.append(Fault(file=self.file, row=row, column="", reason=reason))
        return "skip"

    def number(self, count: int) -> NDArray[np.int64]:
        """Return the numbers of the next records that were not left out: [count]."""
        candidates = np.arange(self.next_row, self.next_row + count + len(self.left_out))
        rows = np.setdiff1d(candidates, self.left_out, assume_unique=True)[:count]
        if count:
            self.next_row = int(rows[-1]) + 1
            self.last_row = max(self.last_row, int(rows[-1]))
            self.left_out = [row for row in self.left_out if row >= self.next_row]
        return rows

    def take(self) -> tuple[list[Fault], int]:
        """Return the faults of the records that were left out since the last call, and the number of records."""
        taken = self.faults, self.counted
        self.faults, self.counted = [], 0
        return taken


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvFiles:
    """One or more CSV files with the same columns."""

    listing: Listing
    """The files."""

    config: IngestConfig
    """How the files are read."""

    labels: Collection[str]
    """The columns in which every record must have a value."""

    workers: Workers
    """The workers that read the files."""

    def scan(self, progress: Progress) -> Scan:
        """Learn each column's type from all its values.

        Raises:
            DataError: a file is not CSV, its header is unusable, or the files' columns differ.
            ConfigError: `data.types` names a column that does not exist, or `data.columns.lists` is set.
        """
        names = self._names()
        overrides = known_types(self.config, names)
        tallies = [Tally() for _ in names]
        kinds: list[dict[str, str]] = [{} for _ in names]
        missing = missing_texts(self.config.missing_values)
        rows = 0

        def counted(name: str, raw: pa.Array) -> Tally:
            tally = Tally()
            tally.add(clean(raw, overrides.get(name)).values, missing)
            return tally

        with ThreadPoolExecutor(WORKERS) as pool:

            def counted_chunk(chunk: _Chunk) -> tuple[int, list[Tally]]:
                return len(chunk.numbers.rows), list(pool.map(counted, names, chunk.columns))

            for file in self.listing.files:
                of_file = [Tally() for _ in names]
                for count, found in self.workers.map(
                    counted_chunk, self._chunks(file, names), bytes_of=_size_bytes
                ):
                    for tally, each in zip(of_file, found, strict=True):
                        tally.merge(each)
                    rows += count
                    progress(rows, None)
                for tally, seen_in, seen in zip(tallies, of_file, kinds, strict=True):
                    tally.merge(seen_in)
                    if seen_in.present:
                        seen.setdefault(seen_in.kind, file.location)
        readings = tuple(
            tally.settled(overrides.get(name), gaps_end_records=name in self.labels)
            for name, tally in zip(names, tallies, strict=True)
        )
        for name, how, seen in zip(names, readings, kinds, strict=True):
            if how == "string" and name not in overrides and len(seen) > 1:
                raise _two_kinds(name, seen)
        columns = tuple(
            stored_column(name, how, widest=tally.widest)
            for name, how, tally in zip(names, readings, tallies, strict=True)
        )
        assumed = [
            assumed_of(name, how, tally)
            for name, how, tally in zip(names, readings, tallies, strict=True)
            if name not in overrides
        ]
        return Scan(
            columns=columns,
            readings=readings,
            rows=rows,
            image=None,
            assumptions=(*self._index(), *filter(None, assumed)),
        )

    def _index(self) -> Iterator[Assumption]:
        file = self.listing.files[0]
        if "" in self._header(file):
            yield Assumption(
                column="",
                text=f"{file.location}: the first column has no name, like the row numbers that pandas "
                "writes, and is left out. To keep it, give it a name in the header",
            )

    def _header(self, file: SourceFile) -> list[str]:
        return read_header(file, self.config.delimiter)

    def blocks(self, scan: Scan, content: Content | None = None) -> Iterator[Block]:
        """Yield all records in the types of their columns; a record that cannot be read has a fault."""
        missing = missing_texts(self.config.missing_values)

        def typed(column: Column, how: Reading, raw: pa.Array) -> Cells:
            text = clean(raw, self.config.types.get(column.name))
            read = read_text(text, how, missing, wide=column.dtype == "float64")
            return require_label(read) if column.name in self.labels else read

        with ThreadPoolExecutor(WORKERS) as pool:

            def block(chunk: _Chunk) -> Block:
                return block_of(
                    scan.columns,
                    list(pool.map(typed, scan.columns, scan.readings, chunk.columns)),
                    chunk.numbers,
                    max_bad_rows=self.config.max_bad_rows,
                    content=content,
                )

            names = [column.name for column in scan.columns]
            chunks = (chunk for file in self.listing.files for chunk in self._chunks(file, names))
            yield from self.workers.map(block, chunks, bytes_of=_size_bytes)

    def _names(self) -> list[str]:
        for name in self.config.columns.lists:
            raise no_lists(name)
        first, *others = self.listing.files
        names = self._kept(first)
        for other in others:
            check_same_columns(names, self._kept(other), first=first.name, other=other)
        return names

    def _kept(self, file: SourceFile) -> list[str]:
        return kept_names(self.config, [name for name in self._header(file) if name])

    def _chunks(self, file: SourceFile, names: Sequence[str]) -> Iterator[_Chunk]:
        """Yield one file's records, with columns in the order of `names`."""
        header = self._header(file)
        order = [header.index(name) for name in names]
        numbering = _Numbering(file=file.name, limit=self.config.max_bad_rows + SHOWN_FAULTS)
        ended = False
        for batch in _batches(file, len(header), self.config.delimiter, numbering):
            rows = numbering.number(batch.num_rows)
            first = int(batch.num_rows > 0 and rows[0] == 0)
            if first and [column[0].as_py().decode() for column in batch.columns] != header:
                raise bad_names(file.location, Plain("an opening quote without a closing quote"))
            last = batch.num_rows > 0 and batch.column(0)[-1].as_py() == _LAST
            ended, stop = ended or last, batch.num_rows - last
            broken, count = numbering.take()
            columns = [batch.column(index)[first:stop] for index in order]
            if numbering.is_escaped:
                columns = [unescaped(column) for column in columns]
            numbers = RowNumbers(
                file=file.name, rows=rows[first:stop], broken=broken, broken_count=count
            )
            yield _Chunk(numbers=numbers, columns=columns)
        if not ended:
            raise _endless_record(file, numbering.last_row)


def read_header(file: SourceFile, delimiter: str) -> list[str]:
    """Return the names of a CSV file's columns; "" if the first column has none, as pandas' index.

    Raises:
        DataError: the header is missing, or another name is empty, occurs twice or is not UTF-8.
    """
    with file.opened() as path, reading(file.location, "CSV"):
        head = b""
        for chunk in text_chunks(path, location=file.location):
            head += chunk
            if len(head) >= HEADER_BYTES:
                break
    try:
        # The end of `head` may be inside a character; the header ends before it.
        text = head.removeprefix(codecs.BOM_UTF8).decode("utf-8", "surrogateescape")
        _refuse_json(text, file)
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        names = next((names for names in lines if names), [])
    except csv.Error as error:
        raise bad_names(file.location, Plain(str(error))) from None
    index = 1 if len(names) > 1 and not names[0] and all(names[1:]) else 0
    check_names(names[index:], location=file.location)
    others = [other for other in ",;\t|" if len(names) == 1 and other in names[0]]
    if others:
        raise DataError(
            f"the header of {file.location} must be split by data.delimiter",
            got=names[0],
            fix=f"Set data.delimiter to {others[0]!r}.",
        )
    return names


def _refuse_json(text: str, file: SourceFile) -> None:
    if begins := _JSON.match(text):
        raise DataError(
            f"{file.location} must be CSV text with a header",
            got=Plain("a JSON array" if begins[1] else "JSON"),
            fix="Write one object per line, and set data.format: jsonl."
            if begins[1]
            else "If each line is a JSON object, rename the file to .jsonl or set data.format: jsonl.",
        )


def _batches(
    file: SourceFile, width: int, delimiter: str, numbering: _Numbering
) -> Iterator[pa.RecordBatch]:
    """Yield the file's records as bytes; the first is the header, the last is the line of `EndMarked`."""
    last_line = delimiter.encode().join([_LAST] * width)
    # Columns are named by number, so that Arrow returns the header as a record.
    names = [str(index) for index in range(width)]
    with (
        file.opened() as path,
        reading(file.location, "CSV"),
        EndMarked(text_chunks(path, location=file.location), last_line=last_line) as stream,
    ):
        try:
            for batch in pa.csv.open_csv(
                stream,
                # With threads, it would not be known which records are left out.
                read_options=pa.csv.ReadOptions(
                    use_threads=False, block_size=BLOCK_BYTES, column_names=names
                ),
                parse_options=pa.csv.ParseOptions(
                    delimiter=delimiter,
                    newlines_in_values=True,
                    invalid_row_handler=numbering.leave_out,
                ),
                convert_options=pa.csv.ConvertOptions(
                    column_types=dict.fromkeys(names, pa.binary())
                ),
            ):
                numbering.is_escaped = stream.is_escaped
                yield batch
        except pa.ArrowInvalid as error:
            if "straddling" in str(error):
                raise _endless_record(file, numbering.last_row + 1) from None
            raise


def _two_kinds(name: str, seen: dict[str, str]) -> DataError:
    return DataError(
        f"column {name!r} must have the same type in all files",
        got=Plain(", ".join(f"{kind} in {where}" for kind, where in seen.items())),
        fix=f"Fix the file, or set data.types: {{{name}: string}}.",
    )


def _endless_record(file: SourceFile, row: int) -> DataError:
    return DataError(
        f"every record of {file.location} must end within {BLOCK_BYTES >> 20} MiB",
        got=Plain(
            f"a quote that is never closed, or a longer record, at row {row} or soon after it"
        ),
        fix='Close the quote; a quote inside a quoted value is written twice ("").',
    )
