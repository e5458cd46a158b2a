"""Skew: differences between logged requests and the training data."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from stoker.core.errors import DataError, Plain
from stoker.data.columns import ARROW_TYPES, VARYING, Column, Dtype, list_lengths
from stoker.data.dataset import Dataset, one_shard
from stoker.data.features.analysis.anomalies import Anomaly, find_anomalies, find_skew
from stoker.data.features.analysis.measure import compute_statistics
from stoker.data.features.analysis.statistics import (
    TRAIN,
    ColumnSchema,
    Schema,
    Statistics,
    load_schema,
    load_statistics,
)
from stoker.data.sources.columns.vectors import lists_of

REQUESTS = "requests"
"""Name in anomalies for the split that holds the requests."""

Request = dict[str, NDArray[Any]]
"""Input -> [rows, ...] values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skew:
    """Result of a comparison."""

    rows: int
    """Number of rows in all requests."""

    compared: tuple[str, ...]
    """Columns that both the requests and the training data have."""

    anomalies: tuple[Anomaly, ...]
    """Differences, errors first."""


def compare(requests: Iterable[Request], analysis: Path) -> Skew:
    """Compare requests with the training split of an analysis.

    Columns that no request has, such as labels, are not compared, nor are columns of a user-defined
    dataset whose values the analysis does not know.

    Args:
        requests: The logged requests.
        analysis: Output of the stage `analyze`.

    Raises:
        DataError: the analysis is damaged; the log is empty; the inputs of a request differ in their
            number of rows.
    """
    schema = load_schema(analysis / "schema.json")
    statistics = load_statistics(analysis / "statistics.json")
    with tempfile.TemporaryDirectory(prefix="stoker-skew-") as folder:
        dataset = _written([one for one in requests if _rows(one)], schema, Path(folder))
        found = compute_statistics(dataset)
    names = {column.name for column in dataset.columns}
    both = tuple(column for column in schema.columns if column.name in names)
    anomalies = [
        *find_anomalies(found, replace(schema, columns=both, labels=())),
        *_skewed(found, statistics, both),
    ]
    return Skew(
        rows=dataset.rows(REQUESTS),
        compared=tuple(column.name for column in both),
        anomalies=tuple(anomalies),
    )


def _skewed(
    found: Statistics, training: Statistics, columns: Sequence[ColumnSchema]
) -> Iterable[Anomaly]:
    for column in columns:
        now, then = found.column(REQUESTS, column.name), training.column(TRAIN, column.name)
        yield from find_skew(REQUESTS, now, then)


def _written(requests: Sequence[Request], schema: Schema, folder: Path) -> Dataset:
    """Write the requests as a dataset of one shard, from which the statistics are computed."""
    known = {column.name: column for column in schema.columns}
    counts = [_rows(request) for request in requests]
    if not sum(counts):
        raise DataError(
            "a request log must hold at least one row",
            got=Plain(f"{len(requests)} requests"),
            fix="Log requests first: set logging_config for the model.",
        )
    given = dict.fromkeys(name for request in requests for name in request)
    names = [n for n in given if n not in known or known[n].dtype in ARROW_TYPES]
    columns, arrays = [], []
    for name in names:
        parts = [
            _flat(request.get(name), rows) for request, rows in zip(requests, counts, strict=True)
        ]
        column = _column(name, [part for part in parts if part is not None], known.get(name))
        columns.append(column)
        arrays.append(_arrow(column, parts, counts))
    path = folder / "requests.parquet"
    pq.write_table(pa.table(arrays, names=names), path)
    return one_shard(path, REQUESTS, rows=sum(counts), columns=columns)


def _rows(request: Request) -> int:
    sizes = {values.shape[:1] for values in request.values()}
    if len(sizes) > 1 or () in sizes:
        shapes = ", ".join(f"{name} {list(values.shape)}" for name, values in request.items())
        raise DataError(
            "all inputs of a request must have the same number of rows", got=Plain(shapes)
        )
    return sizes.pop()[0] if sizes else 1


def _flat(values: NDArray[Any] | None, rows: int) -> NDArray[Any] | None:
    """Return [rows, values]: all axes after the first are merged into one."""
    return None if values is None else values.reshape(rows, math.prod(values.shape[1:]))


def _column(name: str, parts: Sequence[NDArray[Any]], known: ColumnSchema | None) -> Column:
    if known is not None and known.length == VARYING:
        return Column(name=name, dtype=_dtype(parts, known), length=VARYING)
    lengths = {part.shape[1] for part in parts}
    if len(lengths) > 1:
        raise DataError(
            f"requests must hold the same number of values of {name!r} in each row",
            got=Plain(", ".join(map(str, sorted(lengths)))),
        )
    (length,) = lengths
    is_single = length == 1 and (known is None or known.length is None)
    return Column(name=name, dtype=_dtype(parts, known), length=None if is_single else length)


def _dtype(parts: Sequence[NDArray[Any]], known: ColumnSchema | None) -> Dtype:
    """Return the schema's type if the values are of the same kind: a different float width is not an anomaly."""
    wanted = None if known is None else known.dtype
    kinds = {part.dtype.kind for part in parts}
    if kinds & set("OSU"):
        return "image" if wanted == "image" else "string"
    if kinds <= set("iub") and wanted not in ("float32", "float64"):
        return "int64"
    return "float64" if wanted == "float64" else "float32"


def _arrow(column: Column, parts: Sequence[NDArray[Any] | None], counts: Sequence[int]) -> pa.Array:
    if column.is_ragged:
        return _lists(column, parts, counts)
    chunks = [
        _missing(column, rows) if part is None else _items(column, part)
        for part, rows in zip(parts, counts, strict=True)
    ]
    flat = pa.concat_arrays(chunks)
    if column.length is None:
        return flat
    return pa.FixedSizeListArray.from_arrays(flat, column.length)


def _lists(column: Column, parts: Sequence[NDArray[Any] | None], counts: Sequence[int]) -> pa.Array:
    """Return lists without the padding that clients add to give them the same length."""
    found = []
    for part, rows in zip(parts, counts, strict=True):
        padded = np.zeros((rows, 0), np.int64) if part is None else part
        if column.dtype == "string":
            padded = np.array([[_bytes(value) for value in row] for row in padded], object)
            padded = padded.reshape(rows, -1)
        lengths = list_lengths(column, padded)
        flat = padded[np.arange(padded.shape[1]) < lengths[:, None]]
        found.append(lists_of(lengths, _items(column, flat)))
    return pa.concat_arrays(found)


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


def _items(column: Column, part: NDArray[Any]) -> pa.Array:
    item = replace(column, length=None).arrow_type
    flat = part.reshape(-1)
    if column.dtype in ("string", "image"):
        values = [_bytes(value) for value in flat.tolist()]
        if column.dtype == "string":
            return pa.array([v.decode(errors="replace") for v in values], item)
        return pa.array(values, item)
    return pa.array(flat.astype(item.to_pandas_dtype()), item, from_pandas=True)


def _missing(column: Column, rows: int) -> pa.Array:
    item = replace(column, length=None).arrow_type
    return pa.nulls(rows * (column.length or 1), item)
