"""Augmentation without state: what happens to an image is a pure function of (seed, epoch, index).

Geometry becomes a box and a flip for each image, which the decoder applies while it decodes. Colour
becomes three factors for each image, which `jitter.jitter_colors` applies to the uint8 batch inside the
compiled step: there it is one implementation for every engine, fused with the cast, and on an
accelerator it takes no CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import ConfigError
from stoker.data.dataset import ImageShape
from stoker.data.feed.order import mixed

FloatArray = NDArray[np.float64]

_TRIES = 10
"""Boxes that are drawn for an image before the middle is taken, as torchvision draws them."""

MOST_RATIO = 100
"""Longest box, either way; its inverse is the least ratio."""

LEAST_SCALE = 1e-4
"""Smallest share of an image that a box may take: 1 pixel in 100 x 100."""

_COLOURS = ("brightness", "contrast", "saturation")


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomResizedCrop:
    """A box of random area and shape, brought to the model's size.

    Source: torchvision `RandomResizedCrop`; Szegedy et al., "Going deeper with convolutions", 2014.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    """Least and most of the image's area that the box takes."""

    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and most width per height of the box; its logarithm is drawn evenly."""

    def __post_init__(self) -> None:
        low, high = self.scale
        if not LEAST_SCALE <= low <= high <= 1:
            raise ConfigError(
                f"train.augment.random_resized_crop.scale must rise within {LEAST_SCALE} and 1",
                got=list(self.scale),
                fix="Write for example `scale: [0.08, 1.0]`.",
            )
        if not 1 / MOST_RATIO <= self.ratio[0] <= self.ratio[1] <= MOST_RATIO:
            raise ConfigError(
                "train.augment.random_resized_crop.ratio must rise, within 1/100 and 100",
                got=list(self.ratio),
                fix="Write for example `ratio: [0.75, 1.3333]`.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ColorJitter:
    """Brightness, contrast and saturation, each by a factor from [1 - x, 1 + x], in this order."""

    brightness: float = 0.0
    """x of the factor that scales every value."""

    contrast: float = 0.0
    """x of the factor that scales each value's distance from the image's mean grey."""

    saturation: float = 0.0
    """x of the factor that scales each value's distance from its pixel's grey; needs colour."""

    def __post_init__(self) -> None:
        for name in _COLOURS:
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(
                    f"train.augment.color_jitter.{name} must be from 0 to 1", got=value
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentConfig:
    """The `train.augment` section: what is done to training images, in this order."""

    random_resized_crop: RandomResizedCrop | None = None
    """None: the whole image, or its middle, as `data.images.fit` says."""

    flip: float = 0.0
    """How often an image is mirrored left and right, from 0 to 1."""

    color_jitter: ColorJitter | None = None
    """None: colours stay as they are."""

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise ConfigError("train.augment.flip must be from 0 to 1", got=self.flip)


@dataclass(frozen=True, kw_only=True, slots=True)
class Views:
    """Which part of each image of a batch is seen, and how."""

    boxes: NDArray[np.float32]
    """[batch, 4] left, top, width and height in pixels of the upright image; whole numbers."""

    flips: NDArray[np.bool_]
    """[batch] mirrored left and right."""


def evaluation_views(shape: ImageShape, heights: FloatArray, widths: FloatArray) -> Views:
    """What evaluation and serving see of each image; nothing is random.

    Args:
        shape: How images are brought to one size.
        heights: [batch] pixels.
        widths: [batch] pixels.

    Source: `features/images.py` computes the same boxes in the graph, from the same formula.
    """
    none = np.zeros(len(heights), np.bool_)
    if shape.fit == "stretch":
        return Views(boxes=_stacked(0 * widths, 0 * heights, widths, heights), flips=none)
    tall, wide = _middle_sides(shape, heights.astype(np.int64), widths.astype(np.int64))
    left, top = (widths - wide) // 2, (heights - tall) // 2
    return Views(boxes=_stacked(left, top, wide, tall), flips=none)


def _middle_sides(
    shape: ImageShape, heights: NDArray[np.int64], widths: NDArray[np.int64]
) -> tuple[FloatArray, FloatArray]:
    """Height and width of the middle box, in whole numbers: the graph must come to the same."""
    is_tall = heights * shape.width > widths * shape.height
    by_width = (widths * shape.height + shape.width // 2) // shape.width
    by_height = (heights * shape.width + shape.height // 2) // shape.height
    sides = np.where(is_tall, by_width, heights), np.where(is_tall, widths, by_height)
    thousandths = round(shape.crop * 1000)
    tall, wide = (np.maximum(1, (side * thousandths + 500) // 1000) for side in sides)
    return tall.astype(np.float64), wide.astype(np.float64)


def training_views(
    config: AugmentConfig,
    shape: ImageShape,
    *,
    seed: int,
    epoch: int,
    indices: NDArray[np.int64],
    heights: FloatArray,
    widths: FloatArray,
) -> Views:
    """What training sees of each image in one epoch.

    Args:
        config: Which augmentations.
        shape: What is seen without a random crop.
        seed: The run's seed.
        epoch: The epoch, from 0.
        indices: [batch] each image's place in the split.
        heights: [batch] pixels.
        widths: [batch] pixels.
    """
    draws = _draws(seed, epoch, indices, 2 * _TRIES + 3)
    flips = draws[:, -1] < config.flip
    if config.random_resized_crop is None:
        return Views(boxes=evaluation_views(shape, heights, widths).boxes, flips=flips)
    boxes = _random_boxes(config.random_resized_crop, draws[:, :-1], heights, widths)
    return Views(boxes=boxes, flips=flips)


def color_factors(
    config: ColorJitter, *, seed: int, epoch: int, indices: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Brightness, contrast and saturation of each image in one epoch: [batch, 3] factors."""
    draws = _draws(seed, epoch, indices, 2 * _TRIES + 6)[:, -3:]
    reach = np.array([getattr(config, name) for name in _COLOURS])
    return (1 + (2 * draws - 1) * reach).astype(np.float32)


