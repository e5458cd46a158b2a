"""Is this a whole, still WebP? Its container has its length, and libwebp decodes it.

TensorFlow 2.21 decodes no frame of an animated WebP without alpha, and asked for "as many channels
as there are" it writes past the end of its buffer; so animated ones are refused, here and in the
exported graph.

Source: WebP container specification; RFC 6386, section 9.1; WebP lossless specification, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

import cv2

from stoker.data.sources.images.exif import require_upright
from stoker.data.sources.images.header import CUT, BadImage, ImageHeader, demand_decodable

MAGIC = b"RIFF"
KIND = b"WEBP"
"""What stands at byte 8."""

ANIMATED = 0x02
"""Flag in byte 20 of an extended WebP."""

_HEAD_BYTES = 30
_FIRST_CHUNK = 12
_LOSSY_START = b"\x9d\x01\x2a"
_LOSSLESS_START = 0x2F
_SIZE_BITS = 14


def read_webp(data: bytes) -> ImageHeader:
    """Size of a WebP; it is always in colour.

    Raises:
        BadImage: it ends within its header, the header is none, or it is animated.
    """
    if len(data) < _HEAD_BYTES and len(data) < 8 + int.from_bytes(data[4:8], "little"):
        raise BadImage(CUT)
    height, width = _size(data[12:16], data[20:_HEAD_BYTES])
    if not height or not width:
        raise BadImage("has a header that is no WebP header")
    return ImageHeader(height=height, width=width, channels=3)


def check_webp(data: bytes, header: ImageHeader) -> None:
    """Hold that a WebP is whole.

    Raises:
        BadImage: it is cut or damaged, or asks to be turned.
    """
    if len(data) < 8 + int.from_bytes(data[4:8], "little"):
        raise BadImage(CUT)
    pixels = demand_decodable(data, cv2.IMREAD_COLOR)
    if pixels.shape[:2] != (header.height, header.width):
        raise BadImage("is damaged: its frame has another size than its header says")
    for kind, content in _chunks(data):
        if kind == b"EXIF":
            require_upright(content)


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kind and content of each chunk that begins within a whole WebP."""
    at = _FIRST_CHUNK
    while at + 8 <= len(data):
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        yield data[at : at + 4], data[at + 8 : at + 8 + length]
        at += 8 + length + length % 2


def _size(chunk: bytes, content: bytes) -> tuple[int, int]:
    """Height and width, 0 where the header is none."""
    mask = (1 << _SIZE_BITS) - 1
    if chunk == b"VP8X" and len(content) == _HEAD_BYTES - 20:
        if content[0] & ANIMATED:
            raise BadImage("is an animated WebP, which TensorFlow does not decode; save one frame")
        width, height = (int.from_bytes(content[at : at + 3], "little") for at in (4, 7))
        return height + 1, width + 1
    if chunk == b"VP8L" and content[:1] == bytes([_LOSSLESS_START]):
        packed = int.from_bytes(content[1:5], "little")
        return (packed >> _SIZE_BITS & mask) + 1, (packed & mask) + 1
    if chunk == b"VP8 " and content[3:6] == _LOSSY_START:
        width, height = (int.from_bytes(content[at : at + 2], "little") for at in (6, 8))
        return height & mask, width & mask
    return 0, 0
