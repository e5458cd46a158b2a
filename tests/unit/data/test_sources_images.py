"""Images: intact ones pass, others are errors, decompression bombs before they are decoded."""

from __future__ import annotations

import io
import random
import re
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import simplejpeg
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from stoker.core.errors import ConfigError
from stoker.data.ingest import ImagesConfig, IngestConfig
from stoker.data.sources.images import check, headers
from stoker.data.sources.images.check import check_image
from stoker.data.sources.images.headers import BadImage, orientation, read_header
from stoker.data.sources.records import Block, Scan, silent
from stoker.data.sources.source import open_source


def pixels(height: int, width: int, channels: int = 3, *, seed: int = 0) -> NDArray[np.uint8]:
    shape = (height, width) if channels == 1 else (height, width, channels)
    noise = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return np.asarray(cv2.GaussianBlur(noise, (0, 0), 1.5), np.uint8)


def png(image: NDArray[Any]) -> bytes:
    return cv2.imencode(".png", image)[1].tobytes()


def jpeg(image: NDArray[Any], *options: int) -> bytes:
    return cv2.imencode(".jpg", image, list(options))[1].tobytes()


def chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def png_of(height: int, width: int, depth: int, color: int, interlace: int, data: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def verdict(data: bytes, *, max_pixels: int = 1_000_000, channels: int | None = None) -> str:
    try:
        check_image(data, max_pixels=max_pixels, channels=channels)
    except BadImage as error:
        return str(error)
    return ""


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def photo(*, seed: int = 0) -> Image.Image:
    return Image.fromarray(pixels(24, 32, seed=seed))


def frames(count: int) -> list[Image.Image]:
    return [photo(seed=seed).quantize(16) for seed in range(1, count)]


WHOLE = {
    "gray PNG": (png(pixels(9, 7, 1)), 1),
    "color PNG": (png(pixels(9, 7)), 3),
    "PNG with alpha": (png(pixels(9, 7, 4)), 3),
    "16-bit PNG": (png(pixels(9, 7).astype(np.uint16) * 257), 3),
    "one-bit PNG": (png_of(3, 9, 1, 0, 0, b"\x00\xff\x80" * 3), 1),
    "interlaced PNG": (png_of(1, 1, 8, 0, 1, b"\x00\x7f"), 1),
    "one-pixel PNG": (png(pixels(1, 1)), 3),
    "gray JPEG": (jpeg(pixels(24, 32, 1)), 1),
    "color JPEG": (jpeg(pixels(24, 32)), 3),
    "progressive JPEG": (jpeg(pixels(24, 32), cv2.IMWRITE_JPEG_PROGRESSIVE, 1), 3),
    "JPEG with restart markers": (jpeg(pixels(24, 32), cv2.IMWRITE_JPEG_RST_INTERVAL, 1), 3),
    "black JPEG": (jpeg(np.zeros((640, 640, 3), np.uint8)), 3),
    "CMYK JPEG": (saved(photo().convert("CMYK"), "JPEG"), 4),
    "WebP": (saved(photo(), "WEBP"), 3),
    "lossless WebP": (saved(photo(), "WEBP", lossless=True), 3),
    "WebP with alpha": (saved(Image.fromarray(pixels(24, 32, 4)), "WEBP", exact=True), 3),
    "one-pixel WebP": (saved(Image.new("RGB", (1, 1)), "WEBP", lossless=True), 3),
    "GIF": (saved(photo().quantize(16), "GIF"), 3),
    "animated GIF": (saved(photo().quantize(16), "GIF", save_all=True, append_images=frames(4)), 3),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_image_passes_and_its_header_is_read(name: str) -> None:
    data, channels = WHOLE[name]

    assert verdict(data) == ""
    assert read_header(data).channels == channels


@pytest.mark.parametrize("name", WHOLE)
def test_trailing_bytes_after_the_end_do_no_harm(name: str) -> None:
    assert verdict(WHOLE[name][0] + b"\x00trailing") == ""


@pytest.mark.parametrize("name", WHOLE)
def test_an_image_cut_anywhere_is_found(name: str) -> None:
    data = WHOLE[name][0]

    whole = [cut for cut in range(len(data)) if verdict(data[:cut]) == ""]

    assert whole == []


@pytest.mark.parametrize("name", [name for name in WHOLE if name.endswith("PNG")])
def test_a_flipped_bit_anywhere_in_a_png_is_found(name: str) -> None:
    data = WHOLE[name][0]

    def flipped(at: int) -> bytes:
        return data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :]

    assert [at for at in range(len(data)) if verdict(flipped(at)) == ""] == []


GIF_HEAD = b"GIF87a \x00\x18\x00\x83\x00\x00\x85\xa1\x7ff\x9c\x87\x88\x8fsk\x8f\x81\x93\x85|\x82\x85wq\x85\x82g\x85~\x8d{~\x81yxv{}j{}\x89r}\x89iwyr{xk"
"""Of a GIF with a small screen; its first frame comes next."""


@given(st.binary(max_size=300), st.sampled_from([b"", *(data[:60] for data, _ in WHOLE.values())]))
@example(
    tail=b"\x00,\x00\x00\x00\x00\x00\x0b\x00\xf9",  # the first frame alone has 180 million pixels
    head=GIF_HEAD,
)
@example(
    tail=b"\x00,\x00\x00\x00\x00\x00\x06\x00\xe4",  # and one at which Pillow only warns
    head=GIF_HEAD,
)
@settings(max_examples=200, deadline=None)
def test_no_bytes_whatever_end_in_another_error_than_a_bad_image(tail: bytes, head: bytes) -> None:
    data = head + tail

    if verdict(data, max_pixels=10_000) == "":
        header = read_header(data)
        assert header.height * header.width <= 10_000


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "is an empty file"),
        (b"<!DOCTYPE html><title>404</title>", "is a web page"),
        (b"GIF89a" + bytes(8), "has 0 x 0 pixels"),
        (b"RIFF\x00\x00\x00\x00WEBPVP8 ", "invalid WebP header"),
        (b"BM\x00\x00", "is a BMP"),
        (b"\x00\x00\x00\x1cftypavif", "is an AVIF"),
        (b"hello", "of an unknown format"),
        (png_of(4, 4, 8, 0, 0, b"\x00" * 10), "cannot be decoded"),
        (png_of(4, 4, 8, 0, 0, b"\x09" * 20), "cannot be decoded"),
        (png_of(4, 4, 8, 3, 0, b"\x00" * 20), "cannot be decoded"),
        (png_of(4, 4, 3, 0, 0, b"\x00" * 20), "invalid PNG header"),
        (png_of(4, 0, 8, 0, 0, b""), "invalid PNG header"),
    ],
)
def test_what_is_not_an_image_that_tensorflow_decodes_is_named(data: bytes, part: str) -> None:
    assert part in verdict(data)


