"""Every kind of image that ingest accepts is decoded in the exported graph, and stands upright."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from typing import Any

import cv2
import numpy as np
import pytest
import tensorflow as tf
from numpy.typing import NDArray
from PIL import Image, ImageOps

from stoker.core.errors import UserError
from stoker.data.dataset import ImageShape
from stoker.data.features.image_decoding import decode_images, decode_whole, headers, orientations
from stoker.data.sources.images.check import check_image
from stoker.data.sources.images.headers import BadImage, orientation
from stoker.registry.exported_model import LoadedModel, load_model

HEIGHT, WIDTH = 24, 32
IMAGE_PIXELS = 10_000

Pixels = NDArray[np.uint8]


def pixels(channels: int, *, seed: int = 0) -> Pixels:
    noise = np.random.default_rng(seed).integers(0, 256, (HEIGHT, WIDTH, channels), np.uint8)
    return np.asarray(cv2.GaussianBlur(noise, (0, 0), 1.5), np.uint8)


PHOTO = Image.fromarray(pixels(3))
OTHER = Image.fromarray(pixels(3, seed=1))
CLEAR = Image.fromarray(pixels(4))
SPOTTED = Image.fromarray(np.random.default_rng(0).integers(0, 4, (HEIGHT, WIDTH), np.uint8), "P")
SPOTTED.putpalette([200, 10, 20, 30, 220, 40, 50, 60, 240, 90, 90, 90])


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def as_ycck(cmyk: bytes) -> bytes:
    """The same coded data, said to be YCCK by the last byte of Adobe's segment."""
    at = cmyk.index(b"Adobe") + 11
    return cmyk[:at] + b"\x02" + cmyk[at + 1 :]


def deep_png(channels: int) -> bytes:
    deep = pixels(channels).astype(np.uint16) * 256 + pixels(channels, seed=2)
    return cv2.imencode(".png", deep.squeeze())[1].tobytes()


KINDS = {
    "JPEG": saved(PHOTO, "JPEG"),
    "JPEG 4:4:4": saved(PHOTO, "JPEG", subsampling=0),
    "progressive JPEG": saved(PHOTO, "JPEG", progressive=True),
    "gray JPEG": saved(PHOTO.convert("L"), "JPEG"),
    "CMYK JPEG": saved(PHOTO.convert("CMYK"), "JPEG"),
    "YCCK JPEG": as_ycck(saved(PHOTO.convert("CMYK"), "JPEG")),
    "PNG": saved(PHOTO, "PNG"),
    "gray PNG": saved(PHOTO.convert("L"), "PNG"),
    "1-bit PNG": saved(PHOTO.convert("1"), "PNG"),
    "palette PNG": saved(SPOTTED, "PNG"),
    "palette PNG, a color transparent": saved(SPOTTED, "PNG", transparency=0),
    "PNG with alpha": saved(CLEAR, "PNG"),
    "gray PNG with alpha": saved(CLEAR.convert("LA"), "PNG"),
    "16-bit PNG": deep_png(3),
    "16-bit gray PNG": deep_png(1),
    "WebP": saved(PHOTO, "WEBP"),
    "lossless WebP": saved(PHOTO, "WEBP", lossless=True),
    "WebP with alpha": saved(CLEAR, "WEBP", exact=True),
    "lossless WebP with alpha": saved(CLEAR, "WEBP", lossless=True, exact=True),
    "gray WebP": saved(PHOTO.convert("L"), "WEBP"),
    "GIF": saved(SPOTTED, "GIF"),
    "animated GIF": saved(SPOTTED, "GIF", save_all=True, append_images=[OTHER.quantize(16)]),
    "GIF with lines in turn": saved(SPOTTED, "GIF", interlace=1),
}
REFUSED = {
    "animated WebP": saved(PHOTO, "WEBP", save_all=True, append_images=[OTHER]),
    "animated WebP with alpha": saved(CLEAR, "WEBP", save_all=True, append_images=[OTHER]),
    "BMP": saved(PHOTO, "BMP"),
    "TIFF": saved(PHOTO, "TIFF"),
    "web page": b"<html>",
    "nothing": b"",
}


def by_another_decoder(data: bytes) -> Pixels:
    """RGB by Pillow; by OpenCV, cut to the high byte, where Pillow cannot hold the depth."""
    image = Image.open(io.BytesIO(data))
    if image.mode.startswith("I"):
        deep = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)
        return np.repeat((np.asarray(deep)[..., None] >> 8).astype(np.uint8), 3, axis=-1)
    # Alpha is left out, not blended: what lies under it is what is compared.
    return np.asarray(image.convert("RGBA"))[..., :3]


def decoded(
    data: list[bytes], *, channels: int = 3, size: tuple[int, int] = (HEIGHT, WIDTH)
) -> Any:
    shape = ImageShape(height=size[0], width=size[1], channels=channels)
    return tf.function(lambda encoded: decode_images(encoded, shape))(tf.constant(data)).numpy()


