"""The training split as TFRecord files of `tf.train.Example`, for workers that cannot read Parquet.

TensorFlow's own operations read TFRecord but not Parquet, and a worker cannot run Python code. So a split is
copied once. A keyed permutation chooses the file of each record, so that every file is a random sample of the
split. A manifest with sizes and hashes is written last.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.core.files import (
    alone,
    full_disk_is_named,
    publish_folder,
    read_json,
    scratch_folder,
    sha256_file,
    write_json,
)
from stoker.data.columns import PADDING, Column, list_lengths, to_numpy
from stoker.data.dataset import Dataset, Shard
from stoker.data.feed.order import shuffled_indices
from stoker.data.ingest.image_store import encoded_image
from stoker.telemetry.writers.tensorboard import framed

MANIFEST = "records.json"
"""File name of the manifest. It is written last: a folder without a manifest is not a copy."""

FILES = 256
"""Number of files of a copy: many, because the files that a killed worker was reading are lost; but not
thousands, because each file costs a request to the dispatcher."""

BATCH_ROWS = 1024
"""Number of records that are copied at a time."""

_DEAL_SEED = 0
"""Seed of the permutation that chooses each record's file; it does not affect the order in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordCopy:
    """A split as TFRecord files."""

    root: Path
    """The folder with the files and `records.json`."""

    columns: tuple[Column, ...]
    """The raw columns that each Example holds."""

    files: tuple[Shard, ...]
    """The TFRecord files, in the order of their names."""

    @property
    def rows(self) -> int:
        """Number of records."""
        return sum(file.rows for file in self.files)

    @property
    def paths(self) -> list[str]:
        """The absolute paths of the files, because workers may run in a different folder."""
        return [str((self.root / file.file).resolve()) for file in self.files]

    @property
    def record_bytes(self) -> int:
        """Mean length of a record, at least 1."""
        return max(1, sum(file.size_bytes for file in self.files) // max(1, self.rows))


def copied(
    dataset: Dataset,
    split: str,
    root: Path,
    *,
    columns: Sequence[Column],
) -> RecordCopy:
    """Return the copy of a split under `root`: the existing one if its hashes match, else a new one.

    Args:
        dataset: The verified dataset.
        split: Name of the split.
        root: The copy's folder; an outdated copy in it is removed.
        columns: The raw columns to copy.

    Raises:
        DataError: a shard is damaged.
        UserError: the disk is full; no incomplete copy is left.
    """
    key = dataset.fingerprint_of([column.name for column in columns])
    with alone(root.parent / f".{root.name}.lock"):
        try:
            found = load_copy(root, key=key)
        except DataError:
            shutil.rmtree(root, ignore_errors=True)
        else:
            if found.columns == tuple(columns):
                return found
            shutil.rmtree(root)
        with scratch_folder(root) as made, full_disk_is_named(root):
            files = _write(dataset, split, made, columns)
            manifest = {
                "dataset": key,
                "columns": [asdict(column) for column in columns],
                "files": [asdict(file) for file in files],
            }
            write_json(made / MANIFEST, manifest)
            publish_folder(made, root)
        return RecordCopy(root=root, columns=tuple(columns), files=tuple(files))


def load_copy(root: Path, *, key: str) -> RecordCopy:
    """Read a copy's manifest, and check the length and hash of every file.

    TensorFlow's reader does not check a record's length: if a damaged header says 64 GiB, it crashes.

    Args:
        root: The copy's folder.
        key: Expected fingerprint of the copied columns.

    Raises:
        DataError: the copy is missing or was made from different data, or a file is missing, truncated or
            changed.
    """
    raw = read_json(root / MANIFEST)
    try:
        copy = RecordCopy(
            root=root,
            columns=tuple(Column(**column) for column in raw["columns"]),
            files=tuple(Shard(**file) for file in raw["files"]),
        )
        is_of_it = raw["dataset"] == key
    except (KeyError, TypeError) as error:
        raise _bad(root / MANIFEST, f"{type(error).__name__}: {error}") from error
    if not is_of_it:
        raise _bad(root / MANIFEST, "a copy of different data")
    for file in copy.files:
        path = root / file.file
        if not path.is_file():
            raise _bad(path, "no such file")
        if path.stat().st_size != file.size_bytes or sha256_file(path) != file.sha256:
            raise _bad(path, "content that differs from its manifest")
    return copy


def parse(serialized: tf.Tensor, columns: Sequence[Column]) -> dict[str, tf.Tensor]:
    """Parse [batch] serialized Examples of a copy into raw columns, as `stoker.data.columns` defines them."""
    parsed = tf.io.parse_example(serialized, {c.name: _parsing(c) for c in columns})
    return {column.name: _decoded(column, parsed[column.name]) for column in columns}


def _bad(path: Path, got: str) -> DataError:
    return DataError(
        f"{path} must be an intact part of the copy for the tf.data service",
        got=Plain(got),
        fix="Delete the copy's folder and train again; training makes a new copy.",
    )


def _parsing(column: Column) -> tf.io.FixedLenFeature | tf.io.VarLenFeature:
    if column.is_ragged:
        return tf.io.VarLenFeature(column.tensor_dtype)
    if column.dtype == "float64":
        # An Example cannot hold float64 numbers, so it holds their bytes.
        return tf.io.FixedLenFeature([], tf.string)
    return tf.io.FixedLenFeature(list(column.shape), column.tensor_dtype)


def _decoded(column: Column, values: Any) -> tf.Tensor:
    if column.is_ragged:
        return tf.sparse.to_dense(values, default_value=PADDING[column.dtype])
    if column.dtype != "float64":
        return values
    doubles = tf.io.decode_raw(values, tf.float64, little_endian=True)
    return tf.reshape(doubles, [-1, *column.shape])


def _write(dataset: Dataset, split: str, folder: Path, columns: Sequence[Column]) -> list[Shard]:
    rows = dataset.rows(split)
    with ExitStack() as opened:
        writers = [
            _Writer(opened.enter_context((folder / f"{number:05}.tfrecord").open("wb")))
            for number in range(min(FILES, rows))
        ]
        done = 0
        names = [column.name for column in columns]
        for batch in dataset.batches(split, columns=names, rows=BATCH_ROWS):
            arrays = {c.name: _column_values(c, batch) for c in columns}
            positions = np.arange(done, done + batch.num_rows, dtype=np.int64)
            dealt = shuffled_indices(positions, size=rows, seed=_DEAL_SEED, epoch=0) % len(writers)
            for number, example in zip(dealt, examples(arrays, columns), strict=True):
                writers[number].write(example)
            done += batch.num_rows
    return [
        Shard(
            file=f"{number:05}.tfrecord",
            rows=writer.rows,
            size_bytes=writer.size_bytes,
            sha256=writer.sha256.hexdigest(),
        )
        for number, writer in enumerate(writers)
    ]


class _Writer:
    """Writes one TFRecord file, and computes its hash while writing."""

    def __init__(self, stream: BinaryIO) -> None:
        self.rows, self.size_bytes = 0, 0
        self.sha256 = hashlib.sha256()
        self._stream = stream

    def write(self, record: bytes) -> None:
        stored = framed(record)
        self._stream.write(stored)
        self.sha256.update(stored)
        self.rows += 1
        self.size_bytes += len(stored)


def _column_values(column: Column, batch: pa.RecordBatch) -> NDArray[Any]:
    """Return a column's values; images are encoded, as the exported graph takes them."""
    found = to_numpy(column, batch.column(column.name))
    if column.dtype == "image":
        found[:] = [encoded_image(each) for each in found]
    return found


def examples(arrays: Mapping[str, NDArray[Any]], columns: Sequence[Column]) -> Iterator[bytes]:
    """Yield one serialized `tf.train.Example` per row; a missing value is NaN or ""."""
    lists = [(column.name, _FIELDS[column.dtype], _values(column, arrays)) for column in columns]
    for row in range(len(arrays[columns[0].name])):
        example = tf.train.Example()
        feature = example.features.feature
        for name, field, values in lists:
            getattr(feature[name], field).value.extend(values[row])
        yield example.SerializeToString()


_FIELDS = {
    "int64": "int64_list",
    "float32": "float_list",
    "float64": "bytes_list",
    "string": "bytes_list",
    "image": "bytes_list",
}
"""Dtype of a column -> the field of an Example that holds its values."""


def _values(column: Column, arrays: Mapping[str, NDArray[Any]]) -> list[list[Any]]:
    if column.is_ragged:
        padded = arrays[column.name]
        lengths = list_lengths(column, padded)
        return [row[:length].tolist() for row, length in zip(padded, lengths, strict=True)]
    rows = arrays[column.name].reshape(len(arrays[column.name]), -1)
    if column.dtype == "float64":
        return [[row.astype("<f8").tobytes()] for row in rows]
    return rows.tolist()
