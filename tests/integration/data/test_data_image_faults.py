"""What can be wrong with an image of a folder: named by default, left out and counted on request."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from stoker.core.errors import DataError
from stoker.data.dataset import Dataset
from stoker.data.ingest import ImagesConfig, IngestConfig, ingest

SIZE = (12, 16)
NEIGHBORS = 8
"""Good images next to the bad one; each split gets some."""


def photo(*, seed: int = 0, mode: str = "RGB") -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (*SIZE, 3), np.uint8)
    return Image.fromarray(pixels).convert(mode)


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)


def png_bomb() -> bytes:
    """20,000 x 20,000 pixels of zeros: 1.2 GB decoded from 1.2 MB."""
    lines, line_bytes = 20_000, 60_001
    header = struct.pack(">IIBBBBB", lines, lines, 8, 2, 0, 0, 0)
    # After a full flush the next hundred lines are packed to the same bytes.
    packer = zlib.compressobj(9, wbits=-15)
    hundred = packer.compress(bytes(100 * line_bytes)) + packer.flush(zlib.Z_FULL_FLUSH)
    last = zlib.compressobj(9, wbits=-15).flush()
    adler = struct.pack(">I", (lines * line_bytes % 65_521) << 16 | 1)
    packed = b"\x78\xda" + hundred * (lines // 100) + last + adler
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")
    )


def moving(kind: str) -> bytes:
    return saved(photo(), kind, save_all=True, append_images=[photo(seed=1)])


def lying() -> bytes:
    """Stored lying: it stands upright when it is turned by a quarter."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(photo().transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif)


JPEG = saved(photo(), "JPEG")
PNG = saved(photo(), "PNG")

