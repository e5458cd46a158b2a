"""Synthetic photographs: JPEGs with the size and the entropy of real ones, made from a seed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import simplejpeg

PHOTOGRAPHS_OF_A_SCENE = 20

CLASSES = 4
"""Sub-folders, so that the folder is an image source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """One set of photographs."""

    name: str
    images: int
    height: int
    width: int
    quality: int
    noise: float
    """Standard deviation of the sensor's noise, gray levels: it sets the entropy."""


KINDS = (
    Kind(name="500x375", images=2400, height=375, width=500, quality=94, noise=10.5),
    Kind(name="1600x1200", images=600, height=1200, width=1600, quality=90, noise=8.5),
)
"""About 100 KB and 700 KB an image."""


def scene(rng: np.random.Generator, kind: Kind) -> np.ndarray:
    """Filtered noise with the spectrum of a photograph (amplitude about 1/f), larger than an image."""
    height, width = 2 * kind.height, 2 * kind.width
    field = np.zeros((height, width, 3), np.float32)
    for octave in range(1, 9):
        size = 2**octave
        coarse = rng.standard_normal((height // size + 2, width // size + 2, 3), np.float32)
        field += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR) * size**0.9
    gray = field.mean(axis=2, keepdims=True)
    field = gray + 0.35 * (field - gray)  # colors vary less than brightness
    return (field - field.mean()) / field.std() * 48 + 120


def photograph(rng: np.random.Generator, whole: np.ndarray, kind: Kind) -> np.ndarray:
    """A part of a scene, and a sensor's noise."""
    top, left = rng.integers(kind.height), rng.integers(kind.width)
    part = whole[top : top + kind.height, left : left + kind.width]
    noise = rng.standard_normal((kind.height, kind.width, 1), np.float32) * kind.noise
    return np.clip(part + noise, 0, 255).astype(np.uint8)


def generate(root: Path, kind: Kind) -> Path:
    """The folder of that kind, made where it is not there yet."""
    folder = root / kind.name
    done = folder / "done"
    if done.is_file():
        return folder / "photos"
    for number in range(kind.images):
        rng = np.random.default_rng([number, kind.width])
        if number % PHOTOGRAPHS_OF_A_SCENE == 0:
            whole = scene(rng, kind)
        pixels = photograph(rng, whole, kind)
        path = folder / "photos" / f"class{number % CLASSES}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            simplejpeg.encode_jpeg(pixels, quality=kind.quality, colorsubsampling="420")
        )
    done.write_text("whole\n")
    return folder / "photos"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    for each in KINDS:
        made = generate(parser.parse_args().root, each)
        sizes = [path.stat().st_size for path in made.rglob("*.jpg")]
        print(f"{each.name}: {len(sizes)} images of {np.mean(sizes) / 1e3:.0f} KB")
