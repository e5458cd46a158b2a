"""Read JSON Lines: one JSON object per line. Lines are parsed one by one, so that errors name the bad line."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Never

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.data.sources.columns.named_columns import (
    NOTHING,
    NULLS,
    NUMBER,
    TEXT,
    TRUTH,
    WHOLE_NUMBER,
    WIDE_NUMBER,
)
from stoker.data.sources.columns.named_records import NamedFormat
from stoker.data.sources.columns.parsed_block import (
    BlockBuilder,
    Collected,
    ParsedBlock,
    Values,
    values_of,
)
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.files.file_kind import UTF16, Unpacked, kind_of, plain_chunks
from stoker.data.sources.files.listing import SourceFile
from stoker.data.sources.files.text import utf16_chunks

MAX_LINE_BYTES = 16 << 20
"""Maximum length of a line, bytes; parsing needs a few times this memory."""

BLOCK_LINES = 8192
"""Maximum number of lines that are parsed at a time."""

BLOCK_BYTES = 16 << 20
"""Amount of text that is parsed at a time, bytes; a single line may be longer."""

_BOM = b"\xef\xbb\xbf"
_LINE_END = 0x0A
_NESTED, _MIXED = "an object or a list of lists", "a list of values of different types"
_ENDLESS = "a number that does not fit in a 64-bit float"

_KINDS = {int: NUMBER, float: NUMBER, bool: TRUTH, str: TEXT}
_WIDEST = 1 << 63


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lines:
    """Some lines of a file, in order."""

    file: SourceFile
    """The file that contains the lines."""

    first: int
    """Number of the first line, from 1."""

    text: bytes
    """The text of the lines."""

    is_start: bool
    """Whether all lines before them are empty."""

    is_cut: bool
    """Whether the file's gzip data is truncated after these lines."""


def jsonl_files(config: IngestConfig) -> NamedFormat[_Lines]:
    """Return the description of the format JSON Lines."""
    return NamedFormat(
        title="JSON Lines",
        split=_split,
        parse=partial(_parse, types=config.types),
        bytes_of=lambda lines: len(lines.text),
        in_order=True,
    )


def _split(file: SourceFile, path: Path) -> Iterator[_Lines]:
    """Yield a file's lines, in parts of the size that is passed to a worker."""
    kind = kind_of(path)
    if kind not in ("", "gzip", UTF16):
        raise _no_json_lines(file, kind)
    unpacked = Unpacked(path, location=file.location) if kind == "gzip" else None
    chunks = utf16_chunks(path, location=file.location) if kind == UTF16 else plain_chunks(path)
    first, text, is_start = 1, b"", True
    for text, count in _line_blocks(unpacked or chunks, file):
        is_cut = not count and unpacked is not None and unpacked.is_cut
        yield _Lines(file=file, first=first, text=text, is_start=is_start, is_cut=is_cut)
        is_start = is_start and not (text.removeprefix(_BOM) if first == 1 else text).strip()
        first += count
    if is_start:
        raise _no_json_lines(file, "an empty file")


def _line_blocks(chunks: Iterable[bytes], file: SourceFile) -> Iterator[tuple[bytes, int]]:
    """Yield complete lines and their number; at the end, the bytes after the last line end, and 0."""
    collected, ends, lines = bytearray(), np.zeros(0, np.int64), 0
    for chunk in chunks:
        found = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _LINE_END) + len(collected)
        ends = np.concatenate([ends, found])
        collected += chunk
        while count := _block_lines(ends):
            stop = int(ends[count - 1]) + 1
            yield bytes(collected[:stop]), count
            del collected[:stop]
            ends, lines = ends[count:] - stop, lines + count
        if len(collected) - (int(ends[-1]) + 1 if len(ends) else 0) > MAX_LINE_BYTES:
            raise DataError(
                f"every line of {file.location} must end within {MAX_LINE_BYTES >> 20} MiB",
                got=Plain(f"line {lines + len(ends) + 1}, which is longer"),
                fix="Write one JSON object per line.",
            )
    yield bytes(collected), 0


def _block_lines(ends: NDArray[np.int64]) -> int:
    """Return the number of lines for the next block; 0 if there are not yet enough lines.

    Args:
        ends: [lines] position of each line's end.
    """
    sizes = ends[:BLOCK_LINES] - np.arange(min(len(ends), BLOCK_LINES))
    whole = int(np.searchsorted(sizes, BLOCK_BYTES)) + 1
    if whole <= len(sizes):
        return whole
    return BLOCK_LINES if len(ends) >= BLOCK_LINES else 0


def _parse(lines: _Lines, *, types: Mapping[str, object]) -> ParsedBlock:
    """Parse each line into its columns.

    Args:
        lines: Some lines of a file.
        types: The setting `data.types`. A number in a column of strings becomes text with all its digits.
    """
    as_text = frozenset(name for name, override in types.items() if override == "string")
    block, file, is_start = BlockBuilder(lines.file), lines.file, lines.is_start
    *whole, rest = lines.text.split(b"\n")
    number = lines.first - 1
    for number, line in enumerate([*whole, rest] if rest else whole, lines.first):
        text = line.removeprefix(_BOM) if number == 1 else line
        if not text.strip():
            continue
        if is_start and text.lstrip().startswith(b"["):
            raise _no_json_lines(file, "a JSON array")
        is_start = False
        _add_line(block, text, number, as_text)
    if lines.is_cut:
        block.refuse(number + 1, "the gzip data is truncated here, the rest of the file is lost")
    return block.build(_finish)


