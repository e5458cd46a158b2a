"""Is this a whole PNG? Every chunk's checksum is right and its pixel data has the right length.

Source: PNG specification (third edition), chapters 5 and 7.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import cv2
import numpy as np

from stoker.data.sources.images.exif import require_upright
from stoker.data.sources.images.header import CUT, BadImage, ImageHeader, demand_decodable

MAGIC = b"\x89PNG\r\n\x1a\n"

_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 1, 6: 3}
"""PNG colour type -> channels without alpha."""

_SAMPLES = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}

_ADAM7 = (
    (0, 0, 8, 8),
    (4, 0, 8, 8),
    (0, 4, 4, 8),
    (2, 0, 4, 4),
    (0, 2, 2, 4),
    (1, 0, 2, 2),
    (0, 1, 1, 2),
)
"""x and y of the first pixel and the steps of each pass of an interlaced PNG."""

_UNPACK_BYTES = 1 << 20
"""Pixel data that is unpacked at a time, so that a bomb cannot grow."""


def read_png(data: bytes) -> ImageHeader:
    """Size and channels of a PNG, alpha left out.

    Raises:
        BadImage: it ends within its header, or the header is none.
    """
    if len(data) < 33:
        raise BadImage(CUT)
    length, kind, width, height, depth, color, packing, filtering, interlace = struct.unpack(
        ">I4sIIBBBBB", data[8:29]
    )
    known = length == 13 and kind == b"IHDR" and depth in _DEPTHS.get(color, ())
    if not known or packing or filtering or interlace > 1 or not 0 < width * height < 2**62:
        raise BadImage("has a header that is no PNG header")
    return ImageHeader(height=height, width=width, channels=_CHANNELS[color])


def _chunks(data: bytes) -> Iterator[tuple[bytes, memoryview]]:
    """Kind and content of each chunk up to IEND, each checksum held."""
    view, at = memoryview(data), len(MAGIC)
    while True:
        if at + 12 > len(data):
            raise BadImage(CUT)
        (length,) = struct.unpack_from(">I", data, at)
        end = at + 12 + length
        if end > len(data):
            raise BadImage(CUT)
        (checksum,) = struct.unpack_from(">I", data, end - 4)
        if zlib.crc32(view[at + 4 : end - 4]) != checksum:
            raise BadImage("is damaged: a checksum in it is wrong")
        kind = bytes(view[at + 4 : at + 8])
        yield kind, view[at + 8 : end - 4]
        if kind == b"IEND":
            return
        at = end


def check_png(data: bytes, header: ImageHeader) -> None:
    """Hold that a PNG is whole.

    Raises:
        BadImage: it is cut or damaged, or asks to be turned.
    """
    depth, color, interlaced = data[24], data[25], data[28] == 1
    chunks = list(_chunks(data))
    if color == 3 and not any(kind == b"PLTE" for kind, _ in chunks):
        raise BadImage("is damaged: its palette is missing")
    for kind, content in chunks:
        if kind == b"eXIf":
            require_upright(bytes(content))
    bits = depth * _SAMPLES[color]
    lines = list(
        passes(header, bits) if interlaced else [_lines(header.height, header.width, bits)]
    )
    expected = sum(count * stride for count, stride in lines)
    stride = lines[0][1] if len(lines) == 1 else 0
    found = _unpacked_length(
        [content for kind, content in chunks if kind == b"IDAT"], expected, stride
    )
    if found < expected:
        raise BadImage("is damaged: it has too little pixel data for its size")
    if interlaced:
        demand_decodable(data, cv2.IMREAD_UNCHANGED)


def _lines(height: int, width: int, bits: int) -> tuple[int, int]:
    """Lines and bytes a line, the byte that names the line's filter among them."""
    return height, 1 + (width * bits + 7) // 8


def passes(header: ImageHeader, bits: int) -> Iterator[tuple[int, int]]:
    """Lines and bytes a line of each pass of an interlaced PNG of `bits` a pixel."""
    for x, y, step_x, step_y in _ADAM7:
        width = -(-(header.width - x) // step_x)
        height = -(-(header.height - y) // step_y)
        if width > 0 and height > 0:
            yield _lines(height, width, bits)


def _unpacked_length(parts: list[memoryview], expected: int, stride: int) -> int:
    """Bytes of pixel data, up to `expected`; with a `stride` each line's filter is checked too."""
    unpacker, total = zlib.decompressobj(), 0
    for part in parts:
        rest = bytes(part)
        while rest and total < expected and not unpacker.eof:
            try:
                piece = unpacker.decompress(rest, _UNPACK_BYTES)
            except zlib.error as error:
                raise BadImage("is damaged: its pixel data cannot be unpacked") from error
            rest = unpacker.unconsumed_tail
            if stride and np.any(np.frombuffer(piece, np.uint8)[-total % stride :: stride] > 4):
                raise BadImage("is damaged: a line of it has an unknown filter")
            total += len(piece)
    return total