def resized(data: bytes, height: int, width: int) -> bytes:
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def test_a_jpeg_that_claims_more_pixels_than_its_data_can_hold_is_found() -> None:
    assert "too little pixel data" in verdict(resized(jpeg(pixels(16, 16)), 900, 1000))


def test_a_jpeg_that_is_too_large_is_refused_from_its_header() -> None:
    assert "65535 x 65535" in verdict(resized(jpeg(pixels(16, 16)), 65535, 65535))


def test_a_cmyk_image_is_refused_where_gray_is_requested() -> None:
    assert "CMYK" in verdict(WHOLE["CMYK JPEG"][0], channels=1)


def test_a_png_bomb_is_refused_before_it_is_unpacked(
    peak_of: Callable[[Callable[[], object]], int],
) -> None:
    bomb = png_of(20_000, 20_000, 8, 2, 0, b"\x00" * 50_000_000)

    assert "20000 x 20000 pixels" in verdict(bomb, max_pixels=50_000_000)
    assert peak_of(lambda: verdict(bomb, max_pixels=50_000_000)) < 20 << 20


def test_a_png_that_unpacks_to_more_than_its_size_asks_for_stays_small(
    peak_of: Callable[[Callable[[], object]], int],
) -> None:
    bomb = png_of(4, 4, 8, 0, 0, b"\x00" * 200_000_000)

    assert verdict(bomb) == ""
    assert peak_of(lambda: verdict(bomb)) < 20 << 20
    # What it would be: the measure sees it.
    assert peak_of(lambda: zlib.decompress(zlib.compress(bytes(50_000_000)))) > 25 << 20


