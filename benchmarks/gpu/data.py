"""Photographs and their TFRecord files, made on all cores: 16 cores make 9,600 in seconds."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import simplejpeg
from generate import CLASSES, KINDS, PHOTOGRAPHS_OF_A_SCENE, Kind, photograph, scene
from google_crc32c import value as crc32c

DONE = "done"
"""File that is written last."""


def photographs(folder: Path, *, count: int, height: int, width: int) -> Path:
    """A folder of JPEG files by class, created if it is missing."""
    done = folder / DONE
    if not done.is_file():
        kind = replace(KINDS[0], name=folder.name, images=count, height=height, width=width)
        scenes = range(0, count, PHOTOGRAPHS_OF_A_SCENE)
        _on_all_cores(_write_scene, [(folder, kind, first) for first in scenes])
        done.write_text("complete\n")
    return folder / "photos"


def records(photos: Path, *, files: int) -> list[Path]:
    """The same photographs as TFRecord files, as in TensorFlow's guide on input pipelines."""
    folder = photos.parent / "tfrecord"
    paths = [folder / f"{number:02d}.tfrecord" for number in range(files)]
    done = folder / DONE
    if not done.is_file():
        folder.mkdir(exist_ok=True)
        found = sorted(photos.rglob("*.jpg"))
        _on_all_cores(_write_records, [(path, found[n::files]) for n, path in enumerate(paths)])
        done.write_text("complete\n")
    return paths


def _on_all_cores(function: object, arguments: list[tuple[object, ...]]) -> None:
    cores = len(os.sched_getaffinity(0))
    if cores < 4 or len(arguments) < cores:
        for each in arguments:
            function(*each)  # type: ignore[operator]  # one of the two below
        return
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        pool.starmap(function, arguments)  # type: ignore[arg-type]  # as above


def _write_scene(folder: Path, kind: Kind, first: int) -> None:
    """The photographs of one scene, from its own seed."""
    whole = scene(np.random.default_rng([first, kind.width]), kind)
    for number in range(first, min(first + PHOTOGRAPHS_OF_A_SCENE, kind.images)):
        pixels = photograph(np.random.default_rng([number, kind.width, 1]), whole, kind)
        path = folder / "photos" / f"class{number % CLASSES}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            simplejpeg.encode_jpeg(pixels, quality=kind.quality, colorsubsampling="420")
        )


def _write_records(path: Path, photos: list[Path]) -> None:
    """Without TensorFlow, because every process would have to import it first.

    Source: tensorflow.org/tutorials/load_data/tfrecord (the format), tf.train.Example's protocol.
    """
    with path.open("wb") as stream:
        for photo in photos:
            label = int(photo.parent.name.removeprefix("class"))
            payload = _example(photo.read_bytes(), label)
            length = len(payload).to_bytes(8, "little")
            stream.write(length + _masked(length) + payload + _masked(payload))


def _masked(data: bytes) -> bytes:
    crc = crc32c(data)
    return ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


def _example(image: bytes, label: int) -> bytes:
    """A `tf.train.Example` of `image` (bytes) and `label` (int64)."""
    features = _entry(b"image", _field(1, _field(1, image)))
    features += _entry(b"label", _field(3, _field(1, _varint(label))))
    return _field(1, features)


def _entry(name: bytes, feature: bytes) -> bytes:
    return _field(1, _field(1, name) + _field(2, feature))


def _field(number: int, payload: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(payload)) + payload


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=9_600)
    given = parser.parse_args()
    records(photographs(given.folder, count=given.count, height=375, width=500), files=16)
