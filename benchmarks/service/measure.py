"""The tf.data service compared with the same pipeline in the training process: CPU and wall per image.

`.venv/bin/python benchmarks/service/measure.py [--images N]` writes
benchmarks/results/data-service.json. JPEGs of 500x375 are decoded and resized to 224x224 by
TensorFlow's own operations, the only ones that can leave their process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tensorflow as tf

from stoker.core.files import sha256_file
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, Shard
from stoker.data.feed.service.group import Group, GroupConfig
from stoker.data.feed.service.reading import ServiceFeed
from stoker.data.feed.service.records import RecordCopy, copied, parse
from stoker.data.ingest import ServiceConfig

RESULTS = Path(__file__).resolve().parents[1] / "results" / "data-service.json"
BATCH = 64
ROUNDS = 5
SIZE = (224, 224)
COLUMNS = (Column(name="image", dtype="image"), Column(name="number", dtype="int64"))
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Cost:
    """One epoch."""

    cpu_s: float
    wall_s: float


def make_dataset(root: Path, images: int) -> Dataset:
    """JPEGs of some 100 KB: noise of every scale, as photographs have it."""
    rng = np.random.default_rng(0)
    encoded = []
    for _ in range(images):
        picture = sum(
            tf.image.resize(rng.normal(0, 120 / scale, (375 // s, 500 // s, 3)), (375, 500))
            for scale, s in ((1, 64), (1.5, 16), (3, 4), (6, 1))
        )
        pixels = tf.cast(tf.clip_by_value(picture + 128.0, 0, 255), tf.uint8)
        encoded.append(tf.io.encode_jpeg(pixels, quality=92).numpy())
    path = root / "train" / "shard-00000.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(
        pa.table({"image": encoded, "number": np.arange(images)}), path, write_page_checksum=True
    )
    shard = Shard(
        file="train/shard-00000.parquet",
        rows=images,
        size_bytes=path.stat().st_size,
        sha256=sha256_file(path),
    )
    hashes = {"train": {column.name: "0" for column in COLUMNS}}
    return Dataset(root=root, columns=COLUMNS, splits={"train": (shard,)}, column_hashes=hashes)


def decoded(raw: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
    """Images as uint8 [batch, height, width, 3], and their numbers."""

    def one(image: tf.Tensor) -> tf.Tensor:
        pixels = tf.image.resize(tf.io.decode_jpeg(image, channels=3), SIZE)
        return tf.cast(tf.round(pixels), tf.uint8)

    return tf.map_fn(one, raw["image"], fn_output_signature=tf.uint8), raw["number"]


def local(copy: RecordCopy) -> tf.data.Dataset[Any]:
    """The recipe that is taught, over the same files."""
    return (
        tf.data.Dataset.from_tensor_slices(copy.paths)
        .interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(BATCH)
        .map(lambda s: decoded(parse(s, COLUMNS)), num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )


def cpu_s(pids: Iterable[int]) -> float:
    """CPU time of this process and of those, seconds."""
    total = sum(os.times()[:2])
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) * TICK_S
    return total


def measured(epoch: Callable[[], Iterable[Any]], images: int, pids: Iterable[int]) -> Cost:
    """One epoch read to its end; every image must come once."""
    pids = list(pids)
    cpu, wall = cpu_s(pids), time.perf_counter()
    seen = np.concatenate([numbers for _, numbers in epoch()])
    cost = Cost(cpu_s(pids) - cpu, time.perf_counter() - wall)
    if not np.array_equal(np.sort(seen), np.arange(images)):
        raise RuntimeError(f"{images} images must come once each, {len(seen)} came")
    return cost


def compared(copy: RecordCopy, workers: int, scratch: Path) -> tuple[list[Cost], list[Cost]]:
    """Costs of local epochs and of epochs by the service, in alternation, the first left out."""
    config = GroupConfig(port=0, workers=workers, work_dir=scratch / f"journal-{workers}")
    here, there = [], []
    with Group(config, logging.getLogger(__name__).info) as group:
        service = ServiceConfig(address=group.ready.address, workers=workers)
        feed = ServiceFeed(copy, decoded, service=service)
        pids = group.ready.pids.values()
        for number in range(ROUNDS + 1):
            here.append(measured(lambda: local(copy), copy.rows, pids))
            there.append(
                measured(
                    lambda at=number: feed.epochs(at, at + 1, batch_size=BATCH, seed=0),
                    copy.rows,
                    pids,
                )
            )
    return here[1:], there[1:]


def rows_of(here: list[Cost], there: list[Cost], *, workers: int, images: int) -> list[Any]:
    """The figures as benchmarks/results holds them."""
    made = []
    for unit, name in (("cpu_s", "CPU"), ("wall_s", "wall")):
        ratios = [asdict(h)[unit] / asdict(t)[unit] for h, t in zip(here, there, strict=True)]
        own_ms = 1000 * statistics.median(asdict(t)[unit] for t in there) / images
        peer_ms = 1000 * statistics.median(asdict(h)[unit] for h in here) / images
        made.append(
            {
                "name": f"tf.data service, {workers} worker(s): speed by {name} per image",
                "value": round(statistics.median(ratios), 3),
                "unit": "times the same pipeline in the training process",
                "target": None,
                "holds": None,
                "peer": f"in the training process: {peer_ms:.2f} ms {name} an image, "
                f"the service: {own_ms:.2f} ms",
                "how": f"{images} JPEGs 500x375, {copy_text(ratios)}; CPU of dispatcher and workers "
                "counted; one machine, so that no core is added",
            }
        )
    return made


def copy_text(ratios: list[float]) -> str:
    """How far the rounds lie apart."""
    return f"median of {len(ratios)} alternating epochs, {min(ratios):.2f} to {max(ratios):.2f}"


def main() -> None:
    """Measure with one and with two workers, and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=1200)
    images = parser.parse_args().images
    results = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        dataset = make_dataset(scratch / "data", images)
        copy = copied(dataset, "train", scratch / "copy", columns=COLUMNS)
        for workers in (1, 2):
            here, there = compared(copy, workers, scratch)
            results += rows_of(here, there, workers=workers, images=images)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