def test_an_animated_webp_is_refused_whether_or_not_it_has_alpha() -> None:
    for image in (photo(), photo().convert("RGBA")):
        data = saved(
            image, "WEBP", save_all=True, append_images=[photo(seed=1).convert(image.mode)]
        )

        assert "is an animated WebP" in verdict(data)


def test_a_webp_whose_frame_is_not_what_its_header_says_is_found() -> None:
    data = bytearray(saved(Image.fromarray(pixels(24, 32, 4)), "WEBP"))
    data[24] += 1

    assert "is truncated or damaged" in verdict(bytes(data))


def placed(data: bytes, *, left: int, width: int) -> bytes:
    """The same GIF with its first frame elsewhere, on a screen of another width."""
    frame = data.index(b"\x2c\x00\x00\x00\x00")
    moved = data[:6] + struct.pack("<H", width) + data[8 : frame + 1] + struct.pack("<H", left)
    return moved + data[frame + 3 :]


@pytest.mark.parametrize(("left", "width"), [(0, 40), (3, 35), (0, 20)])
def test_a_gif_whose_first_frame_does_not_fill_it_is_refused(left: int, width: int) -> None:
    assert "would decode it wrongly" in verdict(placed(WHOLE["GIF"][0], left=left, width=width))


def test_a_gif_with_a_later_frame_that_would_fill_the_memory_is_refused() -> None:
    still = WHOLE["GIF"][0]
    huge = b"\x2c" + struct.pack("<HHHHB", 0, 0, 60_000, 60_000, 0) + b"\x02\x01\x00\x00"

    assert "million pixels together" in verdict(still[:-1] + huge + still[-1:])


def test_a_gif_whose_later_frame_is_damaged_is_found() -> None:
    whole = WHOLE["animated GIF"][0]
    second = whole.index(b"\x2c\x00\x00\x00\x00", whole.index(b"\x2c\x00\x00\x00\x00") + 1)
    table = 3 << (whole[second + 9] & 7) + 1 if whole[second + 9] & 0x80 else 0
    coded = second + 12 + table

    assert "is truncated or damaged" in verdict(whole[:coded] + b"\xff" * 8 + whole[coded + 8 :])


