"""The physical limits: entropy decoding alone, and copying the pixels of the result."""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import tempfile
from pathlib import Path

import numpy as np
from measure import BATCH, CROP, report


def entropy(photos: Path) -> object:
    """Endless batches of which only the coefficients are decoded, in one thread."""
    folder = Path(tempfile.mkdtemp())
    source = Path(__file__).with_name("limit.c")
    command = ["cc", "-O3", "-fPIC", "-shared", str(source), "-o", str(folder / "limit.so")]
    subprocess.run([*command, "-ljpeg"], check=True)
    library = ctypes.CDLL(str(folder / "limit.so"))
    images = [path.read_bytes() for path in sorted(photos.rglob("*.jpg"))[: 4 * BATCH]]
    number = 0
    while True:
        for _ in range(BATCH):
            data = images[number % len(images)]
            if library.entropy_decode(data, ctypes.c_ulong(len(data))):
                raise ValueError("not decoded")
            number += 1
        yield number


def copying(photos: Path) -> object:
    """Endless batches of which the result's pixels are copied once."""
    del photos
    source = np.random.default_rng(0).integers(0, 256, (8, BATCH, CROP, CROP, 3), np.uint8)
    to, number = np.empty_like(source[0]), 0
    while True:
        np.copyto(to, source[number % 8])
        number += 1
        yield to


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("photos", type=Path)
    parser.add_argument("what", choices=["entropy", "copying"])
    parser.add_argument("--measured", type=int, required=True)
    given = parser.parse_args()
    limits = {"entropy": entropy, "copying": copying}
    report(limits[given.what](given.photos), warm_up=1, measured=given.measured)