BAD = {
    "half a JPEG": ("jpg", JPEG[: len(JPEG) // 2], "is truncated"),
    "half a PNG": ("png", PNG[: len(PNG) // 2], "is truncated"),
    "half a WebP": ("webp", saved(photo(), "WEBP")[:80], "is truncated"),
    "half a GIF": ("gif", saved(photo(), "GIF")[:900], "is truncated"),
    "a PNG with a flipped bit": ("png", PNG[:60] + bytes([PNG[60] ^ 1]) + PNG[61:], "checksum"),
    "a web page under .jpg": ("jpg", b"<!DOCTYPE html><title>404</title>", "is a web page"),
    "an empty file": ("jpg", b"", "is an empty file"),
    "text": ("png", b"not an image", "of an unknown format"),
    "a BMP under .png": ("png", saved(photo(), "BMP"), "is a BMP"),
    "an animated WebP": ("webp", moving("WEBP"), "is an animated WebP"),
    "a PNG bomb": ("png", png_bomb(), "has 20000 x 20000 pixels"),
}
GOOD = {
    "1 x 1": ("png", saved(photo().resize((1, 1)), "PNG")),
    "CMYK": ("jpg", saved(photo(mode="CMYK"), "JPEG")),
    "16 bits": ("png", saved(photo(mode="L").convert("I;16"), "PNG")),
    "gray with alpha": ("png", saved(photo(mode="LA"), "PNG")),
    "a palette": ("png", saved(photo(mode="P"), "PNG")),
    "a JPEG under .png": ("png", JPEG),
    "WebP": ("webp", saved(photo(), "WEBP")),
    "GIF": ("gif", saved(photo(), "GIF")),
    "animated GIF": ("gif", moving("GIF")),
    "lying on its side": ("jpg", lying()),
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of two classes with good images."""
    root = tmp_path / "source"
    for number in range(NEIGHBORS):
        path = root / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(saved(photo(seed=number), "PNG"))
    return root


def ingested(
    source: Path, *, max_bad_rows: int = 0, size: tuple[int, int] | None = SIZE
) -> Dataset:
    config = IngestConfig(
        source=str(source),
        splits={"train": 0.5, "eval": 0.5},
        max_bad_rows=max_bad_rows,
        images=ImagesConfig(size=size),
    )
    return ingest(config, source.parent / "data", label="label")


def paths(dataset: Dataset) -> set[str]:
    return {path for split in dataset.splits for path in dataset.table(split)["path"].to_pylist()}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_stops_ingest_and_is_named(source: Path, name: str) -> None:
    ending, data, reason = BAD[name]
    (source / "cat" / f"bad.{ending}").write_bytes(data)

    with pytest.raises(DataError) as caught:
        ingested(source)

    assert f"cat/bad.{ending}" in str(caught.value)
    assert reason in str(caught.value)
    assert not (source.parent / "data" / "manifest.json").exists()


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_left_out_and_counted_and_its_neighbors_kept(
    source: Path, name: str
) -> None:
    ending, data, reason = BAD[name]
    (source / "cat" / f"bad.{ending}").write_bytes(data)

    dataset = ingested(source, max_bad_rows=1)

    assert [(bad.file, bad.column) for bad in dataset.bad_rows] == [(f"cat/bad.{ending}", "image")]
    assert reason in dataset.bad_rows[0].reason
    assert len(paths(dataset)) == NEIGHBORS


@pytest.mark.parametrize("name", GOOD)
def test_an_unusual_image_is_kept(source: Path, name: str) -> None:
    ending, data = GOOD[name]
    (source / "cat" / f"odd.{ending}").write_bytes(data)

    dataset = ingested(source)

    assert dataset.bad_rows == ()
    assert f"cat/odd.{ending}" in paths(dataset)


def test_a_picture_that_lies_on_its_side_has_the_size_of_those_that_stand(source: Path) -> None:
    (source / "cat" / "lying.jpg").write_bytes(lying())

    dataset = ingested(source, size=None)

    assert dataset.image is not None
    assert (dataset.image.height, dataset.image.width) == SIZE


def test_a_png_bomb_is_refused_before_it_takes_memory(source: Path) -> None:
    (source / "cat" / "bomb.png").write_bytes(BAD["a PNG bomb"][1])
    program = f"""
import pathlib, re
from stoker.data.ingest import ImagesConfig, IngestConfig, ingest
status = pathlib.Path("/proc/self/status")
resident = lambda what: int(re.search(what + r":\\s+(\\d+)", status.read_text())[1])
config = IngestConfig(source={str(source)!r}, max_bad_rows=1, images=ImagesConfig(size={SIZE}))
pathlib.Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
ingest(config, pathlib.Path({str(source.parent / "data")!r}), label="label")
print(resident("VmHWM") - before)
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    # Decoded it would take 1,200 MB.
    assert int(found.stdout) < 200_000


def test_a_link_that_leads_out_of_the_folder_is_refused(source: Path) -> None:
    outside = source.parent / "secret.png"
    outside.write_bytes(PNG)
    (source / "cat" / "link.png").symlink_to(outside)

    with pytest.raises(DataError, match=r"link\.png must lead to a file inside"):
        ingested(source)


def test_a_fifo_or_a_folder_among_the_images_is_refused_at_once(source: Path) -> None:
    os.mkfifo(source / "cat" / "pipe.png")
    with pytest.raises(DataError, match="a FIFO"):
        ingested(source)
    (source / "cat" / "pipe.png").unlink()

    (source / "cat" / "folder.png").mkdir()
    with pytest.raises(DataError, match="a folder"):
        ingested(source)


def test_an_image_that_changes_while_it_is_read_stops_ingest(source: Path) -> None:
    def change(done: int, total: int | None) -> None:
        if total is None:
            (source / "cat" / "0.png").write_bytes(saved(photo(seed=99), "PNG"))

    config = IngestConfig(source=str(source), splits={"train": 0.5, "eval": 0.5})

    with pytest.raises(DataError, match="must not change while it is read"):
        ingest(config, source.parent / "data", label="label", progress=change)


def test_copies_of_an_image_never_stand_on_both_sides_of_the_split(source: Path) -> None:
    for number in range(NEIGHBORS):
        name = source / "dog" / f"copy-{number}.png"
        name.write_bytes((source / ("cat", "dog")[number % 2] / f"{number}.png").read_bytes())

    dataset = ingested(source)

    train, evaluation = (
        set(dataset.table(split)["image"].to_pylist()) for split in ("train", "eval")
    )
    assert len(train | evaluation) == NEIGHBORS
    assert not train & evaluation
