"""The digits that ship inside scikit-learn, written out as a user's image folder would be."""

from pathlib import Path

import cv2
import numpy as np


def write_digits(folder: Path) -> None:
    """Write one PNG a digit: folder/<class>/<number>.png, gray, 8 x 8."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / str(label) / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        # scikit-learn's gray levels run from 0 to 16.
        cv2.imwrite(str(path), np.round(image * (255 / 16)).astype(np.uint8))
