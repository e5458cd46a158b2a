"""Work on many images in threads, and their common shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

from stoker.core.errors import ConfigError, Plain
from stoker.data.sources.config import ImagesConfig
from stoker.data.sources.images.check import BadImage, ImageHeader

Given = TypeVar("Given")
Made = TypeVar("Made")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageResult(Generic[Made]):
    """The result for one image: a value, or the reason why the image is bad."""

    value: Made | None
    """None if the image is bad."""

    reason: str
    """Why the image is bad; "" if it is good."""


def in_threads(
    work: Callable[[Given], Made], given: Iterable[Given], pool: ThreadPoolExecutor
) -> Iterator[ImageResult[Made]]:
    """Yield the result for each image, in order; `BadImage` becomes the reason."""

    def attempt(one: Given) -> ImageResult[Made]:
        try:
            return ImageResult(value=work(one), reason="")
        except BadImage as error:
            return ImageResult(value=None, reason=f"the image {error}")

    return pool.map(attempt, given)


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Sized:
    """An image's size, ordered by number of pixels, then by shape: 2x8 differs from 4x4."""

    pixels: int
    height: int
    width: int
    name: str

    def __str__(self) -> str:
        return f"{self.height} x {self.width} pixels ({self.name})"


@dataclass(slots=True)
class ImageTally:
    """Smallest and largest size, and color, over all images of a source."""

    smallest: _Sized | None = None
    """The image with the fewest pixels."""

    largest: _Sized | None = None
    """The image with the most pixels."""

    colour: bool = False
    """True if at least one image is not gray."""

    def add(self, header: ImageHeader, name: str) -> None:
        """Count one more image."""
        area = header.height * header.width
        size = _Sized(pixels=area, height=header.height, width=header.width, name=name)
        self.smallest = min(self.smallest or size, size)
        self.largest = max(self.largest or size, size)
        self.colour = self.colour or header.channels != 1

    def merge(self, other: ImageTally) -> None:
        """Count what another tally has counted."""
        ends = [
            size for size in (self.smallest, self.largest, other.smallest, other.largest) if size
        ]
        if ends:
            self.smallest, self.largest = min(ends), max(ends)
        self.colour = self.colour or other.colour

    def shape(self, config: ImagesConfig) -> tuple[int, int, int]:
        """Return the height, width and channels that all images are converted to.

        Raises:
            ConfigError: The sizes differ, and `data.images.size` is not set.
        """
        channels = config.channels or (3 if self.colour else 1)
        if config.size is not None:
            return *config.size, channels
        if self.smallest is None or self.largest is None:
            # Every image is bad; the records say why.
            return 1, 1, channels
        ends = self.smallest, self.largest
        if (ends[0].height, ends[0].width) != (ends[1].height, ends[1].width):
            raise ConfigError(
                "data.images.size must be set if the images differ in size",
                got=Plain(f"from {ends[0]} to {ends[1]}"),
                fix="Set for example `images: {size: [224, 224]}` under `data`.",
            )
        return self.smallest.height, self.smallest.width, channels


def needs_headers(config: ImagesConfig) -> bool:
    """Return whether the shape depends on the images."""
    return config.size is None or config.channels is None


def batched_by_bytes(sizes: Sequence[int], *, most: int, most_bytes: int) -> Iterator[slice]:
    """Yield runs of consecutive items within both limits; an item above the limit is alone."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and (index - start == most or total + size > most_bytes):
            yield slice(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))
