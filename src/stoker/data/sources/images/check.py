"""Check, without TensorFlow, that an image is complete and that the exported graph can decode it.

The exported graph decodes JPEG, PNG, GIF (its first frame) and WebP that is not animated, so other formats are
refused. The size is read from the header before anything is decoded. PNG, GIF and WebP are checked by Pillow
and OpenCV, JPEG by code in this module; decision 0056 says why, and which damage each check misses.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO

import cv2
import numpy as np
import simplejpeg
from PIL.GifImagePlugin import GifImageFile
from PIL.Image import DecompressionBombError, DecompressionBombWarning
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from stoker.data.sources.images.headers import (
    CUT,
    FRAMES,
    SOS,
    BadImage,
    ImageHeader,
    format_of,
    jpeg_segments,
    read_header,
    require_upright,
    webp_bytes,
)

# OpenCV would print errors for damaged images, which Stoker's own error reports.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

MAX_GIF_PIXELS = 128 << 20
"""Maximum number of pixels of all frames of a GIF together: TensorFlow's decoder, giflib, reads all
frames, with one byte per pixel."""

_JPEG_END = b"\xff\xd9"
_PNG_END = bytes(4) + b"IEND" + zlib.crc32(b"IEND").to_bytes(4)
_GIF_END = b";"
_HAS_TABLE = 0x80
"""Flag in the header of a GIF or of its frame: a color table follows."""


def check_image(data: bytes, *, max_pixels: int, channels: int | None) -> ImageHeader:
    """Check that an image is complete and can be decoded; return its header.

    Args:
        data: The encoded image.
        max_pixels: Maximum number of pixels; larger images are refused before they are decoded.
        channels: Number of channels after decoding; None: not known yet.

    Raises:
        BadImage: the image cannot be used.
    """
    header = read_header(data)
    if header.height * header.width > max_pixels:
        raise BadImage(
            f"has {header.width} x {header.height} pixels, but data.images.max_pixels is {max_pixels}"
        )
    if channels == 1 and header.channels == 4:
        raise BadImage("is CMYK, which cannot be converted to gray (data.images.channels: 1)")
    _CHECKS[format_of(data)](data, header)
    return header


_NO_CODED_DATA = ("premature end of data segment", "found marker 0xd9 instead of RST")
"""libjpeg's last message for a JPEG that is valid, but has no coded data: without and with restart markers.
Source: libjpeg-turbo, jerror.h."""

_JPEG_BITS_PER_BLOCK = 2
"""Minimum number of bits of a sequential JPEG for 8x8 pixels: one bit each for the DC and the AC part."""


def check_jpeg(data: bytes, header: ImageHeader) -> None:
    """Check that a JPEG is complete and undamaged.

    Raises:
        BadImage: the image is truncated or damaged.
    """
    segments = list(jpeg_segments(data))
    scans = [start for marker, start, _ in segments if marker == SOS]
    if not scans:
        raise BadImage("is damaged: it has no pixel data")
    blocks = -(-header.height // 8) * -(-header.width // 8)
    progressive = any(marker == FRAMES[2] for marker, _, _ in segments)
    if not progressive and len(scans) > 1 and data[scans[0]] == header.channels:
        raise BadImage("is damaged: it has further data after its only scan")
    if not progressive and len(data) * 8 < blocks * _JPEG_BITS_PER_BLOCK:
        raise BadImage("is damaged: it has too little pixel data for its size")
    if progressive or not _head_is_decodable(data, segments, header):
        color = header.channels == 4
        # At an eighth of the size, decoding the pixels costs almost nothing.
        require_decodable(
            data, cv2.IMREAD_REDUCED_COLOR_8 if color else cv2.IMREAD_REDUCED_GRAYSCALE_8
        )


def _head_is_decodable(
    data: bytes, segments: Sequence[tuple[int, int, int]], header: ImageHeader
) -> bool:
    """Return whether libjpeg accepts everything before the coded data of a single sequential scan.

    For damage in such coded data, libjpeg reports no errors but only warnings, which neither OpenCV nor
    TensorFlow checks. So it is not decoded: this would find nothing, and take 9/10 of the time of a check.

    Returns:
        False, too, if the check does not apply: several scans, data between the scan and the end, CMYK, or
        a subsampling that simplejpeg does not support.
    """
    marker, start, end = segments[-1]
    if marker != SOS or data[start] != header.channels or header.channels == 4:
        return False
    try:
        simplejpeg.decode_jpeg(
            data[:end] + _JPEG_END,
            colorspace="GRAY",
            min_height=1,
            min_width=1,
            min_factor=8,
            strict=True,
        )
    except ValueError as error:
        # The error has libjpeg's last message. If this is the message about missing coded data, nothing else is wrong.
        return any(text in str(error) for text in _NO_CODED_DATA)
    return False


def require_decodable(data: bytes, mode: int) -> None:
    """Check that OpenCV decodes an image to its end.

    Args:
        data: The encoded image.
        mode: OpenCV's flag for reading (`cv2.IMREAD_...`).

    Raises:
        BadImage: OpenCV cannot decode the image.
    """
    try:
        decoded = cv2.imdecode(np.frombuffer(data, np.uint8), mode | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise BadImage("is damaged: it cannot be decoded") from error
    if decoded is None:
        raise BadImage("is damaged: it cannot be decoded")


@contextmanager
def _damage_named() -> Iterator[None]:
    """Convert every error that Pillow raises for damaged bytes to a `BadImage`."""
    try:
        yield
    except (OSError, SyntaxError, ValueError, IndexError, struct.error, zlib.error) as error:
        if isinstance(error, BadImage):
            raise
        raise BadImage(f"is truncated or damaged ({error})") from error


def check_png(data: bytes, _header: ImageHeader) -> None:
    """Check that a PNG is complete, undamaged and upright.

    Raises:
        BadImage: the image is truncated or damaged, or its Exif requires a rotation.
    """
    stream = BytesIO(data)
    with _damage_named():
        PngImageFile(stream).verify()
    if data[stream.tell() - 8 : stream.tell() + 4] != _PNG_END:
        raise BadImage(CUT)
    require_decodable(data, cv2.IMREAD_UNCHANGED)
    # The Exif chunk may follow the pixels. If the pixels contain `eXIf` by chance, no orientation follows, so the
    # search does no harm.
    exif = data.find(b"eXIf")
    if exif > 0:
        require_upright(data[exif + 4 : exif + 4 + int.from_bytes(data[exif - 4 : exif])])


def check_webp(data: bytes, _header: ImageHeader) -> None:
    """Check that a WebP is complete, undamaged and upright.

    Raises:
        BadImage: the image is truncated or damaged, or its Exif requires a rotation.
    """
    if len(data) < webp_bytes(data):
        raise BadImage(CUT)
    with _damage_named():
        image = WebPImageFile(BytesIO(data))
        image.load()
    require_upright(image.info.get("exif", b""))


def check_gif(data: bytes, header: ImageHeader) -> None:
    """Check that a GIF is complete and undamaged, and that all decoders agree on its first frame.

    Only the first frame is used. If it does not fill the whole area of the image, TensorFlow returns it with a
    different size and position than other decoders. If a later frame is damaged, TensorFlow returns nothing.

    Raises:
        BadImage: the image is truncated or damaged, its first frame does not fill the whole area, or its
            frames are too large.
    """
    stream, pixels = BytesIO(data), 0
    with _damage_named(), _frames_limited():
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
        except EOFError:
            pass
    if data[stream.tell() - 1 : stream.tell()] != _GIF_END:
        raise BadImage(CUT)
    # Pillow accepts some invalid codes; giflib, TensorFlow's decoder, refuses images that contain them.
    require_decodable(data, cv2.IMREAD_COLOR)


@contextmanager
def _frames_limited() -> Iterator[None]:
    """Convert the error for too large frames to a `BadImage`; Pillow may also raise it when it opens the image."""
    try:
        yield
    except (DecompressionBombError, DecompressionBombWarning):  # a warning under `python -W error`
        raise BadImage(
            f"has frames of more than {MAX_GIF_PIXELS >> 20} million pixels together"
        ) from None


def _check_first_frame(image: GifImageFile, data: bytes, screen: ImageHeader) -> None:
    left, top, right, bottom = _frame(image)
    if (left, top, right, bottom) != (0, 0, screen.width, screen.height):
        raise BadImage(
            f"has a first frame of {right - left} x {bottom - top} pixels, which does not fill the image "
            f"({screen.width} x {screen.height}); TensorFlow would decode it wrongly"
        )
    coded = image.tile[0].offset
    bare = b"," + struct.pack("<HHHH", 0, 0, screen.width, screen.height)
    has_table = data[10] & _HAS_TABLE or data[coded - 11 : coded - 2] != bare
    if not has_table and not data[coded - 2] & _HAS_TABLE:
        raise BadImage("is damaged: its color table is missing")


def _frame(image: GifImageFile) -> tuple[int, int, int, int]:
    """Return the edges of the current frame: left, top, right, bottom, pixels."""
    return image.tile[0].extents or (0, 0, 0, 0)


_CHECKS: dict[str, Callable[[bytes, ImageHeader], None]] = {
    "JPEG": check_jpeg,
    "PNG": check_png,
    "GIF": check_gif,
    "WebP": check_webp,
}
