"""The table of the benchmark: 5 M rows of 12 float, 5 int and 3 categorical columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stoker.data.columns import Column
from stoker.data.dataset import MANIFEST, Dataset, load_dataset
from stoker.data.ingest import IngestConfig, ingest

ROWS = 5_000_000
TFRECORD_ROWS = 200_000
"""Enough for a rate: parsing a row costs the same in a longer file."""

BATCH = 4096
CHUNK = 100_000
INTEGERS = (2, 100, 10_000, 10**6, 10**9)
CATEGORIES = (5, 100, 5_000)

COLUMNS = (
    *(Column(name=f"float{n}", dtype="float32") for n in range(12)),
    *(Column(name=f"int{n}", dtype="int64") for n in range(len(INTEGERS))),
    *(Column(name=f"category{n}", dtype="string") for n in range(len(CATEGORIES))),
)
ROW_BYTES = 12 * 4 + 5 * 8 + 3 * 4
"""A row in memory, a category as the number of its string."""


def chunk(number: int) -> pa.Table:
    """Rows [number * CHUNK, (number + 1) * CHUNK)."""
    rng = np.random.default_rng(number)
    arrays: list[pa.Array] = [
        pa.array(rng.normal(size=CHUNK).astype(np.float32)) for _ in range(12)
    ]
    arrays += [pa.array(rng.integers(0, limit, CHUNK)) for limit in INTEGERS]
    for number_, count in enumerate(CATEGORIES):
        words = pa.array([f"category {number_} value {value}" for value in range(count)])
        arrays.append(words.take(pa.array(rng.integers(0, count, CHUNK))))
    return pa.table(arrays, names=[column.name for column in COLUMNS])


def dataset(root: Path) -> Dataset:
    """The table as ingest writes it; made once."""
    folder, source = root / "dataset", root / "source.parquet"
    if (folder / MANIFEST).exists():
        return load_dataset(folder)
    with pq.ParquetWriter(source, chunk(0).schema) as writer:
        for number in range(ROWS // CHUNK):
            writer.write_table(chunk(number))
    ingest(IngestConfig(source=str(source), splits={"train": 0.999, "eval": 0.001}), folder)
    return load_dataset(folder)


def train_rows(root: Path) -> int:
    """Rows of the training split: nearly all."""
    return dataset(root).rows("train")


def tfrecords(root: Path) -> Path:
    """Some of the same rows as `tf.train.Example`s; made once."""
    import tensorflow as tf

    path = root / "rows.tfrecord"
    if path.exists():
        return path
    train, part = tf.train, path.with_suffix(".part")
    with tf.io.TFRecordWriter(str(part)) as writer:
        for number in range(TFRECORD_ROWS // CHUNK):
            for row in chunk(number).to_pylist():
                features = {}
                for column in COLUMNS:
                    value = row[column.name]
                    if column.dtype == "float32":
                        made = train.Feature(float_list=train.FloatList(value=[value]))
                    elif column.dtype == "int64":
                        made = train.Feature(int64_list=train.Int64List(value=[value]))
                    else:
                        made = train.Feature(bytes_list=train.BytesList(value=[value.encode()]))
                    features[column.name] = made
                example = train.Example(features=train.Features(feature=features))
                writer.write(example.SerializeToString())
    part.rename(path)
    return path
