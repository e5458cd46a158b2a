"""Checks without TensorFlow that an image is whole and that the exported graph decodes it.

The exported graph decodes JPEG, PNG, GIF (its first frame) and still WebP, so other formats are
refused by name. A size is read from the header before anything is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from stoker.data.sources.images import formats, jpeg
from stoker.data.sources.images.decoding import check_gif, check_png, check_webp
from stoker.data.sources.images.header import BadImage, ImageHeader

__all__ = ["BadImage", "ImageHeader", "check_image", "read_header"]

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kind:
    """One format and its functions."""

    magics: tuple[bytes, ...]
    """Possible first bytes."""

    read: Callable[[bytes], ImageHeader]
    """Returns the header from the first bytes."""

    check: Callable[[bytes, ImageHeader], None]
    """Raises `BadImage` if the image is cut or damaged."""


_KINDS = (
    _Kind(magics=(jpeg.MAGIC,), read=jpeg.read_jpeg, check=jpeg.check_jpeg),
    _Kind(magics=(formats.PNG,), read=formats.read_png, check=check_png),
    _Kind(magics=formats.GIF, read=formats.read_gif, check=check_gif),
    _Kind(magics=(formats.WEBP,), read=formats.read_webp, check=check_webp),
)


def read_header(data: bytes) -> ImageHeader:
    """Return size and channels of an image after the rotation that its orientation asks for.

    Args:
        data: The encoded image, or its beginning.

    Raises:
        BadImage: The format is not supported, or the header is cut or invalid.
    """
    return _kind_of(data).read(data)


def check_image(data: bytes, *, max_pixels: int, channels: int | None) -> ImageHeader:
    """Check that an image is whole and can be decoded.

    Args:
        data: The encoded image.
        max_pixels: Limit; larger images are refused before decoding.
        channels: Channels after decoding; None if not known yet.

    Raises:
        BadImage: The image cannot be used.
    """
    kind = _kind_of(data)
    header = kind.read(data)
    if header.height * header.width > max_pixels:
        raise BadImage(
            f"has {header.width} x {header.height} pixels, data.images.max_pixels is {max_pixels}"
        )
    if channels == 1 and header.channels == 4:
        raise BadImage("is CMYK, which cannot be read as gray (data.images.channels: 1)")
    kind.check(data, header)
    return header


def begins_as_image(data: bytes) -> bool:
    """Return whether bytes begin like an image, of a supported format or another one."""
    magics = [magic for kind in _KINDS for magic in kind.magics] + [magic for magic, _ in _OTHERS]
    return data.startswith(tuple(magics)) or data[4:8] == b"ftyp"


def _kind_of(data: bytes) -> _Kind:
    for kind in _KINDS:
        if data.startswith(kind.magics) and (
            data[:4] != formats.WEBP or data[8:12] == formats.WEBP_KIND
        ):
            return kind
    raise BadImage(_foreign(data))


def _foreign(data: bytes) -> str:
    if not data:
        return "is an empty file"
    if data[4:8] == b"ftyp":
        return f"is an AVIF, HEIC or video; {_READ}"
    if data.lstrip()[:1] == b"<":
        return f"is a web page or XML; {_READ}"
    kind = next(
        (kind for magic, kind in _OTHERS if data.startswith(magic)), "of no format that is known"
    )
    return f"is {kind}; {_READ}"
