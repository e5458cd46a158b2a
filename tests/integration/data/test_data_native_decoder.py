"""The decoder in C: damaged images, machines without a compiler, and a damaged cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import google_crc32c
import numpy as np
import pytest
import simplejpeg
from numpy.typing import NDArray

from stoker.data.features.image_decoding import decode_whole
from stoker.data.feed.images import decode_engines, decode_native
from stoker.data.feed.images.decode import JOB, Engine, Status, Target
from stoker.data.feed.images.decode_engines import choose_engine
from stoker.data.ingest.image_store import raw_bytes

ENGINES = ("native", "opencv")
TARGET = Target(height=20, width=24, channels=3, exact=False, antialias=True)


def images() -> list[tuple[int, int, bytes]]:
    """Small ones of many kinds: height, width, bytes."""
    rng = np.random.default_rng(0)
    found = []
    for height, width in ((33, 47), (8, 8), (1, 1), (120, 90), (17, 200)):
        coarse = rng.integers(0, 256, (height // 4 + 2, width // 4 + 2, 3), np.uint8)
        pixels = np.ascontiguousarray(cv2.resize(coarse, (width, height)))
        found += [
            (height, width, bytes(simplejpeg.encode_jpeg(pixels, colorsubsampling=sampling)))
            for sampling in ("444", "422", "420")
        ]
        for options in ([cv2.IMWRITE_JPEG_PROGRESSIVE, 1], [cv2.IMWRITE_JPEG_RST_INTERVAL, 2]):
            found.append((height, width, cv2.imencode(".jpg", pixels, options)[1].tobytes()))
    return found


def jobs_of(chosen: list[tuple[int, int, bytes]], path: Path) -> NDArray[np.void]:
    """All bytes of each image, written one after another, with their checksums."""
    path.write_bytes(b"".join(data for _, _, data in chosen))
    jobs = np.zeros(len(chosen), JOB)
    jobs["length"] = [len(data) for _, _, data in chosen]
    jobs["offset"] = np.cumsum(jobs["length"]) - jobs["length"]
    jobs["crc32c"] = [google_crc32c.value(data) for _, _, data in chosen]
    jobs["height"] = jobs["box_height"] = [height for height, _, _ in chosen]
    jobs["width"] = jobs["box_width"] = [width for _, width, _ in chosen]
    jobs["orientation"] = 1
    jobs["file"] = os.open(path, os.O_RDONLY)
    return jobs


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut, bits flipped, bytes of the headers changed, or a piece put in."""
    made, at = bytearray(data), int(rng.integers(3, len(data)))
    match rng.integers(4):
        case 0:
            return data[:at]
        case 1:
            for place in rng.integers(3, len(data), 4):
                made[place] ^= 1 << int(rng.integers(8))
        case 2:
            for place in rng.integers(3, min(len(data), 400), 8):
                made[place] = int(rng.integers(256))
        case 3:
            made[at : at + 9] = rng.bytes(int(rng.integers(30)))
    return bytes(made)


@pytest.mark.parametrize("name", ENGINES)
def test_damaged_images_neither_crash_nor_touch_their_neighbors(name: str, tmp_path: Path) -> None:
    rng, whole = np.random.default_rng(1), images()
    engine = choose_engine(decode_whole, prefer=name)  # type: ignore[arg-type]  # a string of a Literal
    sound = whole[3]
    alone = engine.decode(jobs_of([sound], tmp_path / "alone"), TARGET)[0]
    ended: set[int] = set()
    for round_ in range(20):
        hurt = [(h, w, damaged(data, rng)) for h, w, data in whole]
        mixed = [image for pair in zip(hurt, [sound] * len(hurt), strict=True) for image in pair]
        jobs = jobs_of(mixed, tmp_path / f"{round_}")
        pixels = engine.decode(jobs, TARGET)
        os.close(int(jobs["file"][0]))
        ended |= set(jobs["status"].tolist())
        assert (jobs["status"][1::2] == Status.DONE).all()
        assert (pixels[1::2] == alone).all()

    assert Status.BROKEN in ended
    assert ended <= {Status.DONE, Status.BROKEN, Status.OTHER_SIZE}


