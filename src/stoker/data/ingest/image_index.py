"""The index of a shard: position, length, CRC32C and size of each image, for random access.

Images in a shard are neither compressed nor dictionary-encoded. So in Parquet's PLAIN encoding, the bytes of
an image are contiguous, and can be read without decoding a page. The index is a file next to the shard. It is
built from the written shard, so that it describes what is on the disk.

Source: the Parquet format, "Plain" encoding: a BYTE_ARRAY is its length, 4 bytes little-endian, and
then its bytes.
"""

from __future__ import annotations

import io
import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.core.files import write_atomic
from stoker.data.columns import Column
from stoker.data.dataset import Shard, verify_index
from stoker.data.ingest.image_store import is_raw, raw_size
from stoker.data.sources.images.headers import BadImage, orientation, read_header

INDEX_ROW = np.dtype(
    [
        ("offset", "<i8"),
        ("length", "<i8"),
        ("crc32c", "<u4"),
        ("height", "<i4"),
        ("width", "<i4"),
        ("orientation", "<i4"),
    ]
)
"""One image: position of its first byte in the file, number of its bytes, their CRC32C, height and width of the
upright image in pixels, and its Exif orientation, 1 to 8."""

_PAGE_HEADER_BYTES = 4096
"""Maximum size of a page's header, bytes: the first value of a page begins after it. A header takes about 50."""

_LENGTH_BYTES = 4
_PROBE_BYTES = 64
"""Number of a value's first bytes that are searched for; where they are found, the whole value is compared."""


def write_image_index(path: Path, columns: Sequence[Column]) -> Path:
    """Find every image of a written shard, and write the index next to it.

    Args:
        path: The shard, completely written.
        columns: The shard's image columns.

    Returns:
        Path of the index: a NumPy file of `INDEX_ROW`, [columns, rows].

    Raises:
        DataError: the bytes of an image are not contiguous in the file.
    """
    with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        found = [
            np.array(list(_located(whole, path, column.name)), INDEX_ROW) for column in columns
        ]
    content = io.BytesIO()
    np.save(content, np.stack(found), allow_pickle=False)
    index = path.with_suffix(".index.npy")
    write_atomic(index, content.getvalue())
    return index


def read_image_index(root: Path, shard: Shard) -> NDArray[np.void]:
    """Read the index of one shard, and check its hash and number of rows.

    Returns:
        `INDEX_ROW`, [image columns, rows].

    Raises:
        DataError: the index is missing or changed.
    """
    if shard.index is None:
        raise DataError(f"shard {root / shard.file} must hold images", got=Plain("none"))
    verify_index(root, shard)
    path = root / shard.index
    found: NDArray[np.void] = np.load(path, allow_pickle=False)
    if found.dtype != INDEX_ROW or found.ndim != 2 or found.shape[1] != shard.rows:
        raise DataError(
            f"{path} must hold {shard.rows} rows of {INDEX_ROW}",
            got=Plain(f"{found.shape} of {found.dtype}"),
            fix="Run `stoker ingest` again.",
        )
    return found


def _located(whole: mmap.mmap, path: Path, column: str) -> Iterator[tuple[int, ...]]:
    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        leaf = file.schema_arrow.names.index(column)
        for group in range(file.num_row_groups):
            at = file.metadata.row_group(group).column(leaf).data_page_offset
            for value in _values(file.read_row_group(group, columns=[column]).column(0)):
                at = _found(whole, value, at, path)
                yield at, len(value), google_crc32c.value(value), *_size(value)
                at += len(value)


def _values(column: pa.ChunkedArray) -> Iterator[bytes]:
    for chunk in column.chunks:
        for value in chunk:
            yield value.as_py()


def _found(whole: mmap.mmap, value: bytes, at: int, path: Path) -> int:
    """Return where a value begins: directly after the previous value, or after the next page's header."""
    start = len(value).to_bytes(_LENGTH_BYTES, "little") + value[:_PROBE_BYTES]
    place = whole.find(start, at, at + _PAGE_HEADER_BYTES + len(start))
    while place >= 0:
        first = place + _LENGTH_BYTES
        if whole[first : first + len(value)] == value:
            return first
        place = whole.find(start, place + 1, at + _PAGE_HEADER_BYTES + len(start))
    raise DataError(
        f"shard {path} must hold each image's bytes contiguously",
        got=Plain(f"no such {len(value)} bytes after byte {at}"),
        fix="Run `stoker ingest` again; if it happens again, the disk is damaged.",
    )


def _size(value: bytes) -> tuple[int, int, int]:
    """Return height, width, orientation; 0, 0, 1 for an image whose header cannot be read."""
    if is_raw(value):
        return *raw_size(value), 1
    try:
        header = read_header(value)
    except BadImage:
        return 0, 0, 1
    return header.height, header.width, orientation(value)
