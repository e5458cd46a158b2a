"""What an image says of itself, and the one way to say that it cannot be used."""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

# OpenCV writes what it thinks of a damaged image to the terminal; ours is the sentence that counts.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

CUT = "is cut: it ends before its last part"


class BadImage(ValueError):
    """These bytes cannot be used as an image; the text says why, after "the image"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageHeader:
    """What an image says of itself before it is decoded, turned as its orientation asks."""

    height: int
    """Pixels."""

    width: int
    """Pixels."""

    channels: int
    """1 (grey), 3 (colour) or 4 (CMYK)."""


def demand_decodable(data: bytes, how: int) -> NDArray[np.uint8]:
    """Hold that OpenCV's decoder reads it to its end.

    Args:
        data: The encoded image.
        how: OpenCV's reading mode; its orientation is not applied.

    Returns:
        The pixels, as that mode gives them.

    Raises:
        BadImage: it does not.
    """
    try:
        decoded = cv2.imdecode(np.frombuffer(data, np.uint8), how | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise BadImage("is damaged: it cannot be decoded") from error
    if decoded is None:
        raise BadImage("is damaged: it cannot be decoded")
    return np.asarray(decoded)
