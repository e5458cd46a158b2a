"""The smallest things to train: a table of two numbers, one device, no observers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stoker.core.files import sha256_file
from stoker.data.columns import Column
from stoker.data.dataset import Dataset, Shard, write_manifest
from stoker.telemetry.writers import Everywhere
from stoker.train.config import ResolvedTraining
from stoker.train.context.heartbeat import process_heartbeat
from stoker.train.context.preemption import Preemption
from stoker.train.context.run_context import RunContext

ROWS = {"train": 210, "eval": 90}


def small_dataset(
    root: Path, *, bad_row: int | None = None, rows_of: Mapping[str, int] = ROWS
) -> Dataset:
    """`a` and `b` are numbers, `y` is 1 where their sum is positive.

    Args:
        root: A folder.
        bad_row: The row of the training split whose `a` is NaN.
        rows_of: Split -> rows.
    """
    rng = np.random.default_rng(0)
    splits: dict[str, tuple[Shard, ...]] = {}
    for split, rows in rows_of.items():
        a, b = rng.normal(size=(2, rows)).astype(np.float32)
        y = (a + b > 0).astype(np.int64)
        if bad_row is not None and split == "train":
            a[bad_row] = np.nan
        path = root / split / "shard-00000.parquet"
        path.parent.mkdir(parents=True)
        pq.write_table(pa.table({"a": a, "b": b, "y": y}), path, write_page_checksum=True)
        size, digest = path.stat().st_size, sha256_file(path)
        shard = Shard(file=f"{split}/{path.name}", rows=rows, size_bytes=size, sha256=digest)
        splits[split] = (shard,)
    columns = (
        Column(name="a", dtype="float32"),
        Column(name="b", dtype="float32"),
        Column(name="y", dtype="int64"),
    )
    hashes = {split: {c.name: f"{split}-{c.name}" for c in columns} for split in ROWS}
    made = Dataset(root=root, columns=columns, splits=splits, column_hashes=hashes)
    write_manifest(made)
    return made


def on_one_device(**changes: Any) -> ResolvedTraining:
    """Plain training in float32, with what a test wants otherwise."""
    plain: dict[str, Any] = {
        "batch_size": 32,
        "accumulate": 1,
        "replicas": 1,
        "workers": 1,
        "steps_per_call": 4,
        "precision": "float32",
        "xla": False,
        "strategy": "one_device",
        "lr_factor": 1.0,
        "why": {},
    }
    return ResolvedTraining(**(plain | changes))


def unwatched(checkpoints: Path, **changes: Any) -> RunContext:
    """Enough memory to keep everything, no listeners; a test overrides the rest."""
    plain: dict[str, Any] = {
        "memory_bytes": 1 << 34,
        "checkpoints": checkpoints,
        "writer": Everywhere([]),
        "on_progress": lambda progress: None,
        "preemption": Preemption(),
        "heartbeat": process_heartbeat(),
    }
    return RunContext(**(plain | changes))
