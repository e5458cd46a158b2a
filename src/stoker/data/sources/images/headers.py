"""Read size, channels and orientation of an image from its header, without decoding it.

Animated WebP images are refused, here and in the exported graph: TensorFlow 2.21 does not decode a frame of an
animated WebP without alpha, and with channels=0 it writes past the end of its buffer.

In the exported graph, `data/features/image_decoding.py` reads the same Exif bytes by the same rules.

Source: ITU-T T.81, annex B (JPEG); Exif 2.32 (CIPA DC-008), 4.5.4 and 4.6.4; TIFF 6.0, section 2; PNG
specification (third edition), section 11.2; GIF89a specification, section 18; WebP container
specification; RFC 6386, section 9.1; WebP lossless specification, section 3.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

CUT = "is truncated: it ends before its last part"


class BadImage(ValueError):
    """Raised for bytes that cannot be used as an image; the text continues a sentence that begins "the image"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageHeader:
    """Size and channels of an image, from its header; the size is that of the upright image."""

    height: int
    """Height of the upright image, pixels."""

    width: int
    """Width of the upright image, pixels."""

    channels: int
    """1 (gray), 3 (color) or 4 (CMYK)."""


MAX_SEGMENTS = 16
"""Maximum number of JPEG segments that are searched for Exif; by the standard, it is in the first."""

MAX_ENTRIES = 64
"""Maximum number of entries of the first directory that are searched. Entries are sorted by their tags, and cameras
write about 12 with a lower or nearby tag."""

EXIF = b"Exif\x00\x00"
"""First bytes in an Exif segment; a TIFF structure follows."""

ORIENTATION_TAG = 0x0112
SHORT = 3
"""TIFF's type for a 16-bit number."""

TRANSPOSED = 5
"""For this orientation and higher ones, height and width are swapped."""

_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II*\x00": "little", b"MM\x00*": "big"}


def orientation(data: bytes) -> int:
    """Return the Exif orientation of a JPEG.

    Args:
        data: The encoded image, or its beginning up to the frame header.

    Returns:
        1 (upright) to 8; 1 if the image is not a JPEG, or its Exif is missing or damaged.
    """
    return orientation_in(_tiff(data))


def require_upright(exif: bytes) -> None:
    """Check that the Exif of a PNG or WebP does not require a rotation.

    The exported graph rotates only JPEGs.

    Args:
        exif: The content of the Exif chunk: a TIFF structure, before which some programs write `EXIF`.

    Raises:
        BadImage: the Exif requires a rotation.
    """
    orientation = orientation_in(exif.removeprefix(EXIF))
    if orientation != 1:
        raise BadImage(
            f"must be rotated (Exif orientation {orientation}), but only JPEGs are rotated; save it upright"
        )


def orientation_in(tiff: bytes) -> int:
    """Return the orientation in a TIFF structure, 1 to 8; 1 if it is missing or damaged."""
    order = _ORDERS.get(tiff[:4])
    if order is None:
        return 1
    at = int.from_bytes(tiff[4:8], order)
    directory = tiff[at : at + 2 + 12 * MAX_ENTRIES].ljust(2 + 12 * MAX_ENTRIES, b"\x00")
    count = int.from_bytes(directory[:2], order)
    for start in range(2, 2 + 12 * min(count, MAX_ENTRIES), 12):
        tag, kind, values, value = (
            int.from_bytes(directory[start + first : start + end], order)
            for first, end in ((0, 2), (2, 4), (4, 8), (8, 10))
        )
        if tag == ORIENTATION_TAG:
            return value if kind == SHORT and values == 1 and 1 <= value <= 8 else 1
    return 1


def _tiff(data: bytes) -> bytes:
    """Return the TIFF structure in the first Exif segment of a JPEG; b"" without one."""
    at = 2 if data.startswith(b"\xff\xd8\xff") else len(data)
    for _ in range(MAX_SEGMENTS):
        head = data[at : at + 4]
        length = int.from_bytes(head[2:4], "big")
        if len(head) < 4 or head[0] != 0xFF or length < 2 or not _is_note(head[1]):
            return b""
        if head[1] == 0xE1 and data.startswith(EXIF, at + 4):
            return data[at + 4 + len(EXIF) : at + 2 + length]
        at += 2 + length
    return b""


def _is_note(marker: int) -> bool:
    """Return whether a marker is APP0 to APP15 or a comment; only such segments may precede Exif."""
    return marker & 0xF0 == 0xE0 or marker == 0xFE