@pytest.mark.parametrize("name", ENGINES)
def test_bytes_that_are_not_what_ingest_wrote_are_told_apart(name: str, tmp_path: Path) -> None:
    engine = choose_engine(decode_whole, prefer=name)  # type: ignore[arg-type]  # a string of a Literal
    jobs = jobs_of([images()[0]] * 4 + [(4, 4, b"no image at all")], tmp_path / "five")
    jobs["crc32c"][0] ^= 1
    jobs["height"][1] += 1
    jobs["length"][3] += 10**6

    engine.decode(jobs, TARGET)

    assert jobs["status"].tolist() == [
        Status.DAMAGED,
        Status.OTHER_SIZE,
        Status.DONE,
        Status.CUT,
        Status.BROKEN,
    ]


def test_threads_change_nothing(tmp_path: Path) -> None:
    from stoker.data.feed.images.decode_native import NativeEngine

    jobs = jobs_of(images() * 3, tmp_path / "many")
    one, five = (NativeEngine(decode_whole, threads=n).decode(jobs, TARGET) for n in (1, 5))

    assert np.array_equal(one, five)


TURNS: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    1: lambda image: image,
    2: lambda image: image[:, ::-1],
    3: lambda image: image[::-1, ::-1],
    4: lambda image: image[::-1],
    5: lambda image: image.swapaxes(0, 1),
    6: lambda image: image.swapaxes(0, 1)[:, ::-1],
    7: lambda image: image.swapaxes(0, 1)[::-1, ::-1],
    8: lambda image: image.swapaxes(0, 1)[::-1],
}
"""EXIF's orientation -> what makes an image upright."""


def box_of(
    upright: NDArray[np.uint8], *, at: tuple[int, int], size: tuple[int, int], flip: bool
) -> NDArray[np.uint8]:
    """What is seen of an upright image where nothing is made smaller or larger."""
    seen = upright[at[0] : at[0] + size[0], at[1] : at[1] + size[1]]
    return seen[:, ::-1] if flip else seen


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("width", [1, 5, 6, 7, 11, 16, 37])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_box_as_large_as_the_result_is_copied(
    channels: int, width: int, flip: bool, exact: bool, tmp_path: Path
) -> None:
    pixels = np.random.default_rng(2).integers(0, 256, (80, 84, channels), np.uint8)
    space = "GRAY" if channels == 1 else "RGB"
    encoded = simplejpeg.encode_jpeg(pixels, quality=95, colorspace=space, colorsubsampling="444")
    decoded = simplejpeg.decode_jpeg(encoded, colorspace=space)
    stored = [(1, raw_bytes(pixels), pixels), *((turn, encoded, decoded) for turn in TURNS)]
    uprights = [TURNS[turn](seen) for turn, _, seen in stored]
    sizes = [upright.shape[:2] for upright in uprights]
    chosen = [(*size, data) for size, (_, data, _) in zip(sizes, stored, strict=True)]
    jobs = jobs_of(chosen, tmp_path / "all")
    jobs["orientation"] = [turn for turn, _, _ in stored]
    jobs["x"], jobs["y"], jobs["box_width"], jobs["box_height"] = 33, 20, width, 30
    jobs["flip"] = flip

    target = Target(height=30, width=width, channels=channels, exact=exact, antialias=True)
    found = choose_engine(decode_whole, prefer="native").decode(jobs, target)

    for image, upright in zip(found, uprights, strict=True):
        wanted = box_of(upright, at=(20, 33), size=(30, width), flip=flip)
        np.testing.assert_array_equal(image, wanted)


