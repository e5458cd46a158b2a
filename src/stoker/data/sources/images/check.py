"""Checks, without TensorFlow, that an image is complete and that the exported graph can decode it.

The exported graph decodes JPEG, PNG, GIF (its first frame) and still WebP, so other formats are
refused by name. A size is read from the header before anything is decoded. PNG, GIF and WebP are
checked by Pillow and OpenCV, JPEG by a check of its own: decision 0056 says why, and what each misses.
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

# OpenCV prints errors of damaged images; our error reports them already.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

MAX_GIF_PIXELS = 128 << 20
"""Upper limit for the pixels of all frames: TensorFlow unpacks all of them, one byte per pixel."""

_JPEG_END = b"\xff\xd9"
_PNG_END = bytes(4) + b"IEND" + zlib.crc32(b"IEND").to_bytes(4)
_GIF_END = b";"
_HAS_TABLE = 0x80
"""Flag of a GIF's screen or frame: a color table follows."""


def check_image(data: bytes, *, max_pixels: int, channels: int | None) -> ImageHeader:
    """Check that an image is whole and can be decoded.

    Args:
        data: The encoded image.
        max_pixels: Limit; larger images are refused before decoding.
        channels: Channels after decoding; None if not known yet.

    Raises:
        BadImage: The image cannot be used.
    """
    header = read_header(data)
    if header.height * header.width > max_pixels:
        raise BadImage(
            f"has {header.width} x {header.height} pixels, data.images.max_pixels is {max_pixels}"
        )
    if channels == 1 and header.channels == 4:
        raise BadImage("is CMYK, which cannot be read as gray (data.images.channels: 1)")
    _CHECKS[format_of(data)](data, header)
    return header


_NO_CODED_DATA = ("premature end of data segment", "found marker 0xd9 instead of RST")
"""libjpeg's last message for a JPEG that is valid except for its missing coded data; the second one
applies if there are restart markers. Source: libjpeg-turbo, jerror.h."""

_JPEG_BITS_PER_BLOCK = 2
"""Least that a sequential JPEG spends on 8x8 pixels: one bit each for the DC and the AC part."""


def check_jpeg(data: bytes, header: ImageHeader) -> None:
    """Check that a JPEG is whole.

    Raises:
        BadImage: it is cut or damaged.
    """
    segments = list(jpeg_segments(data))
    scans = [start for marker, start, _ in segments if marker == SOS]
    if not scans:
        raise BadImage("is damaged: it has no pixel data")
    blocks = -(-header.height // 8) * -(-header.width // 8)
    progressive = any(marker == FRAMES[2] for marker, _, _ in segments)
    if not progressive and len(scans) > 1 and data[scans[0]] == header.channels:
        raise BadImage("is damaged: it goes on after its only scan")
    if not progressive and len(data) * 8 < blocks * _JPEG_BITS_PER_BLOCK:
        raise BadImage("is damaged: it has too little pixel data for its size")
    if progressive or not _head_is_decodable(data, segments, header):
        color = header.channels == 4
        # An eighth of the size: decoding pixels costs almost nothing.
        require_decodable(
            data, cv2.IMREAD_REDUCED_COLOR_8 if color else cv2.IMREAD_REDUCED_GRAYSCALE_8
        )


def _head_is_decodable(
    data: bytes, segments: Sequence[tuple[int, int, int]], header: ImageHeader
) -> bool:
    """Whether libjpeg accepts everything before the coded data of a single sequential scan.

    In such coded data libjpeg reports no errors, only warnings, which neither OpenCV nor TensorFlow
    checks. So decoding it would find nothing, and take 9/10 of the time of a check.

    Returns:
        False also if the check does not apply: several scans, data between the scan and the
        end, CMYK, or a subsampling that this decoder does not support.
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
        # libjpeg's last message; after an error it says nothing more.
        return any(text in str(error) for text in _NO_CODED_DATA)
    return False


def require_decodable(data: bytes, mode: int) -> None:
    """Check that OpenCV decodes an image to its end.

    Args:
        data: The encoded image.
        mode: OpenCV's reading mode.

    Raises:
        BadImage: OpenCV returns no pixels.
    """
    try:
        decoded = cv2.imdecode(np.frombuffer(data, np.uint8), mode | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise BadImage("is damaged: it cannot be decoded") from error
    if decoded is None:
        raise BadImage("is damaged: it cannot be decoded")


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
    # Pillow accepts some invalid codes for which giflib, TensorFlow's decoder, refuses the image.
    require_decodable(data, cv2.IMREAD_COLOR)


@contextmanager
def _frames_limited() -> Iterator[None]:
    """Turn the error of too large frames into that of a bad image; Pillow raises it while it opens the file, too."""
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


_CHECKS: dict[str, Callable[[bytes, ImageHeader], None]] = {
    "JPEG": check_jpeg,
    "PNG": check_png,
    "GIF": check_gif,
    "WebP": check_webp,
}