JPEG = b"\xff\xd8\xff"
PNG = b"\x89PNG\r\n\x1a\n"
GIF = (b"GIF87a", b"GIF89a")
WEBP = b"RIFF"
"""The first bytes of a WebP, and of all RIFF files."""

WEBP_KIND = b"WEBP"
"""The bytes at offset 8 of a WebP; other RIFF files have different bytes there."""

ANIMATED = 0x02
"""Flag in byte 20 of an extended WebP: the image is animated."""

_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 1, 6: 3}
"""PNG color type -> number of channels, without alpha."""

_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
"""PNG color type -> valid numbers of bits per sample."""

_WEBP_HEADER_BYTES = 30
_WEBP_LOSSY_START = b"\x9d\x01\x2a"
_WEBP_LOSSLESS_START = b"\x2f"
_WEBP_SIZE_BITS = 14


def read_png(data: bytes) -> ImageHeader:
    """Return size and channels of a PNG; alpha does not count as a channel.

    Raises:
        BadImage: the header is truncated or invalid.
    """
    if len(data) < 33:
        raise BadImage(CUT)
    length, kind, width, height, depth, color, packing, filtering, interlace = struct.unpack(
        ">I4sIIBBBBB", data[8:29]
    )
    known = length == 13 and kind == b"IHDR" and depth in _PNG_DEPTHS.get(color, ())
    if not known or packing or filtering or interlace > 1 or not 0 < width * height < 2**62:
        raise BadImage("has an invalid PNG header")
    return ImageHeader(height=height, width=width, channels=_PNG_CHANNELS[color])


def read_gif(data: bytes) -> ImageHeader:
    """Return the size of a GIF; it always counts as color.

    Raises:
        BadImage: the header is truncated, or the image has no pixels.
    """
    if len(data) < 13:
        raise BadImage(CUT)
    width, height = struct.unpack_from("<HH", data, 6)
    if not width or not height:
        raise BadImage(f"has {width} x {height} pixels")
    return ImageHeader(height=height, width=width, channels=3)


def read_webp(data: bytes) -> ImageHeader:
    """Return the size of a WebP; it always counts as color.

    Raises:
        BadImage: the header is truncated or invalid, or the image is animated.
    """
    if len(data) < min(_WEBP_HEADER_BYTES, webp_bytes(data)):
        raise BadImage(CUT)
    height, width = _webp_size(data[12:16], data[20:_WEBP_HEADER_BYTES])
    if not height or not width:
        raise BadImage("has an invalid WebP header")
    return ImageHeader(height=height, width=width, channels=3)


def webp_bytes(data: bytes) -> int:
    """Return the length of a WebP according to its header."""
    return 8 + int.from_bytes(data[4:8], "little")


def _webp_size(chunk: bytes, content: bytes) -> tuple[int, int]:
    """Return height and width; 0, 0 if the header is invalid."""
    mask = (1 << _WEBP_SIZE_BITS) - 1
    if chunk == b"VP8X" and len(content) == _WEBP_HEADER_BYTES - 20:
        if content[0] & ANIMATED:
            raise BadImage("is an animated WebP, which TensorFlow does not decode; save one frame")
        width, height = (int.from_bytes(content[at : at + 3], "little") for at in (4, 7))
        return height + 1, width + 1
    if chunk == b"VP8L" and content[:1] == _WEBP_LOSSLESS_START:
        packed = int.from_bytes(content[1:5], "little")
        return (packed >> _WEBP_SIZE_BITS & mask) + 1, (packed & mask) + 1
    if chunk == b"VP8 " and content[3:6] == _WEBP_LOSSY_START:
        width, height = (int.from_bytes(content[at : at + 2], "little") for at in (6, 8))
        return height & mask, width & mask
    return 0, 0


_EOI, SOS = 0xD9, 0xDA
FRAMES = (0xC0, 0xC1, 0xC2)
_NO_FRAMES = (0xC4, 0xC8, 0xCC)
_ENDS_A_SCAN = np.ones(256, np.bool_)
_ENDS_A_SCAN[[0x00, *range(0xD0, 0xD8), 0xFF]] = False
"""Byte after FF -> whether both bytes are a marker that ends coded data. In coded data, FF is followed by 00 (then
it is a plain FF), or belongs to a restart marker."""


_FIRST_WINDOW_BYTES = 256
"""Size of the first window in which coded data is searched. Each further window is eight times as long, so that many
short scans do not cost more than a single long scan."""