def test_ingest_accepts_each_kind_and_the_graph_gives_the_pixels_of_another_decoder() -> None:
    found = decoded(list(KINDS.values()))

    for (name, data), image in zip(KINDS.items(), found, strict=True):
        header = check_image(data, max_pixels=IMAGE_PIXELS, channels=3)
        assert (header.height, header.width) == (HEIGHT, WIDTH), name
        np.testing.assert_array_equal(image, by_another_decoder(data), err_msg=name)


def test_as_gray_each_kind_is_within_two_levels_of_another_decoder() -> None:
    kinds = {name: data for name, data in KINDS.items() if name not in ("CMYK JPEG", "YCCK JPEG")}

    found = decoded(list(kinds.values()), channels=1)[..., 0]

    for (name, data), image in zip(kinds.items(), found, strict=True):
        check_image(data, max_pixels=IMAGE_PIXELS, channels=1)
        expected = np.asarray(Image.fromarray(by_another_decoder(data)).convert("L"))
        # Y of a JPEG against the gray of its colors, which were rounded and cut to 0..255.
        assert np.abs(image.astype(int) - expected).max() <= 2, name


def test_what_is_transparent_in_a_gif_is_black() -> None:
    (found,) = decoded([saved(SPOTTED, "GIF", transparency=3)])

    np.testing.assert_array_equal(found[np.asarray(SPOTTED) == 3], 0)
    np.testing.assert_array_equal(
        found[np.asarray(SPOTTED) != 3],
        np.asarray(SPOTTED.convert("RGB"))[np.asarray(SPOTTED) != 3],
    )


@pytest.mark.parametrize("name", REFUSED)
def test_what_ingest_refuses_the_graph_refuses(name: str) -> None:
    with pytest.raises(tf.errors.InvalidArgumentError, match="a JPEG, a PNG, a GIF or a WebP"):
        decoded([KINDS["PNG"], REFUSED[name]])


def test_no_flipped_bit_makes_a_gif_that_ingest_accepts_and_the_graph_does_not() -> None:
    whole = saved(Image.fromarray(np.zeros((20, 30), np.uint8)), "GIF")
    flipped = [
        whole[:place] + bytes([whole[place] ^ 1 << bit]) + whole[place + 1 :]
        for place in range(len(b"GIF89a"), len(whole))
        for bit in range(8)
    ]
    accepted = [data for data in flipped if is_accepted(data)]

    assert 50 < len(accepted) < len(flipped) - 50
    for data in accepted:
        decode_whole(data, 3)


def is_accepted(data: bytes) -> bool:
    try:
        check_image(data, max_pixels=IMAGE_PIXELS, channels=3)
    except BadImage:
        return False
    return True


def exif(turn: int, order: str, *, kind: int = 3, count: int = 1, at: int = 8) -> bytes:
    """TIFF with two entries, the second of them the orientation."""
    value = struct.pack(f"{order}HHIHH", 0x0112, kind, count, turn, 0)
    before = struct.pack(f"{order}HHIHH", 0x0100, 3, 1, 99, 0)
    start = {"<": b"II*\x00", ">": b"MM\x00*"}[order] + struct.pack(f"{order}I", at)
    return start + struct.pack(f"{order}H", 2) + before + value + bytes(4)


def segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + struct.pack(">H", 2 + len(content)) + content


def with_exif(data: bytes, tiff: bytes, *, before: bytes = b"") -> bytes:
    return data[:2] + before + segment(0xE1, b"Exif\x00\x00" + tiff) + data[2:]


TURNED = {
    (turn, order): with_exif(KINDS["JPEG"], exif(turn, order))
    for turn in range(1, 9)
    for order in "<>"
}


def test_each_orientation_in_both_byte_orders_is_as_another_decoder_has_it() -> None:
    for lying in (False, True):
        size = (WIDTH, HEIGHT) if lying else (HEIGHT, WIDTH)
        some = {key: data for key, data in TURNED.items() if (key[0] >= 5) == lying}
        found = decoded(list(some.values()), size=size)

        for (key, data), image in zip(some.items(), found, strict=True):
            header = check_image(data, max_pixels=IMAGE_PIXELS, channels=3)
            assert (header.height, header.width) == size, key
            upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
            np.testing.assert_array_equal(image, np.asarray(upright), err_msg=str(key))


def test_a_lying_picture_is_turned_before_it_is_resized() -> None:
    (found,) = decoded([TURNED[6, ">"]], size=(8, 6))

    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(TURNED[6, ">"])))
    np.testing.assert_array_equal(found, np.round(tf.image.resize(np.asarray(upright), [8, 6])))


JPEG = KINDS["JPEG"]
PLAIN = JPEG[:2] + JPEG[20:]
"""Without the JFIF segment, so that Exif is the only one."""