def _random_boxes(
    config: RandomResizedCrop, draws: FloatArray, heights: FloatArray, widths: FloatArray
) -> NDArray[np.float32]:
    """The first of ten drawn boxes that fits, else the largest middle one of an allowed shape."""
    low, high = config.scale
    area = (heights * widths)[:, np.newaxis] * (low + (high - low) * draws[:, :_TRIES])
    log_low, log_high = (math.log(end) for end in config.ratio)
    ratio = np.exp(log_low + (log_high - log_low) * draws[:, _TRIES : 2 * _TRIES])
    wide, tall = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (wide >= 1) & (tall >= 1)
    fits &= (wide <= widths[:, np.newaxis]) & (tall <= heights[:, np.newaxis])
    rows, first = np.arange(len(draws)), fits.argmax(axis=1)
    found = fits[rows, first]
    middle_wide, middle_tall = _middle(config, heights, widths)
    wide = np.where(found, wide[rows, first], middle_wide)
    tall = np.where(found, tall[rows, first], middle_tall)
    places = np.where(found[:, np.newaxis], draws[:, 2 * _TRIES :], 0.5)
    left = np.floor(places[:, 0] * (widths - wide + 1))
    top = np.floor(places[:, 1] * (heights - tall + 1))
    return _stacked(left, top, wide, tall)


def _middle(
    config: RandomResizedCrop, heights: FloatArray, widths: FloatArray
) -> tuple[FloatArray, FloatArray]:
    ratio = np.clip(widths / heights, *config.ratio)
    wide = np.clip(np.rint(np.minimum(widths, heights * ratio)), 1, widths)
    tall = np.clip(np.rint(np.minimum(heights, widths / ratio)), 1, heights)
    return wide, tall


def _stacked(
    left: FloatArray, top: FloatArray, wide: FloatArray, tall: FloatArray
) -> NDArray[np.float32]:
    return np.stack([left, top, wide, tall], axis=1).astype(np.float32)


def _draws(seed: int, epoch: int, indices: NDArray[np.int64], count: int) -> FloatArray:
    """[batch, count] even numbers in [0, 1): a counter-based generator, keyed by all arguments.

    A longer row begins with the same numbers.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the mixing
    function is splitmix64's.
    """
    key = mixed(np.array([seed % 2**64], np.uint64)) ^ np.uint64(epoch % 2**64)
    rows = mixed(mixed(key) ^ indices.astype(np.uint64))
    counters = mixed(np.arange(1, count + 1, dtype=np.uint64))
    bits = mixed(rows[:, np.newaxis] + counters)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
