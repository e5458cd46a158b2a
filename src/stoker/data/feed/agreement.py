"""Does the quick evaluation path give what the exported graph gives? Where not, it is not used."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from stoker.data.feed.images import ImageSplit

NEEDED_SHARE = 0.999
"""Of all pixels, how many must lie within `GREY_LEVELS` of the graph's."""

GREY_LEVELS = 1

SAMPLE_ROWS = 64
"""Images that are compared before training, spread over the split."""


def agrees(
    images: ImageSplit,
    reference: Callable[[list[bytes]], NDArray[np.uint8]],
    *,
    rows: int = SAMPLE_ROWS,
) -> bool:
    """Compare both paths on images of the split itself.

    Args:
        images: The quick path.
        reference: Encoded images -> [batch, height, width, channels], by the exported graph.
        rows: How many are compared.

    Raises:
        DataError: a shard is damaged.
    """
    chosen = np.unique(np.linspace(0, images.rows - 1, min(rows, images.rows)).astype(np.int64))
    return (
        share_within(images.evaluation(chosen), reference(images.encoded(chosen))) >= NEEDED_SHARE
    )


def share_within(found: NDArray[np.uint8], wanted: NDArray[np.uint8]) -> float:
    """The share of values that differ by no more than `GREY_LEVELS`."""
    away = np.abs(found.astype(np.int16) - wanted.astype(np.int16))
    return float((away <= GREY_LEVELS).mean())
