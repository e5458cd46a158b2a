"""Checks by Pillow and OpenCV that a PNG, GIF or WebP is whole.

Decision 0056 says what each of them misses, and why JPEG keeps a check of its own.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO

import cv2
from PIL.GifImagePlugin import GifImageFile
from PIL.Image import DecompressionBombError
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from stoker.data.sources.images.exif import require_upright
from stoker.data.sources.images.formats import webp_bytes
from stoker.data.sources.images.header import CUT, BadImage, ImageHeader
from stoker.data.sources.images.jpeg import require_decodable

MAX_GIF_PIXELS = 128 << 20
"""Upper limit for the pixels of all frames: TensorFlow unpacks all of them, one byte per pixel."""

_PNG_END = bytes(4) + b"IEND" + zlib.crc32(b"IEND").to_bytes(4)
_GIF_END = b";"
_HAS_TABLE = 0x80
"""Flag of a GIF's screen or frame: a color table follows."""


@contextmanager
def _damage_named() -> Iterator[None]:
    """Turn every error that Pillow raises on damaged bytes into a `BadImage`."""
    try:
        yield
    except (OSError, SyntaxError, ValueError, IndexError, struct.error, zlib.error) as error:
        if isinstance(error, BadImage):
            raise
        raise BadImage(f"is cut or damaged ({error})") from error


def check_png(data: bytes, _header: ImageHeader) -> None:
    """Check that a PNG is whole.

    Raises:
        BadImage: It is cut or damaged, or its Exif asks for a rotation.
    """
    stream = BytesIO(data)
    with _damage_named():
        PngImageFile(stream).verify()
    if data[stream.tell() - 8 : stream.tell() + 4] != _PNG_END:
        raise BadImage(CUT)
    require_decodable(data, cv2.IMREAD_UNCHANGED)
    # Exif may follow the pixels. A random match in the pixels does no harm: it holds no orientation.
    exif = data.find(b"eXIf")
    if exif > 0:
        require_upright(data[exif + 4 : exif + 4 + int.from_bytes(data[exif - 4 : exif])])


def check_webp(data: bytes, _header: ImageHeader) -> None:
    """Check that a WebP is whole.

    Raises:
        BadImage: It is cut or damaged, or its Exif asks for a rotation.
    """
    if len(data) < webp_bytes(data):
        raise BadImage(CUT)
    with _damage_named():
        image = WebPImageFile(BytesIO(data))
        image.load()
    require_upright(image.info.get("exif", b""))


def check_gif(data: bytes, header: ImageHeader) -> None:
    """Check that a GIF is whole, and that all decoders agree on its first frame.

    The first frame is the image. If it does not fill the screen, TensorFlow returns it with another
    size and position than other decoders. If a later frame is damaged, TensorFlow returns nothing.

    Raises:
        BadImage: It is cut or damaged, or its first frame does not fill it.
    """
    stream, pixels = BytesIO(data), 0
    with _damage_named():
        image = GifImageFile(stream)
        _check_first_frame(image, data, header)
        try:
            while True:
                left, top, right, bottom = _frame(image)
                pixels += (right - left) * (bottom - top)
                if max(pixels, image.width * image.height) > MAX_GIF_PIXELS:
                    raise DecompressionBombError
                image.load()
                image.seek(image.tell() + 1)
        except DecompressionBombError:
            raise BadImage(
                f"has frames of more than {MAX_GIF_PIXELS >> 20} million pixels together"
            ) from None
        except EOFError:
            pass
    if data[stream.tell() - 1 : stream.tell()] != _GIF_END:
        raise BadImage(CUT)
    # Pillow accepts some invalid codes for which giflib, TensorFlow's decoder, refuses the image.
    require_decodable(data, cv2.IMREAD_COLOR)


def _check_first_frame(image: GifImageFile, data: bytes, screen: ImageHeader) -> None:
    left, top, right, bottom = _frame(image)
    if (left, top, right, bottom) != (0, 0, screen.width, screen.height):
        raise BadImage(
            f"has a first frame of {right - left} x {bottom - top} pixels that does not fill its "
            f"{screen.width} x {screen.height}, which TensorFlow misplaces"
        )
    coded = image.tile[0].offset
    bare = b"," + struct.pack("<HHHH", 0, 0, screen.width, screen.height)
    has_table = data[10] & _HAS_TABLE or data[coded - 11 : coded - 2] != bare
    if not has_table and not data[coded - 2] & _HAS_TABLE:
        raise BadImage("is damaged: its color table is missing")


def _frame(image: GifImageFile) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of the current frame, pixels."""
    return image.tile[0].extents or (0, 0, 0, 0)
