# ruff: noqa: S311  # nothing secret is drawn here
"""The other loaders of the field, each as its documentation shows it; runs in `.venv-bench`."""

from __future__ import annotations

import argparse
import io
import math
import random
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from measure import BATCH, CROP, RATIO, SCALE, report
from PIL import Image

WORKERS = 2


def box(height: int, width: int) -> tuple[int, int, int, int]:
    """Left, top, width, height; as torchvision's RandomResizedCrop draws it."""
    for _ in range(10):
        area = height * width * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        wide, tall = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            return random.randint(0, width - wide), random.randint(0, height - tall), wide, tall
    side = min(height, width)
    return (width - side) // 2, (height - side) // 2, side, side


def by_pil(path: str) -> np.ndarray:
    """Decode, crop, resize, flip with Pillow."""
    image = Image.open(io.BytesIO(Path(path).read_bytes())).convert("RGB")
    left, top, wide, tall = box(image.height, image.width)
    image = image.crop((left, top, left + wide, top + tall)).resize(
        (CROP, CROP), Image.Resampling.BILINEAR
    )
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image)


def by_opencv(path: str) -> np.ndarray:
    """Decode with simplejpeg; crop, resize, flip with OpenCV."""
    image = simplejpeg.decode_jpeg(Path(path).read_bytes())
    left, top, wide, tall = box(*image.shape[:2])
    image = cv2.resize(image[top : top + tall, left : left + wide], (CROP, CROP))
    return cv2.flip(image, 1) if random.random() < 0.5 else image


DECODERS = {"pil": by_pil, "opencv": by_opencv}


def torch_loader(paths: list[str], how: str) -> Iterator[object]:
    """torch.utils.data.DataLoader with worker processes."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    torch.set_num_threads(1)

    class Photos(Dataset):
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> np.ndarray:
            cv2.setNumThreads(1)
            return DECODERS[how](paths[index])

    loader = DataLoader(
        Photos(),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        drop_last=True,
        persistent_workers=True,
    )
    while True:
        yield from loader


def grain_loader(paths: list[str], how: str) -> Iterator[object]:
    """Grain's MapDataset with reading threads."""
    import grain

    cv2.setNumThreads(1)
    data = grain.MapDataset.source(paths).seed(0).shuffle().repeat().map(DECODERS[how])
    options = grain.ReadOptions(num_threads=WORKERS, prefetch_buffer_size=2 * BATCH)
    return iter(data.to_iter_dataset(options).batch(BATCH))


def dali_loader(paths: list[str], how: str) -> Iterator[object]:
    """NVIDIA DALI on the CPU."""
    from nvidia.dali import fn, pipeline_def, types

    del how

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None, seed=0)
    def photos() -> object:
        encoded, _ = fn.readers.file(files=paths, random_shuffle=True)
        images = fn.decoders.image_random_crop(
            encoded,
            device="cpu",
            output_type=types.RGB,
            random_area=SCALE,
            random_aspect_ratio=RATIO,
        )
        images = fn.resize(images, size=[CROP, CROP])
        return fn.flip(images, horizontal=fn.random.coin_flip())

    pipeline = photos()
    pipeline.build()
    while True:
        yield pipeline.run()


LOADERS = {"torch": torch_loader, "grain": grain_loader, "dali": dali_loader}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("photos", type=Path)
    parser.add_argument("loader", choices=LOADERS)
    parser.add_argument("how", choices=[*DECODERS, "own"])
    parser.add_argument("--measured", type=int, required=True)
    given = parser.parse_args()
    found = sorted(str(path) for path in given.photos.rglob("*.jpg"))
    report(LOADERS[given.loader](found, given.how), warm_up=6, measured=given.measured)
