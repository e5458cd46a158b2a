"""One contestant in a process of its own: `contestants.py NAME ROOT` prints what it took, as JSON.

Each gives batches of 4,096 shuffled rows to a `tf.data` pipeline that is consumed in the graph,
strings as `tf.string`. A first short pass is not counted.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import tensorflow as tf
from table import BATCH, COLUMNS, ROW_BYTES, TFRECORD_ROWS, dataset, tfrecords, train_rows

from stoker.data.feed.tables.rows import table_batches
from stoker.data.feed.tables.windows import TableStream

PEERS = Path(__file__).resolve().parents[2] / ".venv-bench"
CHUNK_ROWS = 1 << 20
"""Rows that Polars and DuckDB shuffle at once: as many as a good buffer would hold."""

STEPS_PER_CALL = 16

Batches = AbstractContextManager["tf.data.Dataset[Any]"]

NUMBERS = tuple(column for column in COLUMNS if column.dtype != "string")

TENSORS = {c.name: tf.TensorSpec([None], tf.as_dtype(c.tensor_dtype)) for c in COLUMNS}
PARSED = {c.name: tf.io.FixedLenFeature([], tf.as_dtype(c.tensor_dtype)) for c in COLUMNS}


def stoker(root: Path, *, size: int = BATCH, columns: Any = COLUMNS) -> Batches:
    """Our stream, a batch an element."""
    stream = TableStream(dataset(root), "train", columns=columns)
    return table_batches(
        lambda: stream.shuffled(batch_size=size, seed=0, epochs=range(1)), columns=columns
    )


def stoker_calls(root: Path) -> Batches:
    """As the training loop takes them: an element is the rows of a call of 16 steps."""
    return stoker(root, size=STEPS_PER_CALL * BATCH)


def stoker_numbers(root: Path) -> Batches:
    """Without the strings."""
    return stoker(root, columns=NUMBERS)


def tfrecord(root: Path) -> Batches:
    """The recipe of the guides: parse each row."""
    files = tf.data.TFRecordDataset(str(tfrecords(root)))
    rows = files.map(
        lambda record: tf.io.parse_single_example(record, PARSED),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    return nullcontext(rows.shuffle(10_000).batch(BATCH))


def tfrecord_batched(root: Path) -> Batches:
    """The better recipe: parse a batch at once."""
    batches = tf.data.TFRecordDataset(str(tfrecords(root))).shuffle(10_000).batch(BATCH)
    return nullcontext(
        batches.map(
            lambda records: tf.io.parse_example(records, PARSED),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
    )


def polars(root: Path, *, names: tuple[str, ...] = tuple(TENSORS)) -> Batches:
    """Chunks of Polars, shuffled in Polars, sliced, through `from_generator`."""
    # Behind our own packages: only what they lack comes from there.
    sys.path += [str(path) for path in PEERS.glob("lib/python*/site-packages")]
    import polars as pl

    lazy = pl.scan_parquet([str(path) for path in dataset(root).paths("train")]).select(names)

    def batches() -> Iterator[dict[str, Any]]:
        for start in range(0, train_rows(root), CHUNK_ROWS):
            frame = lazy.slice(start, CHUNK_ROWS).collect()
            frame = frame.sample(fraction=1.0, shuffle=True, seed=start)
            for part in frame.iter_slices(BATCH):
                yield {name: part[name].to_numpy() for name in names}

    signature = {name: TENSORS[name] for name in names}
    return nullcontext(tf.data.Dataset.from_generator(batches, output_signature=signature))


def polars_numbers(root: Path) -> Batches:
    """Without the strings."""
    return polars(root, names=tuple(column.name for column in NUMBERS))


def duckdb(root: Path, *, names: tuple[str, ...] = tuple(TENSORS)) -> Batches:
    """Chunks of DuckDB as Arrow, permuted by NumPy, sliced, through `from_generator`."""
    import duckdb as db

    files = [str(path) for path in dataset(root).paths("train")]

    def batches() -> Iterator[dict[str, Any]]:
        reader = db.read_parquet(files).select(*names).fetch_arrow_reader(CHUNK_ROWS)
        rng = np.random.default_rng(0)
        for chunk in reader:
            order = rng.permutation(chunk.num_rows)
            arrays = {
                name: chunk.column(name).to_numpy(zero_copy_only=False)[order] for name in names
            }
            for start in range(0, chunk.num_rows, BATCH):
                yield {name: array[start : start + BATCH] for name, array in arrays.items()}

    signature = {name: TENSORS[name] for name in names}
    return nullcontext(tf.data.Dataset.from_generator(batches, output_signature=signature))


def duckdb_numbers(root: Path) -> Batches:
    """Without the strings."""
    return duckdb(root, names=tuple(column.name for column in NUMBERS))


CONTESTANTS: dict[str, Callable[[Path], Batches]] = {
    "stoker": stoker,
    "stoker_calls": stoker_calls,
    "stoker_numbers": stoker_numbers,
    "tfrecord": tfrecord,
    "tfrecord_batched": tfrecord_batched,
    "polars": polars,
    "polars_numbers": polars_numbers,
    "duckdb": duckdb,
    "duckdb_numbers": duckdb_numbers,
}


def rows_of(batches: tf.data.Dataset[Any]) -> int:
    """Consume a dataset without a Python call a batch; how many rows it gave."""
    first = next(iter(batches.element_spec))
    total = batches.prefetch(8).reduce(
        np.int64(0), lambda rows, batch: rows + tf.size(batch[first], tf.int64)
    )
    return int(total)


def pass_over(name: str, root: Path) -> dict[str, float]:
    """What one epoch takes."""
    with CONTESTANTS[name](root) as batches:
        rows_of(batches.take(8))
        wall_s, cpu_s = time.monotonic(), time.process_time()
        rows = rows_of(batches)
        wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
    expected = TFRECORD_ROWS if name.startswith("tfrecord") else train_rows(root)
    if rows != expected:
        raise RuntimeError(f"{name} gave {rows} rows of {expected}")
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"cpu_ns": cpu_s / rows * 1e9, "wall_ns": wall_s / rows * 1e9, "peak_mib": peak_mib}


def copy(root: Path) -> dict[str, float]:
    """The limit: the bytes of a row copied once, from memory to memory."""
    rows = train_rows(root)
    source = np.ones(rows * ROW_BYTES // 8)
    target = np.empty_like(source)
    target[:] = source
    wall_s, cpu_s = time.monotonic(), time.process_time()
    for _ in range(5):
        target[:] = source
    wall_s, cpu_s = (time.monotonic() - wall_s) / 5, (time.process_time() - cpu_s) / 5
    return {"cpu_ns": cpu_s / rows * 1e9, "wall_ns": wall_s / rows * 1e9}


def decode(root: Path) -> dict[str, float]:
    """Row groups decoded with page checksums and freed: nothing is permuted or passed on."""
    import pyarrow.parquet as pq

    texts, rows = [c.name for c in COLUMNS if c.dtype == "string"], train_rows(root)
    wall_s, cpu_s = time.monotonic(), time.process_time()
    for path in dataset(root).paths("train"):
        with pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=texts) as file:
            for group in range(file.num_row_groups):
                file.read_row_group(group, use_threads=False)
    wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
    return {"cpu_ns": cpu_s / rows * 1e9, "wall_ns": wall_s / rows * 1e9}


def resume(root: Path) -> dict[str, float]:
    """The longest time from opening the dataset to the first batch, over steps of the epoch."""
    data, longest_s = dataset(root), 0.0
    steps = -(-train_rows(root) // BATCH)
    for step in [0, 1, steps // 3, steps // 2, 2 * steps // 3, steps - 1]:
        begun_s = time.monotonic()
        stream = TableStream(data, "train", columns=COLUMNS)
        blocks = stream.shuffled(batch_size=BATCH, seed=0, epochs=range(3, 4), first_step=step)
        next(next(blocks).batches())
        longest_s = max(longest_s, time.monotonic() - begun_s)
        blocks.close()
    return {"start_s": longest_s}


OTHERS: dict[str, Callable[[Path], dict[str, float]]] = {
    "copy": copy,
    "decode": decode,
    "resume": resume,
}


def main() -> None:
    """Run the contestant that the command line names."""
    name, root = sys.argv[1], Path(sys.argv[2])
    found = OTHERS[name](root) if name in OTHERS else pass_over(name, root)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
