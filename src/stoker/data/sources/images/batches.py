"""Check many encoded images in threads, and find the shape that they have in common."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from stoker.core.errors import ConfigError, Plain
from stoker.data.sources.config import ImagesConfig
from stoker.data.sources.images.check import check_image
from stoker.data.sources.images.headers import BadImage, ImageHeader, read_header
from stoker.data.sources.records import Cells, with_fault

NO_IMAGE = "the image is missing"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Sized:
    """An image's size; ordered by number of pixels, then by height and width (2 x 8 differs from 4 x 4)."""

    pixels: int
    height: int
    width: int
    name: str

    def __str__(self) -> str:
        return f"{self.height} x {self.width} pixels ({self.name})"


@dataclass(slots=True)
class ImageTally:
    """Smallest and largest size of all images of a source, and whether any image has color."""

    smallest: _Sized | None = None
    """The image with the fewest pixels."""

    largest: _Sized | None = None
    """The image with the most pixels."""

    has_color: bool = False
    """Whether at least one image is not gray."""

    def add(self, header: ImageHeader, name: str) -> None:
        """Add the next image."""
        area = header.height * header.width
        size = _Sized(pixels=area, height=header.height, width=header.width, name=name)
        self.smallest = min(self.smallest or size, size)
        self.largest = max(self.largest or size, size)
        self.has_color = self.has_color or header.channels != 1

    def shape(self, config: ImagesConfig) -> tuple[int, int, int]:
        """Return the height, width and channels that all images are converted to.

        Raises:
            ConfigError: the sizes differ, and `data.images.size` is not set.
        """
        channels = config.channels or (3 if self.has_color else 1)
        if config.size is not None:
            return *config.size, channels
        if self.smallest is None or self.largest is None:
            # Every image is bad; the faults of the records say why.
            return 1, 1, channels
        height, width = self.smallest.height, self.smallest.width
        if (height, width) != (self.largest.height, self.largest.width):
            raise ConfigError(
                "data.images.size must be set if the images differ in size",
                got=Plain(f"from {self.smallest} to {self.largest}"),
                fix="Set for example `images: {size: [224, 224]}` under `data`.",
            )
        return height, width, channels


def needs_headers(config: ImagesConfig) -> bool:
    """Return whether the shape must be found from the images' headers, because it is not configured."""
    return config.size is None or config.channels is None


def tally_images(
    tally: ImageTally,
    encoded: pa.Array,
    config: ImagesConfig,
    *,
    name: str,
    pool: ThreadPoolExecutor,
) -> None:
    """Add the sizes and colors of one column's images to a tally.

    Args:
        tally: The tally.
        encoded: [rows] encoded images; images without a valid header are skipped (`checked_images` refuses
            them).
        config: The settings; `max_pixels` is used.
        name: The column's name, for messages.
        pool: Threads that read the headers.
    """
    for header in pool.map(lambda data: usable_header(data, config), encoded.to_pylist()):
        if header is not None:
            tally.add(header, name)


def usable_header(data: bytes | None, config: ImagesConfig) -> ImageHeader | None:
    """Return an image's header; None if it is missing or invalid, or the image has more than `max_pixels`."""
    try:
        header = read_header(data or b"")
    except BadImage:
        return None
    return header if header.height * header.width <= config.max_pixels else None


def checked_images(
    column: Cells, config: ImagesConfig, *, channels: int | None, pool: ThreadPoolExecutor
) -> Cells:
    """Mark images of a column as bad if they are missing or cannot be used."""

    def fault(data: bytes | None) -> str:
        if data is None:
            return NO_IMAGE
        try:
            check_image(data, max_pixels=config.max_pixels, channels=channels)
        except BadImage as error:
            return f"the image {error}"
        return ""

    faults = np.array(list(pool.map(fault, column.values.to_pylist())), object)
    checked = replace(column, raw=pa.nulls(len(faults)))
    for reason in sorted(set(faults) - {""}):
        checked = with_fault(checked, faults == reason, reason)
    return checked
