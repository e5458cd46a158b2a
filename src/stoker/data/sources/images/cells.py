"""Encoded images in a column, as in Parquet and TFRecord."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa

from stoker.data.sources.config import ImagesConfig
from stoker.data.sources.images.batches import ImageTally, in_threads
from stoker.data.sources.images.check import BadImage, ImageHeader, check_image, read_header
from stoker.data.sources.records import Cells, with_fault

NO_IMAGE = "the image is missing"


def tally_images(
    tally: ImageTally,
    encoded: pa.Array,
    config: ImagesConfig,
    *,
    name: str,
    pool: ThreadPoolExecutor,
) -> None:
    """Count the shapes of some images.

    Args:
        tally: What counts them.
        encoded: [rows] bytes; those without a usable header are left to `checked_images`.
        config: Says which are too large.
        name: The column's name.
        pool: Threads that look at them.
    """
    for found in in_threads(partial(_header, config), encoded.to_pylist(), pool):
        if found.value is not None:
            tally.add(found.value, name)


def checked_images(
    found: Cells, config: ImagesConfig, *, channels: int | None, pool: ThreadPoolExecutor
) -> Cells:
    """The same cells, the missing and the bad among the images named."""

    def check(data: bytes | None) -> ImageHeader | None:
        if data is None:
            return None
        return check_image(data, max_pixels=config.max_pixels, channels=channels)

    outcomes = list(in_threads(check, found.values.to_pylist(), pool))
    missing = found.values.is_null().to_numpy(zero_copy_only=False)
    column = with_fault(replace(found, raw=pa.nulls(len(outcomes))), missing, NO_IMAGE)
    for reason in sorted({outcome.reason for outcome in outcomes} - {""}):
        at_fault = np.array([outcome.reason == reason for outcome in outcomes])
        column = with_fault(column, at_fault, reason)
    return column


def _header(config: ImagesConfig, data: bytes | None) -> ImageHeader:
    header = read_header(data or b"")
    if header.height * header.width > config.max_pixels:
        raise BadImage("is too large")
    return header
