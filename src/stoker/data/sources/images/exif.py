"""Exif orientation of an image, read within fixed bounds.

`data/features/image_decoding.py` reads the same bytes by the same rules inside the exported graph.

Source: Exif 2.32 (CIPA DC-008), 4.5.4 and 4.6.4; TIFF 6.0, section 2.
"""

from __future__ import annotations

from typing import Literal

from stoker.data.sources.images.header import BadImage

MAX_SEGMENTS = 16
"""JPEG segments that are searched; the standard puts Exif into the first."""

MAX_ENTRIES = 64
"""Entries of the first directory that are searched; they are sorted, and cameras write about 12
with a lower or nearby tag."""

EXIF = b"Exif\x00\x00"
"""First bytes of the segment's content; TIFF follows."""

ORIENTATION_TAG = 0x0112
SHORT = 3
"""TIFF's type for a 16-bit number."""

TRANSPOSED = 5
"""From this orientation on, height and width are swapped."""

_ORDERS: dict[bytes, Literal["little", "big"]] = {b"II*\x00": "little", b"MM\x00*": "big"}


def orientation(data: bytes) -> int:
    """Return the Exif orientation of a JPEG.

    Args:
        data: The encoded image, or its beginning up to the frame header.

    Returns:
        1 (upright) to 8; 1 if it is not a JPEG, or its Exif is missing or damaged.
    """
    return orientation_in(_tiff(data))


def require_upright(exif: bytes) -> None:
    """Check that the Exif of a PNG or WebP does not ask for a rotation.

    The exported graph rotates only JPEGs.

    Args:
        exif: The TIFF content of the chunk; some programs write the JPEG prefix before it.

    Raises:
        BadImage: It asks for one.
    """
    asked = orientation_in(exif.removeprefix(EXIF))
    if asked != 1:
        raise BadImage(
            f"asks to be turned (Exif orientation {asked}), which is done to JPEGs only; save it upright"
        )


def orientation_in(tiff: bytes) -> int:
    """Return the orientation in a TIFF directory, 1 to 8; 1 if it is missing or damaged."""
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
    """Return the first Exif segment before the tables and the frame; b"" if there is none."""
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
    """Return whether a marker is APP0 to APP15 or a comment; only these may precede Exif."""
    return marker & 0xF0 == 0xE0 or marker == 0xFE