@pytest.mark.parametrize("pixels", [4095, 4096, 4097, 12_275, 12_276, 12_277, 30_000])
def test_one_bit_anywhere_is_seen(pixels: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    data = raw_bytes(rng.integers(0, 256, (1, pixels, 1), np.uint8))
    places = [len(data) - 1, *rng.integers(12, len(data), 30).tolist()]
    jobs = jobs_of([(1, pixels, data)] * (1 + len(places)), tmp_path / "many")
    written = bytearray((tmp_path / "many").read_bytes())
    for copy, place in enumerate(places, start=1):
        written[copy * len(data) + place] ^= 1 << int(rng.integers(8))
    (tmp_path / "many").write_bytes(written)

    target = Target(height=1, width=pixels, channels=1, exact=True, antialias=True)
    choose_engine(decode_whole, prefer="native").decode(jobs, target)

    assert jobs["status"].tolist() == [Status.DONE, *[Status.DAMAGED] * len(places)]


@pytest.fixture
def machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[Callable[..., str]]:
    """Chooses an engine as a new process does, with a cache of its own; gives its name."""
    remembered = (
        decode_native.load_library,
        decode_native._check_library,
        decode_engines._warn_once,
    )

    def choose(**environment: str) -> str:
        for name, value in ({"XDG_CACHE_HOME": str(tmp_path)} | environment).items():
            monkeypatch.setenv(name, value)
        for function in remembered:
            function.cache_clear()
        caplog.clear()
        return [choose_engine(decode_whole) for _ in range(3)][-1].name

    monkeypatch.delenv("CC", raising=False)
    yield choose
    for function in remembered:
        function.cache_clear()


def compiler_script(path: Path, *, command: str) -> str:
    path.write_text(f"#!/bin/sh\nexec {command}\n")
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_opencv_decodes_and_one_message_says_so(
    machine: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert machine(PATH=str(tmp_path)) == "opencv"
    assert caplog.text.count("images are decoded by OpenCV") == 1
    assert "no C compiler (cc) is on the PATH" in caplog.text


def test_without_libjpeg_opencv_decodes_and_the_reason_is_the_compilers(
    machine: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # What the compiler sees of a machine that has its own headers and no libjpeg's.
    empty = tmp_path / "headers"
    empty.mkdir()
    (empty / "jerror.h").write_text("#error jpeglib.h: No such file\n")
    assert machine(CC=compiler_script(tmp_path / "cc", command=f'cc -I{empty} "$@"')) == "opencv"
    assert "it does not compile" in caplog.text
    assert "No such file" in caplog.text


@pytest.mark.parametrize(
    ("right", "wrong_one", "why"),
    [
        ("JDCT_ISLOW", "JDCT_IFAST", "does not decode a small JPEG as libjpeg does"),
        ("12582912.0f", "12582913.0f", "does not resize a small image correctly"),
    ],
)
def test_a_library_that_decodes_otherwise_is_not_used(
    right: str,
    wrong_one: str,
    why: str,
    machine: Callable[..., str],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = tmp_path / "decode.c"
    wrong.write_text(decode_native.SOURCE.read_text().replace(right, wrong_one))
    command = f'cc $(echo "$@" | sed s,{decode_native.SOURCE},{wrong},)'
    assert machine(CC=compiler_script(tmp_path / "cc", command=command)) == "opencv"
    assert why in caplog.text


def test_the_library_is_built_once_and_again_when_it_is_damaged(
    machine: Callable[..., str], tmp_path: Path
) -> None:
    def built() -> tuple[Path, int]:
        assert machine() == "native"
        (made,) = (tmp_path / "stoker" / "native").glob("*/compiled.so")
        return made, made.stat().st_mtime_ns

    made, first = built()
    assert built() == (made, first)

    content = bytearray(made.read_bytes())
    content[len(content) // 2] ^= 1
    made.unlink()  # it is mapped: another file must take its place
    made.write_bytes(content)
    assert built()[1] > first
    assert made.read_bytes() != content


def test_a_cache_that_others_can_write_is_not_run(
    machine: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "stoker" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)

    assert machine() == "opencv"
    assert "can be written by others" in caplog.text


def test_engines_are_told_apart_by_their_name() -> None:
    engines: list[Engine] = [
        choose_engine(decode_whole, prefer=name)  # type: ignore[arg-type]  # a string of a Literal
        for name in ENGINES
    ]

    assert [engine.name for engine in engines] == list(ENGINES)
