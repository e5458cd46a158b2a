"""The header of an image, and the error of an image that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass

CUT = "is cut: it ends before its last part"


class BadImage(ValueError):
    """These bytes cannot be used as an image; the text says why and follows "the image"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageHeader:
    """Size and channels from an image's header, after the rotation that its orientation asks for."""

    height: int
    """Pixels."""

    width: int
    """Pixels."""

    channels: int
    """1 (gray), 3 (color) or 4 (CMYK)."""
