"""Augmentation without state: a pure function of (seed, epoch, index).

For each image, a box and a flip are computed, which the decoder applies while it decodes; and three factors
for color jitter, which `image_feed.jitter_colors` applies to the uint8 batch inside the compiled step. So color
jitter does not depend on the decoding engine, is fused with the cast, and needs no CPU time if the step runs on an
accelerator.
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
"""Number of random boxes that are tried for an image before its middle is used, as in torchvision."""

MAX_RATIO = 100
"""Maximum ratio of a box's sides."""

MIN_SCALE = 1e-4
"""Minimum share of an image's area that a box may have: 1 pixel in 100 x 100."""

_COLORS = ("brightness", "contrast", "saturation")


@dataclass(frozen=True, kw_only=True, slots=True)
class RandomResizedCrop:
    """A box of random area and aspect ratio, resized to the model's size.

    Source: torchvision `RandomResizedCrop`; Szegedy et al., "Going deeper with convolutions", 2014.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    """Minimum and maximum area of the box, as a share of the image's area."""

    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Minimum and maximum width of the box divided by its height; the logarithm is distributed uniformly."""

    def __post_init__(self) -> None:
        low, high = self.scale
        if not MIN_SCALE <= low <= high <= 1:
            raise ConfigError(
                "train.augment.random_resized_crop.scale must be a minimum and a maximum, both from "
                f"{MIN_SCALE} to 1",
                got=list(self.scale),
                fix="Write for example `scale: [0.08, 1.0]`.",
            )
        if not 1 / MAX_RATIO <= self.ratio[0] <= self.ratio[1] <= MAX_RATIO:
            raise ConfigError(
                "train.augment.random_resized_crop.ratio must be a minimum and a maximum, both from 1/100 "
                "to 100",
                got=list(self.ratio),
                fix="Write for example `ratio: [0.75, 1.3333]`.",
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ColorJitter:
    """Change brightness, contrast and saturation, in this order, by random factors in [1 - x, 1 + x]."""

    brightness: float = 0.0
    """x for the factor that multiplies every value."""

    contrast: float = 0.0
    """x for the factor that multiplies each value's distance from the image's mean gray."""

    saturation: float = 0.0
    """x for the factor that multiplies each value's distance from its pixel's gray; needs color images."""

    def __post_init__(self) -> None:
        for name in _COLORS:
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ConfigError(
                    f"train.augment.color_jitter.{name} must be from 0 to 1", got=value
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class AugmentConfig:
    """The `train.augment` section: augmentations of training images, in this order."""

    random_resized_crop: RandomResizedCrop | None = None
    """Random box of each image. None: the whole image or its middle is used, according to `data.images.fit`."""

    flip: float = 0.0
    """Probability that an image is mirrored left and right, from 0 to 1."""

    color_jitter: ColorJitter | None = None
    """Random color changes. None: colors are not changed."""

    def __post_init__(self) -> None:
        if not 0 <= self.flip <= 1:
            raise ConfigError("train.augment.flip must be from 0 to 1", got=self.flip)


@dataclass(frozen=True, kw_only=True, slots=True)
class Views:
    """For each image of a batch: the box that is cut out of it, and whether the result is mirrored."""

    boxes: NDArray[np.float32]
    """[batch, 4] left, top, width and height in pixels of the upright image; whole numbers."""

    flips: NDArray[np.bool_]
    """[batch] True: the image is mirrored left and right."""

    exact: bool
    """Whether the pixels must equal what the exported graph computes for the same boxes."""


def views_of(
    shape: ImageShape,
    sizes: NDArray[np.float64],
    *,
    indices: NDArray[np.int64],
    augment: AugmentConfig | None = None,
    seed: int = 0,
    epoch: int = 0,
) -> Views:
    """Return the box and flip of each image: for training, those of one epoch.

    Args:
        shape: The shape that images are converted to.
        sizes: [batch, 2] height and width in pixels.
        indices: [batch] each image's index in the split.
        augment: The augmentations for training; None: for evaluation and serving, where nothing is random.
        seed: The run's seed.
        epoch: The epoch, from 0.

    Source: `features/image_decoding.py` computes the boxes of evaluation in the graph, by the same
    formula.
    """
    if augment is None:
        flips = np.zeros(len(sizes), np.bool_)
        return Views(boxes=_fixed_boxes(shape, sizes), flips=flips, exact=True)
    draws = _draws(seed, epoch, indices, 2 * _TRIES + 3)
    crop, flips = augment.random_resized_crop, draws[:, -1] < augment.flip
    if crop is None:
        return Views(boxes=_fixed_boxes(shape, sizes), flips=flips, exact=True)
    return Views(boxes=_random_boxes(crop, draws[:, :-1], sizes), flips=flips, exact=False)


def _fixed_boxes(shape: ImageShape, sizes: FloatArray) -> NDArray[np.float32]:
    """Return boxes of the whole images, or of their middles.

    They are computed in whole numbers, so that they equal the graph's boxes.
    """
    if shape.fit == "stretch":
        return _boxes(np.zeros_like(sizes), sizes)
    heights, widths = sizes.astype(np.int64).T
    is_tall = heights * shape.width > widths * shape.height
    by_width = (widths * shape.height + shape.width // 2) // shape.width
    by_height = (heights * shape.width + shape.height // 2) // shape.height
    sides = np.where(is_tall, by_width, heights), np.where(is_tall, widths, by_height)
    thousandths = round(shape.crop * 1000)
    middle = np.maximum(1, (np.stack(sides, axis=1) * thousandths + 500) // 1000)
    return _boxes((sizes - middle) // 2, middle)


def color_factors(
    config: ColorJitter, *, seed: int, epoch: int, indices: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Return factors for brightness, contrast and saturation of each image in one epoch: [batch, 3]."""
    draws = _draws(seed, epoch, indices, 2 * _TRIES + 6)[:, -3:]
    reach = np.array([getattr(config, name) for name in _COLORS])
    return (1 + (2 * draws - 1) * reach).astype(np.float32)


