"""The digits that ship inside scikit-learn, as a folder of larger JPEG files."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

SIDE = 256
"""Height and width of a file, pixels: a camera's would be larger still."""


def write_digits(folder: Path) -> None:
    """Write 1,438 files for training and 359 for evaluation: folder/<split>/<digit>/<number>.jpg."""
    digits = load_digits()
    # Under another name until all are there: a folder that is there is whole.
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for number, (image, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
            split = "eval" if number % 5 == 4 else "train"
            path = made / split / str(digit) / f"{number:04d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            # scikit-learn's grey levels run from 0 to 16.
            grey = Image.fromarray(np.round(image * (255 / 16)).astype(np.uint8))
            grey.resize((SIDE, SIDE), Image.Resampling.BICUBIC).convert("RGB").save(path)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