def _add_line(block: BlockBuilder, line: bytes, number: int, as_text: Collection[str]) -> None:
    record = _record(line)
    if isinstance(record, str):
        block.refuse(number, record)
        return
    row, names = len(block.rows), block.names
    block.rows.append(number)
    for name, value in record.items():
        kinds = names.get(name)
        if kinds is None:
            kinds = names[name] = {}
        is_list = type(value) is list
        given = value if is_list else [value]
        kind = _KINDS.get(type(value)) or _kind_of_list(given) or (NULLS if value else NOTHING)
        if name in as_text and kind in (NUMBER, TRUTH, _MIXED):
            kind, given = _as_text(given)
        if kind:
            collected = kinds.get(kind)
            if collected is None:
                collected = kinds[kind] = Collected([])
            collected.rows.append(row)
            collected.counts.append(len(given) if is_list else -1)
            collected.flat += given


def _record(line: bytes) -> dict[str, Any] | str:
    """Return a line's JSON object, or the reason why it cannot be read."""
    try:
        record = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        return f"byte {error.start + 1} of the line is not UTF-8"
    except RecursionError:
        return "it is nested too deeply"
    except json.JSONDecodeError as error:
        return f"it is not JSON: {error.msg}, at character {error.pos + 1}"
    except ValueError as error:
        return f"it is not JSON that can be read: {error}"
    is_usable = isinstance(record, dict) and record
    return record if is_usable else "it is not a JSON object with at least one key"


def _as_text(values: list[Any]) -> tuple[str, list[Any]]:
    """Return the kind of values of a column of strings, and the values as text: 7.0 becomes "7", like 7."""
    if any(type(value) not in _KINDS for value in values if value is not None):
        return _MIXED, values
    if any(isinstance(value, float) and math.isinf(value) for value in values):
        return _ENDLESS, values
    plain = [int(value) if isinstance(value, bool) else value for value in values]
    return TEXT, [
        value if value is None or isinstance(value, str) else repr(value).removesuffix(".0")
        for value in plain
    ]


def _kind_of_list(given: list[Any]) -> str:
    """Return the kind of a list's values; "" if the list is empty or holds only nulls."""
    types = set(map(type, given)) - {type(None)}
    kinds = {_KINDS.get(each, _NESTED) for each in types}
    return kinds.pop() if len(kinds) < 2 and kinds else _MIXED if kinds else ""


def _finish(kind: str, collected: Collected) -> list[Values]:
    if kind == NUMBER:
        if float not in set(map(type, collected.flat)):
            if _fits(collected.flat):
                return [values_of(WHOLE_NUMBER, collected, pa.array(collected.flat, pa.int64()))]
            texts = [None if number is None else str(number) for number in collected.flat]
            return [values_of(WIDE_NUMBER, collected, pa.array(texts, pa.string()))]
        return [values_of(NUMBER, collected, pa.array(_floats(collected.flat), from_pandas=True))]
    if kind == TEXT:
        return [values_of(TEXT, collected, _texts(collected.flat))]
    if kind == TRUTH:
        flat = pa.array(collected.flat, pa.bool_()).cast(pa.int64())
        return [values_of(TRUTH, collected, flat)]
    return [values_of(kind, collected, pa.nulls(len(collected.flat)))]


def _fits(numbers: list[int | None]) -> bool:
    present = [number for number in numbers if number is not None]
    return not present or (min(present) >= -_WIDEST and max(present) < _WIDEST)


def _floats(numbers: list[float | None]) -> NDArray[np.float64]:
    try:
        found = np.array(numbers, np.float64)  # None becomes NaN
    except OverflowError:
        widest = int(sys.float_info.max)
        kept = [None if n is None else max(-widest, min(widest, n)) for n in numbers]
        found = np.array(kept, np.float64)
    # JSON has no infinity: 1e999 becomes the largest float64, which is later refused as too large for float32.
    return np.nan_to_num(found, nan=np.nan)


def _texts(texts: list[str | None]) -> pa.Array:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        # Half of a pair of \u escapes is not a character; it is kept as bytes, and later refused as not UTF-8.
        encoded = [None if t is None else t.encode("utf-8", "surrogatepass") for t in texts]
        return pa.array(encoded, pa.binary())


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} occurs twice")
    return found


def _constant(text: str) -> Never:
    raise ValueError(f"{text} is not a JSON value; use null for a missing number")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _no_json_lines(file: SourceFile, got: str) -> DataError:
    return DataError(
        f"{file.location} must hold one JSON object per line",
        got=Plain(got),
        fix="Convert the file, set data.format to its format, or remove it from the source.",
    )
