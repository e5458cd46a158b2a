"""Encoded images in, decoded tensors inside: the decoding is part of the graph."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from tests.datasets import write_dataset

import stoker.transform as st
from stoker.core.errors import ConfigError
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, ImageShape
from stoker.data.features.preprocessing.build import build_transform

COLUMNS = (
    Column(name="image", dtype="image"),
    Column(name="label", dtype="string"),
    Column(name="path", dtype="string"),
)

PIXELS = [np.random.default_rng(index).integers(0, 256, (8, 6, 3), np.uint8) for index in range(20)]


def encode(pixels: np.ndarray, extension: str) -> bytes:
    return cv2.imencode(extension, pixels[..., ::-1])[1].tobytes()


def make_dataset(root: Path, images: list[bytes]) -> Dataset:
    labels = ["cat", "dog"] * (len(images) // 2)
    table = pa.table({"image": images, "label": labels, "path": [f"{n}" for n in labels]})
    image = ImageShape(height=8, width=6, channels=3)
    return write_dataset(root, COLUMNS, {"train": [table]}, image=image)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(
        tmp_path_factory.mktemp("images"), [encode(pixels, ".png") for pixels in PIXELS]
    )


def test_without_a_function_the_model_sees_the_pixels(dataset: Dataset, tmp_path: Path) -> None:
    transform = build_transform(dataset, None, tmp_path / "t", label="label")
    found = transform.apply_features(
        {"image": tf.constant([encode(pixels, ".png") for pixels in PIXELS])}
    )

    assert [(f.name, f.dtype, f.shape) for f in transform.features] == [
        ("image", "uint8", (8, 6, 3))
    ]
    assert [column.name for column in transform.serving_columns] == ["image"]
    assert transform.output.classes == ("cat", "dog")
    np.testing.assert_array_equal(found["image"], PIXELS)


def test_jpeg_is_decoded_as_accurately_as_libjpeg_can(dataset: Dataset, tmp_path: Path) -> None:
    transform = build_transform(dataset, None, tmp_path / "t", label="label")
    jpeg = encode(PIXELS[0], ".jpg")

    found = transform.apply_features({"image": tf.constant([jpeg])})["image"].numpy()[0]

    expected = cv2.imdecode(np.frombuffer(jpeg, np.uint8), cv2.IMREAD_COLOR)
    assert expected is not None
    np.testing.assert_array_equal(found, expected[..., ::-1])


def test_image_of_another_size_is_resized_and_rounded(dataset: Dataset, tmp_path: Path) -> None:
    transform = build_transform(dataset, None, tmp_path / "t", label="label")
    large = np.repeat(np.repeat(PIXELS[0], 3, axis=0), 2, axis=1)
    inputs = {"image": tf.constant([encode(large, ".png"), encode(PIXELS[1], ".png")])}

    found = transform.apply_features(inputs)["image"].numpy()

    np.testing.assert_array_equal(found[0], np.round(tf.image.resize(large, [8, 6])))
    np.testing.assert_array_equal(found[1], PIXELS[1])


def test_analyzers_take_all_pixels_of_all_images(dataset: Dataset, tmp_path: Path) -> None:
    def function(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        image = inputs["image"]
        return {
            "z": st.scale_to_z_score(image),
            "buckets": st.bucketize(image, 4),
            "dark": tf.cast(image, tf.float32) - tf.cast(st.min(image), tf.float32),
        }

    transform = build_transform(dataset, function, tmp_path / "t", label="label")
    encoded = [encode(pixels, ".png") for pixels in PIXELS]
    found = transform.apply_features({"image": tf.constant(encoded)})
    pixels = np.array(PIXELS, np.float64)
    cuts = np.sort(pixels.ravel())[[i * pixels.size // 4 for i in (1, 2, 3)]]

    np.testing.assert_allclose(found["z"], (pixels - pixels.mean()) / pixels.std(), atol=1e-5)
    np.testing.assert_array_equal(found["buckets"], np.searchsorted(cuts, pixels, side="right"))
    np.testing.assert_array_equal(found["dark"], pixels - pixels.min())


def test_no_image_at_all_gives_an_empty_batch(dataset: Dataset, tmp_path: Path) -> None:
    transform = build_transform(dataset, None, tmp_path / "t", label="label")

    found = transform.apply_features({"image": tf.zeros([0], tf.string)})

    assert found["image"].shape.as_list() == [0, 8, 6, 3]


def test_bytes_that_are_not_an_image_are_refused(tmp_path: Path) -> None:
    images = [encode(pixels, ".png") for pixels in PIXELS[:3]] + [b"<html>"]

    with pytest.raises(ConfigError, match="must work on every row"):
        build_transform(make_dataset(tmp_path / "d", images), None, tmp_path / "t", label="label")


def test_images_that_are_decoded_already_give_the_same_features(
    dataset: Dataset, tmp_path: Path
) -> None:
    def preprocessing_fn(inputs: dict[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        image = tf.cast(inputs["image"], tf.float32)
        return {
            "scaled": st.scale_to_0_1(image),
            "length": tf.strings.length(inputs["path"]),
            "kind": inputs["label"],
        }

    transform = build_transform(dataset, preprocessing_fn, tmp_path / "t", label="kind")
    paths = tf.constant([f"{n}/image" for n in range(len(PIXELS))])
    encoded = tf.constant([encode(pixels, ".png") for pixels in PIXELS])

    wanted = transform.apply_features({"image": encoded, "path": paths})
    found = transform.apply_decoded({"image": tf.constant(np.stack(PIXELS)), "path": paths})

    assert set(found) == {"scaled", "length"}
    for name in found:
        np.testing.assert_array_equal(found[name], wanted[name])
