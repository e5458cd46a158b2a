"""Read TFRecord files of `tf.train.Example`, plain or compressed, record by record and without TensorFlow.

TensorFlow's own message class would need the import of TensorFlow, which costs five seconds and 400 MB; ingest
does not need TensorFlow for anything else.

Source: tensorflow/core/example/example.proto and feature.proto.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from stoker.core.protobuf_messages import describe_messages, message_classes
from stoker.data.sources.columns.named_columns import IMAGE, TEXT
from stoker.data.sources.columns.named_records import NamedFormat
from stoker.data.sources.columns.parsed_block import (
    BlockBuilder,
    Collected,
    ParsedBlock,
    Values,
    values_of,
)
from stoker.data.sources.files.listing import SourceFile
from stoker.data.sources.formats.framing import Frames, read_frames

INT_LIST, FLOAT_LIST, BYTES = "an int64_list", "a float_list", "bytes that are not text"

_IMAGE_MAGIC = (b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"RIFF", b"BM")

_EXAMPLE = {
    "BytesList": "bytes* value=1",
    "FloatList": "float* value=1",
    "Int64List": "int64* value=1",
    "Feature": "BytesList ?bytes_list=1; FloatList ?float_list=2; Int64List ?int64_list=3",
    "Features": "map<Feature> feature=1",
    "Example": "Features features=1",
}
"""Messages -> their fields. Source: tensorflow/tensorflow, core/example/{example,feature}.proto."""

Example = message_classes(
    describe_messages("tensorflow", _EXAMPLE, file_name="example.proto", oneof="kind"), _EXAMPLE
)[1]["Example"]
"""The message class of `tf.train.Example`, with `FromString`, `features.feature[name]`, `SerializeToString`."""

_NEW: dict[str, Callable[[], Any]] = {
    "int64_list": partial(array, "q"),
    "float_list": partial(array, "f"),
    "bytes_list": list,
}
_FEW = 8
"""For lists of up to this many floats, it is faster to read the values one by one."""

_KINDS_OF_LISTS = {"int64_list": INT_LIST, "float_list": FLOAT_LIST}


def parse_examples(file: SourceFile, frames: Frames) -> ParsedBlock:
    """Parse some records into columns.

    Args:
        file: The file of the records.
        frames: The records; each damaged record becomes a fault of the block.
    """
    block = BlockBuilder(file)
    for damage in frames.damages:
        block.refuse(damage.row, str(damage))
    for payload, number in zip(frames.payloads, frames.rows, strict=True):
        try:
            example = Example.FromString(payload)
        except DecodeError:
            block.refuse(number, "it cannot be parsed as a tf.train.Example")
            continue
        if len(UnknownFieldSet(example)):
            block.refuse(
                number, "it is not a tf.train.Example: it has other fields than `features`"
            )
        elif not example.features.feature:
            block.refuse(number, "it is a tf.train.Example without features")
        else:
            _add_example(block, example, number)
    return block.build(_finish)


def _add_example(block: BlockBuilder, example: Any, number: int) -> None:
    row, names = len(block.rows), block.names
    block.rows.append(number)
    for name, feature in example.features.feature.items():
        kinds = names.get(name)
        if kinds is None:
            kinds = names[name] = {}
        kind = feature.WhichOneof("kind")
        given = getattr(feature, kind or "bytes_list")
        values = given.value
        count = len(values)
        if not count:
            continue
        collected = kinds.get(kind)
        if collected is None:
            collected = kinds[kind] = Collected(_NEW[kind]())
        collected.rows.append(row)
        collected.counts.append(count)
        if kind == "float_list" and count > _FEW:
            _extend(collected.flat, given.SerializeToString(), count)
        else:
            collected.flat.extend(values)


def _extend(flat: array[float], packed: bytes, count: int) -> None:
    """Extract the values from the canonical serialized form of a float list: tag, length, values.

    For long lists, this is many times as fast as to read the values as Python floats.
    """
    size = 4 * count
    start = 1 + max(1, -(-size.bit_length() // 7))
    flat.frombytes(packed[start : start + size])


def _finish(kind: str, collected: Collected) -> Iterable[Values]:
    if kind == "bytes_list":
        return _split(values_of(BYTES, collected, pa.array(collected.flat, pa.binary())))
    dtype = np.int64 if kind == "int64_list" else np.float32
    return [
        values_of(_KINDS_OF_LISTS[kind], collected, pa.array(np.frombuffer(collected.flat, dtype)))
    ]


def _split(values: Values) -> Iterable[Values]:
    """Divide the values of a bytes_list into text, encoded images, and others."""
    if _is_text(values.flat):
        text = values.flat.cast(pa.string())
        return [replace(values, kind=TEXT, flat=text)]
    each = values.flat.to_pylist()
    starts = np.concatenate([[0], np.cumsum(values.counts)[:-1]])
    empty = (values.counts == 1) & np.array([not each[start] for start in starts])
    is_text = np.logical_and.reduceat([_is_one_text(value) for value in each], starts)
    is_image = np.logical_and.reduceat([v.startswith(_IMAGE_MAGIC) for v in each], starts)
    text = values.chosen(is_text & ~empty, kind=TEXT)
    return [
        replace(text, flat=text.flat.cast(pa.string())),
        values.chosen(is_image & ~is_text, kind=IMAGE),
        values.chosen(~is_image & ~is_text, kind=BYTES),
    ]


def _is_text(flat: pa.Array) -> bool:
    try:
        text = flat.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return not pc.any(pc.match_substring(text, "\0")).as_py()


def _is_one_text(value: bytes) -> bool:
    try:
        value.decode()
    except UnicodeDecodeError:
        return False
    return b"\0" not in value


def tfrecord_files() -> NamedFormat[tuple[SourceFile, Frames]]:
    """Return the description of the format TFRecord."""
    return NamedFormat(
        title="TFRecord",
        split=_frames,
        parse=lambda part: parse_examples(*part),
        bytes_of=lambda part: sum(map(len, part[1].payloads)),
        in_order=False,
    )


def _frames(file: SourceFile, path: Path) -> Iterator[tuple[SourceFile, Frames]]:
    for frames in read_frames(path, location=file.location):
        yield file, frames