ASKED = {
    "behind JFIF and a comment": (
        with_exif(PLAIN, exif(6, "<"), before=JPEG[2:20] + segment(0xFE, b"hello")),
        6,
    ),
    "the second Exif is not read": (with_exif(with_exif(PLAIN, exif(3, "<")), exif(6, "<")), 6),
    "none": (PLAIN, 1),
    "0": (with_exif(PLAIN, exif(0, "<")), 1),
    "9": (with_exif(PLAIN, exif(9, ">")), 1),
    "of another type": (with_exif(PLAIN, exif(6, "<", kind=4)), 1),
    "two values": (with_exif(PLAIN, exif(6, "<", count=2)), 1),
    "a directory beyond the end": (with_exif(PLAIN, exif(6, "<", at=0xFFFFFFFF)), 1),
    "a directory that is the header": (with_exif(PLAIN, exif(6, "<", at=0)), 1),
    "cut in its directory": (with_exif(PLAIN, exif(6, "<")[:20]), 1),
    "cut in its header": (with_exif(PLAIN, b"II*"), 1),
    "empty": (with_exif(PLAIN, b""), 1),
    "a file that ends in it": (with_exif(PLAIN, exif(6, "<"))[:40], 1),
    "behind more segments than are read": (
        with_exif(PLAIN, exif(6, "<"), before=segment(0xE2, b"p") * 16),
        1,
    ),
    "behind the tables": (with_exif(PLAIN, exif(6, "<"), before=segment(0xDB, b"q")), 1),
    "a segment of no length": (PLAIN[:2] + b"\xff\xe1\x00\x00" + PLAIN[2:], 1),
    "a PNG": (KINDS["PNG"], 1),
    "nothing": (b"", 1),
    "two bytes": (b"\xff\xd8", 1),
}


@pytest.mark.parametrize("name", ASKED)
def test_odd_exif_gives_a_known_orientation(name: str) -> None:
    data, expected = ASKED[name]

    assert orientation(data) == expected


TELLING = np.array([0, 1, 2, 3, 6, 0x12, 0xE1, 0xFF], np.uint8)


def test_the_graph_reads_exif_as_ingest_does_whatever_the_bytes() -> None:
    random = np.random.default_rng(0)
    tried = [data for data, _ in ASKED.values()]
    for data in TURNED.values():
        for _ in range(200):
            broken = bytearray(data[:80])
            for at in random.integers(0, len(broken), random.integers(1, 5)):
                broken[at] = (
                    random.choice(TELLING) if random.random() < 0.8 else random.integers(256)
                )
            tried.append(bytes(broken[: random.integers(0, 81)]))

    found = tf.function(lambda data: orientations(data, headers(data)))(tf.constant(tried)).numpy()

    expected = [orientation(data) for data in tried]
    assert set(expected) == set(range(1, 9))
    np.testing.assert_array_equal(found, expected)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    """The graph in a SavedModel, loaded as TensorFlow Serving loads it."""
    shape = ImageShape(height=HEIGHT, width=WIDTH, channels=3)

    class Decoder(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec([None], tf.string, name="image")])
        def __call__(self, image: tf.Tensor) -> dict[str, tf.Tensor]:
            return {"pixels": decode_images(image, shape)}

    folder = tmp_path_factory.mktemp("served") / "model"
    decoder = Decoder()
    tf.saved_model.save(decoder, str(folder), signatures=decoder.__call__)
    model = load_model(folder)
    yield model
    model.close()


def test_the_served_model_decodes_what_the_graph_decodes(served: LoadedModel) -> None:
    data = [*KINDS.values(), *TURNED.values()]

    found = served.call("serving_default", {"image": np.array(data, object)})["pixels"]

    np.testing.assert_array_equal(found, decoded(data))


@pytest.mark.parametrize("name", REFUSED)
def test_the_served_model_names_what_it_refuses(served: LoadedModel, name: str) -> None:
    with pytest.raises(UserError, match="a JPEG, a PNG, a GIF or a WebP that is not animated"):
        served.call("serving_default", {"image": np.array([REFUSED[name]], object)})


def test_tensorflow_decodes_every_damaged_jpeg_that_the_check_passes() -> None:
    rng = np.random.default_rng(0)
    whole = saved(PHOTO, "JPEG", quality=90)
    refused, failed = 0, []
    for number in range(500):
        raw = bytearray(whole)
        at = int(rng.integers(2, len(raw)))
        raw[at : at + int(rng.integers(1, 3))] = rng.bytes(int(rng.integers(0, 4)))
        try:
            check_image(bytes(raw), max_pixels=IMAGE_PIXELS, channels=3)
        except BadImage:
            refused += 1
            continue
        try:
            tf.io.decode_jpeg(bytes(raw))
        except tf.errors.InvalidArgumentError:
            failed.append(number)

    assert 100 < refused < 450
    assert failed == []
