"""JSON Lines: one JSON object a line, each line parsed by itself so that a bad one is named."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Never

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.data.sources.config import IngestConfig
from stoker.data.sources.gathered import Gathered, Gathering, Held, Values, values_of
from stoker.data.sources.listing import Listing, SourceFile
from stoker.data.sources.named_columns import NUMBER, TEXT, TRUTH, WHOLE_NUMBER
from stoker.data.sources.named_records import named_blocks, scan_named
from stoker.data.sources.opening import kind_of, reading
from stoker.data.sources.records import Block, Content, Progress, Scan
from stoker.data.sources.unpacking import Unpacked, plain_chunks
from stoker.data.sources.workers import InThreads, Workers

MAX_LINE_BYTES = 16 << 20
"""Longest line: a few times this is the memory."""

BLOCK_LINES = 8192
"""Most lines that are handed over at a time."""

BLOCK_BYTES = 16 << 20
"""Bytes of lines that are handed over at a time, unless a single line is longer."""

_BOM = b"\xef\xbb\xbf"
_NESTED, _MIXED = "an object or a list of lists", "a list of unlike values"

_KINDS = {int: NUMBER, float: NUMBER, bool: TRUTH, str: TEXT}
_WIDEST = 1 << 63


@dataclass(frozen=True, kw_only=True, slots=True)
class JsonlFiles:
    """One or more JSON Lines files whose objects have the same keys."""

    listing: Listing
    """The files."""

    config: IngestConfig
    """How they are read."""

    labels: Collection[str]
    """The column that a record cannot miss."""

    workers: Workers = field(default_factory=InThreads)
    """What reads them."""

    def scan(self, progress: Progress) -> Scan:
        """Learn each key's kind, length and type from all lines.

        Raises:
            DataError: a file is no JSON Lines, its keys differ from the first's, or a key's values
                differ from line to line.
            ConfigError: `data.types` names a key that is not there.
        """
        return scan_named(
            self._gathered(), self.config, labels=self.labels, in_order=True, progress=progress
        )

    def blocks(self, scan: Scan, content: Content | None = None) -> Iterator[Block]:
        """Every line in its columns' types, or named with what is wrong with it."""
        return named_blocks(self._gathered(), scan, self.config, labels=self.labels)

    def _gathered(self) -> Iterator[Gathered]:
        for file in self.listing.files:
            with file.opened() as path, reading(file.location, "JSON Lines"):
                yield from _gather(file, path)


def _gather(file: SourceFile, path: Path) -> Iterator[Gathered]:
    kind = kind_of(path)
    if kind not in ("", "gzip"):
        raise _no_json_lines(file, kind)
    unpacked = Unpacked(path, location=file.location) if kind == "gzip" else None
    block, size, number, seen = Gathering(file), 0, 0, False
    for number, line in enumerate(_lines(unpacked or plain_chunks(path), file), start=1):
        text = line.removeprefix(_BOM) if number == 1 else line
        if not text.strip():
            continue
        if not seen and text.lstrip().startswith(b"["):
            raise _no_json_lines(file, "a JSON array")
        seen = True
        _take(block, text, number)
        size += len(text)
        if size >= BLOCK_BYTES or len(block.rows) >= BLOCK_LINES:
            yield block.finished(_finish)
            block, size = Gathering(file), 0
    if unpacked is not None and unpacked.is_cut:
        block.refuse(number + 1, "the gzip data is cut: what came after this is lost")
    yield block.finished(_finish)
    if not seen:
        raise _no_json_lines(file, "an empty file")


def _lines(chunks: Iterable[bytes], file: SourceFile) -> Iterator[bytes]:
    rest, number = b"", 0
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        number += len(whole)
        yield from whole
        if len(rest) > MAX_LINE_BYTES:
            raise DataError(
                f"every line of {file.location} must end within {MAX_LINE_BYTES >> 20} MiB",
                got=Plain(f"a longer one in line {number + 1}"),
                fix="Write one JSON object a line.",
            )
    if rest:
        yield rest


def _take(block: Gathering, line: bytes, number: int) -> None:
    try:
        record = _DECODER.decode(line.decode())
    except UnicodeDecodeError as error:
        block.refuse(number, f"byte {error.start + 1} of the line is not UTF-8")
        return
    except RecursionError:
        block.refuse(number, "it is nested too deeply")
        return
    except json.JSONDecodeError as error:
        block.refuse(number, f"it is no JSON: {error.msg}, at character {error.pos + 1}")
        return
    except ValueError as error:
        block.refuse(number, f"it is no JSON that can be read: {error}")
        return
    if not isinstance(record, dict) or not record:
        block.refuse(number, "it is no JSON object with at least one key")
        return
    row, names = len(block.rows), block.names
    block.rows.append(number)
    for name, value in record.items():
        kinds = names.get(name)
        if kinds is None:
            kinds = names[name] = {}
        given = value if type(value) is list else [value]
        kind = _KINDS.get(type(value)) or _kind_of_list(given)
        if kind:
            held = kinds.get(kind)
            if held is None:
                held = kinds[kind] = Held([])
            held.rows.append(row)
            held.counts.append(len(given))
            held.flat += given


def _kind_of_list(given: list[Any]) -> str:
    """What the values of a list are, "" where it has none."""
    types = set(map(type, given)) - {type(None)}
    kinds = {_KINDS.get(each, _NESTED) for each in types}
    return kinds.pop() if len(kinds) < 2 and kinds else _MIXED if kinds else ""


def _finish(kind: str, held: Held) -> list[Values]:
    if kind == NUMBER:
        if float not in set(map(type, held.flat)) and _fits(held.flat):
            return [values_of(WHOLE_NUMBER, held, pa.array(held.flat, pa.int64()))]
        return [values_of(NUMBER, held, pa.array(_floats(held.flat), from_pandas=True))]
    if kind == TEXT:
        return [values_of(TEXT, held, _texts(held.flat))]
    if kind == TRUTH:
        flat = pa.array(held.flat, pa.bool_()).cast(pa.int64())
        return [values_of(TRUTH, held, flat)]
    return [values_of(kind, held, pa.nulls(len(held.flat)))]


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
    # JSON has no infinity: 1e999 is kept so large that it is found not to fit.
    return np.nan_to_num(found, nan=np.nan)


def _texts(texts: list[str | None]) -> pa.Array:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:
        # Half of a pair of \u escapes is no character; as bytes it is found to be no UTF-8.
        encoded = [None if t is None else t.encode("utf-8", "surrogatepass") for t in texts]
        return pa.array(encoded, pa.binary())


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} stands twice")
    return found


def _constant(text: str) -> Never:
    raise ValueError(f"{text} is no JSON value; a missing number is null")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)


def _no_json_lines(file: SourceFile, got: str) -> DataError:
    return DataError(
        f"{file.location} must hold one JSON object a line",
        got=Plain(got),
        fix="Convert the file, name its format in data.format, or take it out of the source.",
    )
