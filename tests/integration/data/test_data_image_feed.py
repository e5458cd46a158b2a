"""From image files through shards to uint8 batches: agreement, stores, order, and every damage named."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import simplejpeg
import tensorflow as tf
from numpy.typing import NDArray
from PIL import Image

import stoker.transform as st
from stoker.core.errors import DataError
from stoker.data.columns import to_numpy
from stoker.data.dataset import Dataset
from stoker.data.features.image_decoding import decode_images, decode_whole
from stoker.data.features.preprocessing.build import build_transform
from stoker.data.feed.agreement import pixels_agree, share_within
from stoker.data.feed.calls import Calls
from stoker.data.feed.images.augment import AugmentConfig, ColorJitter, RandomResizedCrop
from stoker.data.feed.images.decode import Engine
from stoker.data.feed.images.decode_engines import choose_engine
from stoker.data.feed.images.image_feed import PARALLEL_CALLS, ImageFeed
from stoker.data.feed.images.split_images import ImageSplit
from stoker.data.feed.order import shuffled_indices
from stoker.data.feed.pipeline import Feed
from stoker.data.ingest import ImagesConfig, IngestConfig, ingest
from stoker.data.ingest.image_index import read_image_index
from stoker.train.config import TrainConfig
from stoker.train.setup.feeds import open_feeds

SIZE = (48, 40)
CROPS = AugmentConfig(random_resized_crop=RandomResizedCrop(scale=(0.1, 1)), flip=0.5)
ENGINES = ("native", "opencv")

Pixels = NDArray[np.uint8]


def photo(rng: np.random.Generator, height: int, width: int) -> Pixels:
    """Smooth areas, edges and noise."""
    field = np.zeros((height, width, 3), np.float32)
    for size in (4, 16, 64):
        coarse = rng.standard_normal((height // size + 2, width // size + 2, 3)).astype(np.float32)
        field += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC) * size**0.5
    field = field / field.std() * 50 + 120 + rng.standard_normal((height, width, 1)) * 4
    return np.asarray(field.clip(0, 255), np.uint8)


def encoded(pixels: Pixels, kind: str) -> bytes:
    gray = np.ascontiguousarray(pixels[..., :1])
    if kind == "gray":
        return bytes(simplejpeg.encode_jpeg(gray, colorspace="GRAY", colorsubsampling="Gray"))
    if kind in ("444", "422", "420", "440"):
        return bytes(simplejpeg.encode_jpeg(pixels, colorsubsampling=kind))
    if kind == "cmyk":
        four = np.ascontiguousarray(np.dstack([pixels, gray]))
        return bytes(simplejpeg.encode_jpeg(four, colorspace="CMYK", colorsubsampling="444"))
    stream = io.BytesIO()
    image = Image.fromarray(pixels)
    if kind == "turned":
        exif = Image.Exif()
        exif[0x0112] = 5 + pixels.shape[0] % 4
        image.save(stream, "JPEG", exif=exif)
    else:
        image.save(
            stream,
            *{"progressive": ("JPEG",), "png": ("PNG",), "webp": ("WEBP",)}[kind],
            progressive=True,
            lossless=True,
        )
    return stream.getvalue()


KINDS = ("444", "422", "420", "440", "gray", "progressive", "png", "turned", "cmyk", "webp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(120):
        kind = KINDS[number % len(KINDS)]
        height, width = (int(n) for n in rng.integers(1 if number % 3 else 90, 260, 2))
        path = root / f"class{number % 2}" / f"{number:03d}-{kind}"
        path.parent.mkdir(exist_ok=True)
        ending = {"png": ".png", "webp": ".webp"}.get(kind, ".jpg")
        path.with_suffix(ending).write_bytes(encoded(photo(rng, height, width), kind))
    return root


@pytest.fixture(scope="module")
def stretched(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    config = IngestConfig(source=str(folder), images=ImagesConfig(size=SIZE), shard_rows=40)
    return ingest(config, tmp_path_factory.mktemp("stretched") / "data")


@pytest.fixture(scope="module")
def cropped(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    images = ImagesConfig(size=SIZE, fit="crop")
    return ingest(
        IngestConfig(source=str(folder), images=images), tmp_path_factory.mktemp("cropped") / "data"
    )


def engine(name: str) -> Engine:
    return choose_engine(decode_whole, prefer=name)  # type: ignore[arg-type]  # a string of a Literal


def opened(dataset: Dataset, name: str = "native", *, split: str = "train") -> ImageSplit:
    return ImageSplit(dataset, split, column=dataset.column("image"), engine=engine(name))


def by_the_graph(dataset: Dataset, stored: list[bytes]) -> Pixels:
    shape = dataset.image
    assert shape is not None
    graph = tf.function(
        lambda data: decode_images(data, shape), input_signature=[tf.TensorSpec([None], tf.string)]
    )
    return np.asarray(graph(tf.constant(stored)))


def copied(dataset: Dataset, to: Path) -> Dataset:
    from stoker.data.dataset import load_dataset

    shutil.copytree(dataset.root, to)
    return load_dataset(to)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("fit", ["stretched", "cropped"])
def test_evaluation_gives_what_the_exported_graph_gives(
    fit: str, name: str, request: pytest.FixtureRequest
) -> None:
    dataset = request.getfixturevalue(fit)
    images = opened(dataset, name)
    rows = np.arange(images.rows)
    found, wanted = images.pixels(rows), by_the_graph(dataset, images.encoded(rows))

    assert share_within(found, wanted) == 1.0
    assert np.mean(found != wanted) < 1e-3
    assert pixels_agree(images, lambda data: by_the_graph(dataset, data))


def test_another_decoder_would_be_found_out(stretched: Dataset) -> None:
    images = opened(stretched)

    assert not pixels_agree(images, lambda data: np.full((len(data), *SIZE, 3), 128, np.uint8))


def test_both_engines_see_the_same_training_crops(stretched: Dataset) -> None:
    images = [opened(stretched, name) for name in ENGINES]
    rows = np.arange(images[0].rows)
    native, opencv = (
        each.pixels(rows, augment=CROPS, seed=3, epoch=1).astype(float) for each in images
    )

    # Their filters differ: a triangle over all that is made smaller, against areas.
    by_image = np.abs(native - opencv).mean(axis=(1, 2, 3))
    assert by_image.mean() < 1.5
    assert np.quantile(by_image, 0.95) < 5


@pytest.mark.parametrize("name", ENGINES)
def test_a_crop_shows_its_part_of_the_image(name: str, stretched: Dataset) -> None:
    from stoker.data.feed.images.augment import Views

    images = opened(stretched, name)
    rows = np.arange(images.rows)
    stored = images.encoded(rows)
    wholes = [decode_whole(data, 3) for data in stored]
    boxes = np.array(
        [
            [w.shape[1] // 4, w.shape[0] // 3, max(1, w.shape[1] // 2), max(1, w.shape[0] // 2)]
            for w in wholes
        ],
        np.float32,
    )
    found = images.viewed(rows, Views(boxes=boxes, flips=rows % 2 == 0, exact=False))
    for row, whole in enumerate(wholes):
        left, top, wide, tall = boxes[row].astype(int)
        box = whole[top : top + tall, left : left + wide]
        wanted = np.asarray(tf.image.resize(box, SIZE, antialias=True))
        away = np.abs(found[row][:, ::-1] - wanted if row % 2 == 0 else found[row] - wanted)
        assert away.mean() < 8, (row, box.shape)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("augment", [None, CROPS], ids=["evaluation", "training"])
def test_a_batch_holds_the_same_pixels_however_the_step_is_shared(
    augment: AugmentConfig | None, name: str, stretched: Dataset
) -> None:
    feed = ImageFeed(opened(stretched, name), augment=augment, seed=9)
    step = shuffled_indices(np.arange(32, 64), size=opened(stretched).rows, seed=9, epoch=4)

    def shares(workers: int) -> Pixels:
        return np.concatenate(
            [feed.gather(share, epoch=4) for share in np.array_split(step, workers)]
        )

    assert np.array_equal(shares(1), shares(3))


def test_a_pipeline_gives_the_batches_that_gather_gives(stretched: Dataset) -> None:
    config = AugmentConfig(
        random_resized_crop=CROPS.random_resized_crop, color_jitter=ColorJitter(brightness=0.3)
    )
    feed = ImageFeed(opened(stretched), augment=config, seed=2)
    order = shuffled_indices(np.arange(90), size=90, seed=2, epoch=1)
    steps = [order[:32], order[32:64], order[64:]]
    rows = tf.data.Dataset.from_generator(
        lambda: steps, output_signature=tf.TensorSpec([None], tf.int64)
    )
    batches = rows.map(
        lambda each: feed.read(each, tf.constant(1, tf.int64)),
        num_parallel_calls=PARALLEL_CALLS,
        deterministic=True,
    )
    for each, step in zip(batches, steps, strict=True):
        assert np.array_equal(each["pixels"], feed.gather(step, epoch=1))
        made = tf.function(feed.finish)(each)
        assert made.dtype == tf.uint8
        assert not np.array_equal(made, each["pixels"])


@pytest.mark.parametrize("store", ["resized", "raw"])
@pytest.mark.parametrize("name", ENGINES)
def test_a_smaller_store_shows_nearly_the_same_and_spares_evaluation(
    name: str, store: str, folder: Path, stretched: Dataset, tmp_path: Path
) -> None:
    images = ImagesConfig(size=SIZE, store=store, quality=95)  # type: ignore[arg-type]  # a string of a Literal
    dataset = ingest(IngestConfig(source=str(folder), images=images), tmp_path / "data")
    made, original = opened(dataset, name), opened(stretched, name)
    rows = np.arange(made.rows)

    assert dataset.image_store is not None
    assert dataset.image_store.startswith(store)
    assert dataset.column_hashes["eval"] == stretched.column_hashes["eval"]
    assert dataset.column_hashes["train"]["path"] == stretched.column_hashes["train"]["path"]
    small = made.pixels(rows, augment=CROPS, seed=3, epoch=1).astype(float)
    whole = original.pixels(rows, augment=CROPS, seed=3, epoch=1).astype(float)
    assert np.median(np.abs(small - whole).mean(axis=(1, 2, 3))) < 12


def test_the_index_points_at_each_images_bytes(stretched: Dataset) -> None:
    stored = stretched.table("train").column("image").to_pylist()
    found = [
        (stretched.root / shard.file).read_bytes()[row["offset"] : row["offset"] + row["length"]]
        for shard in stretched.splits["train"]
        for row in read_image_index(stretched.root, shard)[0]
    ]

    assert len(stretched.splits["train"]) > 1
    assert found == stored


@pytest.mark.parametrize("name", ENGINES)
def test_every_flipped_bit_of_an_image_is_found_and_its_row_is_named(
    name: str, stretched: Dataset, tmp_path: Path
) -> None:
    dataset = copied(stretched, tmp_path / "data")
    images, rng = opened(dataset, name), np.random.default_rng(5)
    shard = dataset.splits["train"][0]
    path, index = dataset.root / shard.file, read_image_index(dataset.root, shard)[0]
    whole = path.read_bytes()
    for seed in range(100):
        row = int(rng.integers(len(index)))
        at = int(index[row]["offset"] + rng.integers(index[row]["length"]))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (seed % 8)
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"image {row + 1} of shard .*{shard.file}.*CRC32C"):
            images.pixels(np.array([row]))
    path.write_bytes(whole)
    assert images.pixels(np.array([0])).shape == (1, *SIZE, 3)


@pytest.mark.parametrize("name", ENGINES)
def test_a_shard_that_is_cut_replaced_or_gone_while_it_is_read_is_named(
    name: str, stretched: Dataset, tmp_path: Path
) -> None:
    dataset = copied(stretched, tmp_path / "data")
    images, rows = opened(dataset, name), np.arange(8)
    path = dataset.root / dataset.splits["train"][0].file
    whole = path.read_bytes()
    images.pixels(rows)

    os.truncate(path, len(whole) // 3)
    with pytest.raises(DataError, match=rf"{path} must be {len(whole)} bytes long"):
        images.pixels(rows)
    path.write_bytes(bytes(len(whole)))
    with pytest.raises(DataError, match=r"and 7 more in this batch"):
        images.pixels(rows)
    path.unlink()
    with pytest.raises(DataError, match=r"must be readable.*No such file"):
        images.pixels(rows)


@pytest.mark.parametrize("name", ENGINES)
def test_a_file_that_is_cut_while_it_is_open_gives_an_error_and_no_crash(
    name: str, stretched: Dataset, tmp_path: Path
) -> None:
    dataset = copied(stretched, tmp_path / "data")
    images = opened(dataset, name)
    path = dataset.root / dataset.splits["train"][0].file
    cut = images._engine.decode

    def cutting(jobs: NDArray[np.void], target: object) -> Pixels:
        os.truncate(path, 100)
        return cut(jobs, target)  # type: ignore[arg-type]  # replaced for this test

    images._engine.decode = cutting  # type: ignore[method-assign]  # replaced for this test
    try:
        with pytest.raises(DataError, match="a file that ends before the image does"):
            images.pixels(np.arange(4))
    finally:
        images._engine.decode = cut  # type: ignore[method-assign]  # replaced for this test


def test_a_damaged_or_missing_index_is_named(stretched: Dataset, tmp_path: Path) -> None:
    dataset = copied(stretched, tmp_path / "data")
    shard = dataset.splits["train"][0]
    assert shard.index is not None
    path = dataset.root / shard.index
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1
    path.write_bytes(whole)
    with pytest.raises(DataError, match=r"index\.npy must have the hash"):
        opened(dataset)
    with pytest.raises(DataError, match=r"index\.npy must have the hash"):
        dataset.verify()
    path.unlink()
    with pytest.raises(DataError, match=r"no such file"):
        opened(dataset)


def test_a_failing_pipeline_keeps_the_sentence_for_the_user(
    stretched: Dataset, tmp_path: Path
) -> None:
    dataset = copied(stretched, tmp_path / "data")
    feed = ImageFeed(opened(dataset))
    os.truncate(dataset.root / dataset.splits["train"][0].file, 10)
    rows = tf.data.Dataset.from_tensors(tf.range(4, dtype=tf.int64))

    with pytest.raises(tf.errors.OpError):
        list(rows.map(lambda each: feed.read(each, tf.constant(0, tf.int64))))
    assert feed.failure is not None
    assert "bytes long" in feed.failure.line()


def test_lists_of_varying_length_go_with_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = 60
    table = {
        "picture": [encoded(photo(rng, 24, 24), "444") for _ in range(rows)],
        "tags": [["a", "b", "c"][: row % 4] for row in range(rows)],
        "clicks": [list(range(row % 5)) for row in range(rows)],
        "y": [row % 2 for row in range(rows)],
    }
    pq.write_table(pa.table(table), tmp_path / "d.parquet")
    dataset = ingest(IngestConfig(source=str(tmp_path / "d.parquet")), tmp_path / "data")

    def function(inputs: dict[str, Any]) -> dict[str, Any]:
        return {
            "light": tf.reduce_mean(tf.cast(inputs["picture"], tf.float32), axis=[1, 2, 3]),
            "tags": st.hash_strings(inputs["tags"], 9).to_tensor(0, shape=[None, 2]),
            "clicks": tf.reduce_sum(inputs["clicks"], axis=1),
        }

    transform = build_transform(dataset, function, tmp_path / "t", label="y")
    feed, _ = open_feeds(dataset, transform, config=TrainConfig(), memory_bytes=0)

    columns = transform.serving_columns
    stored = dataset.table("train", columns=[column.name for column in columns])
    raw = {c.name: tf.constant(to_numpy(c, stored.column(c.name)), c.tensor_dtype) for c in columns}
    wanted = transform.apply_features(raw)
    assert isinstance(feed, Feed)
    calls = Calls(
        rows=feed.rows, batch_size=8, steps_per_call=1, seed=1, first=0, last=feed.steps(8)
    )
    order = feed.rows_at(0, 0, feed.rows, seed=1)
    with feed.shuffled(calls) as batches:
        loaded = [feed.load(element)[0] for element in batches]
    for name, values in wanted.items():
        found = np.concatenate([features[name] for features in loaded])
        if name == "light":  # the quick decoder's pixels may differ by 1
            np.testing.assert_allclose(found, values.numpy()[order], atol=1.0)
        else:
            np.testing.assert_array_equal(found, values.numpy()[order])
