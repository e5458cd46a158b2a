"""The marks and headers of PNG, GIF and WebP, read from their first bytes without decoding.

TensorFlow 2.21 does not decode a frame of an animated WebP without alpha, and with channels=0 it
writes past the end of its buffer. So animated WebP images are refused, here and in the exported graph.

Source: PNG specification (third edition), section 11.2; GIF89a specification, section 18; WebP
container specification; RFC 6386, section 9.1; WebP lossless specification, section 3.
"""

from __future__ import annotations

import struct

from stoker.data.sources.images.header import CUT, BadImage, ImageHeader

PNG = b"\x89PNG\r\n\x1a\n"
GIF = (b"GIF87a", b"GIF89a")
WEBP = b"RIFF"
"""The first bytes of each format."""

WEBP_KIND = b"WEBP"
"""The bytes from byte 8 of a WebP; other RIFF files have others."""

ANIMATED = 0x02
"""Flag in byte 20 of an extended WebP."""

_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 1, 6: 3}
"""PNG color type -> channels without alpha."""

_PNG_DEPTHS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}
"""PNG color type -> valid bits per sample."""

_WEBP_HEADER_BYTES = 30
_WEBP_LOSSY_START = b"\x9d\x01\x2a"
_WEBP_LOSSLESS_START = b"\x2f"
_WEBP_SIZE_BITS = 14


def read_png(data: bytes) -> ImageHeader:
    """Return size and channels of a PNG, alpha not counted.

    Raises:
        BadImage: The header is cut or invalid.
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
        BadImage: The header is cut, or there are no pixels.
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
        BadImage: The header is cut or invalid, or the image is animated.
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
    """Return height and width; 0 if the header is invalid."""
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
