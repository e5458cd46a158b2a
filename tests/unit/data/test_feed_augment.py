"""Augmentation: a pure function of (seed, epoch, index), within the image, as its settings say."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.errors import ConfigError
from stoker.data.dataset import ImageShape
from stoker.data.feed.images.augment import (
    AugmentConfig,
    ColorJitter,
    RandomResizedCrop,
    Views,
    color_factors,
    views_of,
)
from stoker.data.feed.images.image_feed import jitter_colors

GOLDEN = Path(__file__).parent / "golden_augment.json"
SHAPE = ImageShape(height=24, width=32, channels=3)
EVERYTHING = AugmentConfig(
    random_resized_crop=RandomResizedCrop(), flip=0.5, color_jitter=ColorJitter(brightness=0.4)
)

sizes = st.lists(st.tuples(st.integers(1, 4000), st.integers(1, 4000)), min_size=1, max_size=40)


def training_views(
    found: list[tuple[int, int]],
    indices: np.ndarray,
    *,
    config: AugmentConfig = EVERYTHING,
    seed: int = 0,
    epoch: int = 0,
) -> Views:
    sizes = np.array(found, np.float64)
    return views_of(SHAPE, sizes, indices=indices, augment=config, seed=seed, epoch=epoch)


@given(found=sizes, seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 10**6))
def test_a_box_lies_within_its_image_and_is_made_of_whole_pixels(
    found: list[tuple[int, int]], seed: int, epoch: int
) -> None:
    left, top, wide, tall = training_views(
        found, np.arange(len(found)), seed=seed, epoch=epoch
    ).boxes.T
    heights, widths = np.array(found).T

    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (wide >= 1).all()
    assert (tall >= 1).all()
    assert (left + wide <= widths).all()
    assert (top + tall <= heights).all()
    assert (left == np.rint(left)).all()
    assert (wide == np.rint(wide)).all()


@given(count=st.integers(1, 60), cut=st.integers(0, 60), seed=st.integers(0, 10**6), data=st.data())
def test_an_image_is_augmented_alike_in_whatever_batch_it_stands(
    count: int, cut: int, seed: int, data: st.DataObject
) -> None:
    indices = np.array(data.draw(st.permutations(range(count))), np.int64)
    found = [(100 + int(index), 200) for index in indices]
    cut = min(cut, count)
    whole = training_views(found, indices, seed=seed, epoch=3)
    parts = [
        training_views(found[part], indices[part], seed=seed, epoch=3)
        for part in (slice(0, cut), slice(cut, None))
        if found[part]
    ]

    assert np.array_equal(whole.boxes, np.concatenate([part.boxes for part in parts]))
    assert np.array_equal(whole.flips, np.concatenate([part.flips for part in parts]))


def test_epochs_seeds_and_images_are_unlike_one_another() -> None:
    indices, found = np.arange(1000), [(400, 500)] * 1000
    runs = [
        training_views(found, indices, seed=seed, epoch=epoch).boxes.tobytes()
        for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]
    ]
    one = training_views(found, indices)

    assert len(set(runs)) == 4
    assert len(np.unique(one.boxes, axis=0)) > 990


def test_areas_shapes_places_and_flips_are_spread_as_the_settings_say() -> None:
    count = 20_000
    config = AugmentConfig(
        random_resized_crop=RandomResizedCrop(scale=(0.2, 0.6), ratio=(0.5, 2.0)), flip=0.25
    )
    views = training_views([(1000, 1000)] * count, np.arange(count), config=config)
    left, _, wide, tall = views.boxes.T
    areas, ratios = wide * tall / 1e6, np.log(wide / tall)

    assert np.quantile(areas, [0, 0.5, 1]) == pytest.approx([0.2, 0.4, 0.6], abs=0.01)
    assert np.quantile(ratios, [0, 0.5, 1]) == pytest.approx([np.log(0.5), 0, np.log(2)], abs=0.02)
    assert np.mean(left / np.maximum(1, 1000 - wide)) == pytest.approx(0.5, abs=0.01)
    assert views.flips.mean() == pytest.approx(0.25, abs=0.01)


def test_where_no_box_of_the_wanted_area_fits_the_middle_is_taken() -> None:
    config = AugmentConfig(
        random_resized_crop=RandomResizedCrop(scale=(1.0, 1.0), ratio=(1.0, 1.0))
    )
    views = training_views([(100, 400), (400, 100)], np.arange(2), config=config)

    assert views.boxes.tolist() == [[150, 0, 100, 100], [0, 150, 100, 100]]


def test_without_a_crop_training_sees_what_evaluation_sees() -> None:
    sizes = np.array([[300.0, 200.0], [24.0, 32.0]])
    views = views_of(SHAPE, sizes, indices=np.arange(2), augment=AugmentConfig(flip=1.0))

    assert np.array_equal(views.boxes, views_of(SHAPE, sizes, indices=np.arange(2)).boxes)
    assert views.flips.all()


def test_the_middle_crop_has_the_shape_that_the_model_sees() -> None:
    shape = ImageShape(height=224, width=224, channels=3, fit="crop")
    sizes = np.array([[375.0, 500.0], [256.0, 341.0]])
    views = views_of(shape, sizes, indices=np.arange(2))

    assert views.boxes.tolist() == [[86, 23, 328, 328], [58, 16, 224, 224]]


def test_augmentation_is_the_same_in_every_version() -> None:
    views = training_views(
        [(375, 500), (1200, 1600), (64, 48)], np.array([0, 7, 10**9]), seed=5, epoch=2
    )
    factors = color_factors(
        ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
        seed=5,
        epoch=2,
        indices=np.array([0, 7, 10**9]),
    )
    found = {
        "boxes": views.boxes.tolist(),
        "flips": views.flips.tolist(),
        "factors": np.round(factors.astype(float), 6).tolist(),
    }

    assert found == json.loads(GOLDEN.read_text())


def test_factors_of_one_change_no_color() -> None:
    images = np.random.default_rng(0).integers(0, 256, (4, 6, 5, 3), np.uint8)

    made = jitter_colors(tf.constant(images), tf.ones([4, 3]))

    assert np.array_equal(made, images)


def test_colors_change_as_the_definitions_say() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 6, 5, 3), np.uint8)
    factors = np.array([[0.5, 1, 1], [1, 0.0, 1], [1, 1, 0.0]], np.float32)

    made = np.asarray(jitter_colors(tf.constant(images), tf.constant(factors))).astype(float)

    gray = images.astype(float) @ [0.299, 0.587, 0.114]
    assert np.abs(made[0] - images[0] * 0.5).max() <= 0.51
    assert np.abs(made[1] - gray[1].mean()).max() <= 0.51
    assert np.abs(made[2] - gray[2][..., np.newaxis]).max() <= 0.51


def test_gray_images_take_jitter_too() -> None:
    images = np.full((2, 3, 3, 1), 100, np.uint8)

    made = jitter_colors(tf.constant(images), tf.constant([[1.5, 1, 0.3], [0.5, 1, 2.0]]))

    assert np.asarray(made)[:, 0, 0, 0].tolist() == [150, 50]


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: RandomResizedCrop(scale=(0.5, 0.1)), "scale"),
        (lambda: RandomResizedCrop(ratio=(0.0, 1.0)), "ratio"),
        (lambda: ColorJitter(contrast=1.5), "contrast"),
        (lambda: AugmentConfig(flip=2), "flip"),
    ],
)
def test_a_setting_out_of_range_is_named(make: object, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make()  # type: ignore[operator]  # an object that can be called
