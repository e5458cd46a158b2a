"""Is this a whole GIF, whose first frame fills it?

The first frame is the image. TensorFlow unpacks every frame to give it, and gives a first frame
that does not fill its screen in another size and place than everybody else; so those are refused.

Source: GIF89a specification, sections 18 to 27.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import cv2

from stoker.data.sources.images.gif_codes import pixels_until_end
from stoker.data.sources.images.header import CUT, BadImage, ImageHeader, demand_decodable

MAGICS = (b"GIF87a", b"GIF89a")

MAX_UNPACKED_BYTES = 128 << 20
"""Most that all frames may take, a byte a pixel, since TensorFlow unpacks all of them."""

_SCREEN_BYTES = 13
_FRAME, _EXTENSION, _END = 0x2C, 0x21, 0x3B
_HAS_TABLE = 0x80


@dataclass(frozen=True, kw_only=True, slots=True)
class _Frame:
    """One frame, and what its descriptor says."""

    left: int
    top: int
    width: int
    height: int
    alone: bytes
    """The frame as a GIF of its own."""
    bits: int
    """Of a pixel, as its coded data says."""
    packed: bytes
    """Its coded data, the blocks joined."""
    has_colours: bool
    """True where it has a colour table, of its own or of the whole GIF."""


def read_gif(data: bytes) -> ImageHeader:
    """Size of a GIF; it is always in colour.

    Raises:
        BadImage: it ends within its header, or has no pixels.
    """
    if len(data) < _SCREEN_BYTES:
        raise BadImage(CUT)
    width, height = struct.unpack_from("<HH", data, 6)
    if not width or not height:
        raise BadImage(f"has {width} x {height} pixels")
    return ImageHeader(height=height, width=width, channels=3)


def check_gif(data: bytes, header: ImageHeader) -> None:
    """Hold that a GIF is whole, and that TensorFlow's first frame is the one that is meant.

    Raises:
        BadImage: it is cut or damaged, or its first frame does not fill it.
    """
    unpacked = 0
    for frame in _frames(data):
        if not unpacked:
            _check_first(frame, header)
        unpacked += frame.width * frame.height
        if unpacked > MAX_UNPACKED_BYTES:
            raise BadImage(
                f"has frames of more than {MAX_UNPACKED_BYTES >> 20} million pixels together"
            )
        # Damage in a later frame keeps TensorFlow from giving the first.
        demand_decodable(frame.alone, cv2.IMREAD_COLOR)
        needed = frame.width * frame.height
        if pixels_until_end(frame.packed, frame.bits, needed=needed) < needed:
            raise BadImage("is damaged: its pixel data ends before its last line")
    if not unpacked:
        raise BadImage("is damaged: it has no frame")


def _check_first(frame: _Frame, header: ImageHeader) -> None:
    if not frame.has_colours:
        raise BadImage("is damaged: its colour table is missing")
    if (frame.left, frame.top, frame.width, frame.height) != (0, 0, header.width, header.height):
        raise BadImage(
            f"has a first frame of {frame.width} x {frame.height} pixels that does not fill its "
            f"{header.width} x {header.height}, which TensorFlow misplaces"
        )


def _frames(data: bytes) -> Iterator[_Frame]:
    """Each frame up to the GIF's end, extensions passed over."""
    at = _SCREEN_BYTES + _table_bytes(data[10])
    table = data[10:at]
    while (kind := _byte(data, at)) != _END:
        if kind == _EXTENSION:
            at = _blocks_end(data, at + 2)
        elif kind == _FRAME:
            flags = _byte(data, at + 9)
            coded = at + 10 + _table_bytes(flags)
            end = _blocks_end(data, coded + 1)
            left, top, width, height = struct.unpack_from("<HHHH", data, at + 1)
            screen = MAGICS[-1] + struct.pack("<HH", width, height) + table
            place = struct.pack("<BHHHH", _FRAME, 0, 0, width, height)
            alone = screen + place + data[at + 9 : end] + bytes([_END])
            yield _Frame(
                left=left,
                top=top,
                width=width,
                height=height,
                alone=alone,
                bits=data[coded],
                packed=_joined(data, coded + 1),
                has_colours=bool((data[10] | flags) & _HAS_TABLE),
            )
            at = end
        else:
            raise BadImage("is damaged: a block is missing where one must stand")


def _table_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & _HAS_TABLE else 0


def _blocks_end(data: bytes, at: int) -> int:
    """Where the chain of blocks that starts at `at` ends: each says its length, the last 0."""
    while length := _byte(data, at):
        at += 1 + length
    return at + 1


def _joined(data: bytes, at: int) -> bytes:
    """The content of a chain of blocks that is whole."""
    parts = []
    while length := data[at]:
        parts.append(data[at + 1 : at + 1 + length])
        at += 1 + length
    return b"".join(parts)


def _byte(data: bytes, at: int) -> int:
    if at >= len(data):
        raise BadImage(CUT)
    return data[at]
