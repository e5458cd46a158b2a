"""Photographs that nobody took: JPEGs with the size and the entropy of real ones, made from a seed."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import simplejpeg

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
    """Standard deviation of the sensor's noise, grey levels: it sets the entropy."""


KINDS = (
    Kind(name="500x375", images=2400, height=375, width=500, quality=94, noise=10.5),
    Kind(name="1600x1200", images=600, height=1200, width=1600, quality=90, noise=8.5),
)
"""About 100 KB and 700 KB an image."""


def photograph(rng: np.random.Generator, kind: Kind) -> np.ndarray:
    """Filtered noise with the spectrum of a photograph (amplitude about 1/f), and a sensor's noise."""
    height, width = kind.height, kind.width
    field = np.zeros((height, width, 3), np.float32)
    for octave in range(1, 9):
        size = 2**octave
        coarse = rng.standard_normal((height // size + 2, width // size + 2, 3)).astype(np.float32)
        field += cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC) * size**0.9
    grey = field.mean(axis=2, keepdims=True)
    field = grey + 0.35 * (field - grey)  # colours vary less than brightness
    field = (field - field.mean()) / field.std() * 48 + 120
    field += rng.standard_normal((height, width, 1)).astype(np.float32) * kind.noise
    return np.clip(field, 0, 255).astype(np.uint8)


def generate(root: Path, kind: Kind) -> Path:
    """The folder of that kind, made where it is not there yet."""
    folder = root / kind.name
    done = folder / "done"
    if done.is_file():
        return folder / "photos"
    for number in range(kind.images):
        pixels = photograph(np.random.default_rng([number, kind.width]), kind)
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