def packed(codes: list[int], bits: int) -> bytes:
    """A frame's coded data: codes of one width, in blocks; fewer than would make them wider."""
    assert len(codes) < 1 << bits
    number = sum(code << place * (bits + 1) for place, code in enumerate(codes))
    data = number.to_bytes(-(-len(codes) * (bits + 1) // 8), "little")
    return bytes([bits, len(data)]) + data + b"\0"


CLEAR, END = 128, 129


def gif_of(*frames: bytes) -> bytes:
    """6 x 10 pixels and 128 colors; each frame is its coded data."""
    screen = b"GIF89a" + struct.pack("<HHBBB", 6, 10, 0xF6, 0, 0) + bytes(range(128)) * 3
    place = b"\x2c" + struct.pack("<HHHHB", 0, 0, 6, 10, 0)
    return screen + b"".join(place + frame for frame in frames) + b"\x3b"


WHOLE_FRAME = packed([CLEAR, *range(60), END], 7)
NO_FRAME = packed([END, *range(60)], 7)


@pytest.mark.parametrize("frames", [[NO_FRAME], [NO_FRAME, WHOLE_FRAME], [WHOLE_FRAME, NO_FRAME]])
def test_a_gif_whose_coded_data_says_too_early_that_it_ends_is_found(frames: list[bytes]) -> None:
    assert verdict(gif_of(WHOLE_FRAME, WHOLE_FRAME)) == ""
    assert verdict(gif_of(*frames)).startswith("is truncated or damaged (image file is truncated")


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_a_png_or_webp_that_asks_to_be_turned_is_refused(kind: str, turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn

    said = verdict(saved(photo(), kind, exif=exif))

    assert said == (
        ""
        if turn == 1
        else f"must be rotated (Exif orientation {turn}), but only JPEGs are rotated; save it upright"
    )


def test_a_gif_without_colors_is_found() -> None:
    whole = WHOLE["GIF"][0]
    table = 3 << (whole[10] & 7) + 1
    colorless = whole[:10] + bytes([whole[10] & 0x7F]) + whole[11:13] + whole[13 + table :]

    assert "its color table is missing" in verdict(colorless)


def test_a_progressive_jpeg_that_claims_to_be_sequential_is_found() -> None:
    claims = WHOLE["progressive JPEG"][0].replace(b"\xff\xc2", b"\xff\xc0", 1)

    assert "further data after its only scan" in verdict(claims)


@pytest.mark.parametrize("turn", range(1, 9))
def test_the_size_of_a_jpeg_is_that_of_the_upright_picture(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = saved(photo(), "JPEG", exif=exif)

    header = read_header(data)

    assert orientation(data) == turn
    assert (header.height, header.width) == ((24, 32) if turn < 5 else (32, 24))
    assert verdict(data) == ""


def test_exif_after_the_pixels_of_a_png_is_read() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    whole = png(pixels(9, 7))
    asking = whole[:-12] + chunk(b"eXIf", exif.tobytes()[6:]) + whole[-12:]

    assert "Exif orientation 6" in verdict(asking)


def folder_of(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def read(root: Path, **images: Any) -> tuple[Scan, list[Block]]:
    config = IngestConfig(source=str(root), images=ImagesConfig(**images))
    source = open_source(config, labels=["label"])
    scan = source.scan(silent)
    return scan, list(source.blocks(scan))


def test_a_folder_gives_the_untouched_bytes_the_class_and_the_path(tmp_path: Path) -> None:
    cat, dog = png(pixels(8, 6, 1)), png(pixels(8, 6, 1, seed=1))
    folder_of(tmp_path, {"dog/1.png": dog, "cat/ü.png": cat, ".DS_Store": b"x"})

    scan, blocks = read(tmp_path)

    assert scan.image == (8, 6, 1)
    assert [row for block in blocks for row in block.table.to_pylist()] == [
        {"image": cat, "label": "cat", "path": "cat/ü.png"},
        {"image": dog, "label": "dog", "path": "dog/1.png"},
    ]


def test_bad_images_are_named_and_their_neighbors_kept(tmp_path: Path) -> None:
    good, cut = png(pixels(8, 6)), jpeg(pixels(8, 6))[:-2]
    folder_of(tmp_path, {"a/1.png": good, "a/2.jpg": cut, "a/3.jpg": b"<html>", "b/4.png": good})

    _, blocks = read(tmp_path)

    faults = [(fault.file, fault.row, fault.column) for b in blocks for fault in b.faults]
    assert faults == [("a/2.jpg", 1, "image"), ("a/3.jpg", 1, "image")]
    assert "is truncated" in blocks[0].faults[0].reason
    assert [path for b in blocks for path in b.table["path"].to_pylist()] == ["a/1.png", "b/4.png"]


def test_color_among_gray_makes_three_channels(tmp_path: Path) -> None:
    folder_of(tmp_path, {"a/1.png": png(pixels(8, 6, 1)), "b/2.jpg": jpeg(pixels(8, 6))})

    assert read(tmp_path)[0].image == (8, 6, 3)
    assert read(tmp_path, channels=1)[0].image == (8, 6, 1)


def test_images_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    folder_of(tmp_path, {"a/1.png": png(pixels(8, 6)), "b/2.png": png(pixels(6, 8))})

    with pytest.raises(ConfigError) as caught:
        read(tmp_path)

    assert "data.images.size" in str(caught.value)
    assert "a/1.png" in str(caught.value)
    assert "b/2.png" in str(caught.value)
    assert read(tmp_path, size=(4, 5))[0].image == (4, 5, 3)


def test_a_jpeg_header_behind_a_long_profile_is_found(tmp_path: Path) -> None:
    whole = jpeg(pixels(8, 6))
    profile = b"\xff\xe2" + struct.pack(">H", 65_000) + b"p" * 64_998
    folder_of(tmp_path, {"a/1.jpg": whole[:2] + profile * 3 + whole[2:]})

    scan, blocks = read(tmp_path)

    assert scan.image == (8, 6, 3)
    assert sum(block.bad for block in blocks) == 0


def damaged(data: bytes, rng: random.Random) -> bytes:
    """A JPEG with one damage of any kind, in its tables or in its coded data."""
    raw, tables = bytearray(data), data.index(b"\xff\xda") + 14
    at = rng.randrange(2, len(raw) - 1)
    match rng.randrange(8):
        case 0:
            return data[:at]
        case 1:
            return data[: rng.randrange(tables, len(raw))] + b"\xff\xd9"
        case 2:
            raw[at] ^= 1 << rng.randrange(8)
        case 3:
            raw[rng.randrange(2, tables)] ^= 1 << rng.randrange(8)
        case 4:
            raw[rng.randrange(2, tables)] = rng.randrange(256)
        case 5:
            raw[at], raw[at + 1] = raw[at + 1], raw[at]
        case 6:
            raw[at : at + 2] = bytes([0xFF, rng.randrange(256)])
        case 7:
            raw[at : at + 300] = bytes(len(raw[at : at + 300]))
    return bytes(raw)


def jpegs() -> list[bytes]:
    image = pixels(97, 131)
    found = [
        simplejpeg.encode_jpeg(image, quality=85, colorsubsampling=kind)
        for kind in ("444", "422", "420", "440", "411")
    ]
    found += [jpeg(image, cv2.IMWRITE_JPEG_RST_INTERVAL, 2), jpeg(image[:, :, 0])]
    return [*found, jpeg(image, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)]


def test_of_2400_damaged_jpegs_none_passes_that_decoding_all_of_it_would_find() -> None:
    rng = random.Random(0)
    given = [damaged(whole, rng) for whole in jpegs() for _ in range(300)]

    refused = [data for data in given if verdict(data)]
    missed = [
        data
        for data in given
        if not verdict(data)
        and cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_REDUCED_GRAYSCALE_8) is None
    ]

    assert len(refused) > 600
    assert missed == []


def test_the_coded_data_of_an_ordinary_jpeg_is_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(data: bytes, how: int) -> None:
        raise AssertionError("the whole image was decoded")

    monkeypatch.setattr(check, "require_decodable", refuse)

    assert [verdict(data) for data in jpegs()[:-1]] == [""] * 7


@given(st.binary(max_size=700), st.integers(0, 3))
def test_a_scan_ends_at_its_first_marker(coded: bytes, start: int) -> None:
    expected = re.search(rb"\xff+[\x01-\xcf\xd8-\xfe]", coded[start:])

    try:
        found = headers._scan_end(coded, start)
    except BadImage:
        assert expected is None
    else:
        assert expected is not None
        assert found == start + expected.end() - 2
