"""Checks that a JPEG is whole: its markers lead to its end, and libjpeg accepts tables and scans.

Source: ITU-T T.81, annex B.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import cv2
import numpy as np
import simplejpeg

from stoker.data.sources.images.exif import TRANSPOSED, orientation
from stoker.data.sources.images.header import CUT, BadImage, ImageHeader

# OpenCV prints what it finds wrong with a damaged image; our error says it already.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

MAGIC = b"\xff\xd8\xff"

_SOI, _EOI, _SOS = 0xD8, 0xD9, 0xDA
_END = bytes([0xFF, _EOI])
_FRAMES = (0xC0, 0xC1, 0xC2)
_NO_FRAMES = (0xC4, 0xC8, 0xCC)
_ENDS_A_SCAN = np.ones(256, np.bool_)
_ENDS_A_SCAN[[0x00, *range(0xD0, 0xD8), 0xFF]] = False
"""[byte after FF] True if both bytes are a marker that ends coded data. In coded data, FF is
followed by 00 (a plain FF) or is part of a restart marker."""

_NO_CODED_DATA = ("premature end of data segment", "found marker 0xd9 instead of RST")
"""libjpeg's last message for a JPEG that is valid except for its missing coded data; the second one
applies if there are restart markers. Source: libjpeg-turbo, jerror.h."""

_FIRST_WINDOW_BYTES = 256
"""Size of the first search window in coded data. Each further window is eight times as long, so
that many short scans cost no more than a single long one."""

_JPEG_BITS_PER_BLOCK = 2
"""Least that a sequential JPEG spends on 8x8 pixels: one bit each for the DC and the AC part."""


def _segments(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Marker, first byte and end of each segment of a JPEG up to its end, coded data passed over."""
    at = 2
    while True:
        while data[at : at + 2] == b"\xff\xff":
            at += 1
        if at + 2 > len(data):
            raise BadImage(CUT)
        if data[at] != 0xFF:
            raise BadImage("is damaged: a marker is missing where one must stand")
        marker = data[at + 1]
        if marker == _EOI:
            return
        if at + 4 > len(data):
            raise BadImage(CUT)
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if end > len(data):
            raise BadImage(CUT)
        yield marker, at + 4, end
        at = _scan_end(data, end) if marker == _SOS else end


def _scan_end(data: bytes, start: int) -> int:
    """The position of the marker after a scan's coded data."""
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
    """Size and channels of a JPEG, turned as its Exif asks.

    Raises:
        BadImage: it ends within its header, or is of a kind that TensorFlow does not decode.
    """
    for marker, start, end in _segments(data):
        if marker in _FRAMES:
            return _upright(_frame_header(data[start:end]), orientation(data))
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAMES:
            raise BadImage("is a lossless or arithmetic JPEG, which TensorFlow does not decode")
        if marker == _SOS:
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


def check_jpeg(data: bytes, header: ImageHeader) -> None:
    """Check that a JPEG is whole.

    Raises:
        BadImage: it is cut or damaged.
    """
    segments = list(_segments(data))
    scans = [start for marker, start, _ in segments if marker == _SOS]
    if not scans:
        raise BadImage("is damaged: it has no pixel data")
    blocks = -(-header.height // 8) * -(-header.width // 8)
    progressive = any(marker == _FRAMES[2] for marker, _, _ in segments)
    if not progressive and len(scans) > 1 and data[scans[0]] == header.channels:
        raise BadImage("is damaged: it goes on after its only scan")
    if not progressive and len(data) * 8 < blocks * _JPEG_BITS_PER_BLOCK:
        raise BadImage("is damaged: it has too little pixel data for its size")
    if progressive or not _head_is_decodable(data, segments, header):
        colour = header.channels == 4
        # An eighth of the size: decoding pixels costs almost nothing.
        require_decodable(
            data, cv2.IMREAD_REDUCED_COLOR_8 if colour else cv2.IMREAD_REDUCED_GRAYSCALE_8
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
    if marker != _SOS or data[start] != header.channels or header.channels == 4:
        return False
    try:
        simplejpeg.decode_jpeg(
            data[:end] + _END,
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