def jpeg_segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield marker, start and end of each segment's content of a JPEG; coded data is skipped."""
    at = 2
    while True:
        while data[at : at + 2] == b"\xff\xff":
            at += 1
        if at + 2 > len(data):
            raise BadImage(CUT)
        if data[at] != 0xFF:
            raise BadImage("is damaged: a marker is missing")
        marker = data[at + 1]
        if marker == _EOI:
            return
        if at + 4 > len(data):
            raise BadImage(CUT)
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if end > len(data):
            raise BadImage(CUT)
        yield marker, at + 4, end
        at = _scan_end(data, end) if marker == SOS else end


def _scan_end(data: bytes, start: int) -> int:
    """Return the position of the marker after a scan's coded data."""
    size = _FIRST_WINDOW_BYTES
    while start + 1 < len(data):
        window = np.frombuffer(data, np.uint8, count=min(size, len(data) - start), offset=start)
        places = np.flatnonzero(window[:-1] == 0xFF)
        ends = _ENDS_A_SCAN[window[places + 1]]
        if ends.any():
            return start + int(places[ends.argmax()])
        # The last byte may be the FF of a marker.
        start, size = start + len(window) - 1, size * 8
    raise BadImage(CUT)


def read_jpeg(data: bytes) -> ImageHeader:
    """Return size and channels of a JPEG; the size is that of the upright image.

    Raises:
        BadImage: the image ends within its header, or is of a kind that TensorFlow does not decode.
    """
    for marker, start, end in jpeg_segments(data):
        if marker in FRAMES:
            return _upright(_frame_header(data[start:end]), orientation(data))
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAMES:
            raise BadImage("is a lossless or arithmetic JPEG, which TensorFlow does not decode")
        if marker == SOS:
            break
    raise BadImage("is damaged: it has no frame header")


def _upright(header: ImageHeader, turn: int) -> ImageHeader:
    if turn < TRANSPOSED:
        return header
    return ImageHeader(height=header.width, width=header.height, channels=header.channels)


def _frame_header(frame: bytes) -> ImageHeader:
    if len(frame) < 6:
        raise BadImage("is damaged: its frame header is too short")
    depth, height, width, channels = struct.unpack(">BHHB", frame[:6])
    if depth != 8 or channels not in (1, 3, 4):
        raise BadImage(
            f"is a JPEG of {depth} bits and {channels} channels, which TensorFlow does not decode"
        )
    if not height or not width:
        raise BadImage(f"has {width} x {height} pixels")
    return ImageHeader(height=height, width=width, channels=channels)


_MAGICS: dict[str, tuple[bytes, ...]] = {
    "JPEG": (JPEG,),
    "PNG": (PNG,),
    "GIF": GIF,
    "WebP": (WEBP,),
}
_READERS = {"JPEG": read_jpeg, "PNG": read_png, "GIF": read_gif, "WebP": read_webp}

_READ = "only JPEG, PNG, WebP and GIF are read"

_OTHERS: tuple[tuple[bytes, str], ...] = (
    (b"BM", "a BMP"),
    (b"II*\x00", "a TIFF"),
    (b"MM\x00*", "a TIFF"),
    (b"%PDF", "a PDF"),
    (b"\x1f\x8b", "gzip"),
    (b"\x00\x00\x00\x0cJXL", "a JPEG XL"),
    (b"\xff\x0a", "a JPEG XL"),
)


def read_header(data: bytes) -> ImageHeader:
    """Return size and channels of an image; the size is that of the upright image.

    Args:
        data: The encoded image, or its beginning.

    Raises:
        BadImage: the format is not supported, or the header is truncated or invalid.
    """
    return _READERS[format_of(data)](data)


def format_of(data: bytes) -> str:
    """Return `JPEG`, `PNG`, `GIF` or `WebP`, from the first bytes of an image.

    Raises:
        BadImage: the image does not have one of these formats.
    """
    for name, magics in _MAGICS.items():
        if data.startswith(magics) and (name != "WebP" or data[8:12] == WEBP_KIND):
            return name
    raise BadImage(_foreign(data))


def begins_as_image(data: bytes) -> bool:
    """Return whether bytes begin like an image of any known format, supported or not."""
    magics = [*sum(_MAGICS.values(), ()), *(magic for magic, _ in _OTHERS)]
    return data.startswith(tuple(magics)) or data[4:8] == b"ftyp"


def _foreign(data: bytes) -> str:
    if not data:
        return "is an empty file"
    if data[4:8] == b"ftyp":
        return f"is an AVIF, HEIC or video; {_READ}"
    if data.lstrip()[:1] == b"<":
        return f"is a web page or XML; {_READ}"
    kind = next((kind for magic, kind in _OTHERS if data.startswith(magic)), "of an unknown format")
    return f"is {kind}; {_READ}"