def _random_boxes(
    config: RandomResizedCrop, draws: FloatArray, sizes: FloatArray
) -> NDArray[np.float32]:
    """Return for each image the first of ten random boxes that fits, else the largest centered box."""
    heights, widths = sizes.T
    low, high = config.scale
    area = (heights * widths)[:, np.newaxis] * (low + (high - low) * draws[:, :_TRIES])
    log_low, log_high = (math.log(end) for end in config.ratio)
    ratio = np.exp(log_low + (log_high - log_low) * draws[:, _TRIES : 2 * _TRIES])
    drawn = np.stack([np.rint(np.sqrt(area / ratio)), np.rint(np.sqrt(area * ratio))], axis=2)
    fits = ((drawn >= 1) & (drawn <= sizes[:, np.newaxis])).all(axis=2)
    rows, first = np.arange(len(draws)), fits.argmax(axis=1)
    found = np.take_along_axis(fits, first[:, np.newaxis], axis=1)
    chosen = np.where(found, drawn[rows, first], _largest(config, sizes))
    # The random number for left comes before that for top.
    places = np.where(found, draws[:, 2 * _TRIES :][:, ::-1], 0.5)
    return _boxes(np.floor(places * (sizes - chosen + 1)), chosen)


def _largest(config: RandomResizedCrop, sizes: FloatArray) -> FloatArray:
    """Return [batch, 2] height and width of the largest box with an allowed ratio."""
    heights, widths = sizes.T
    ratio = np.clip(widths / heights, *config.ratio)
    sides = np.minimum(heights, widths / ratio), np.minimum(widths, heights * ratio)
    return np.clip(np.rint(np.stack(sides, axis=1)), 1, sizes)


def _boxes(corners: FloatArray, sides: FloatArray) -> NDArray[np.float32]:
    """Return boxes from [batch, 2] top and left, and [batch, 2] height and width."""
    return np.concatenate([corners[:, ::-1], sides[:, ::-1]], axis=1).astype(np.float32)


def _draws(seed: int, epoch: int, indices: NDArray[np.int64], count: int) -> FloatArray:
    """Return [batch, count] uniform numbers in [0, 1) from a generator keyed by all arguments.

    A longer row begins with the same numbers.

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; the mixing
    function is splitmix64's.
    """
    key = mixed(np.array([seed % 2**64], np.uint64)) ^ np.uint64(epoch % 2**64)
    rows = mixed(mixed(key) ^ indices.astype(np.uint64))
    counters = mixed(np.arange(1, count + 1, dtype=np.uint64))
    bits = mixed(rows[:, np.newaxis] + counters)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
