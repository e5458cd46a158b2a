"""Run the analyzers that `preprocessing_fn` calls, in as few passes over the training split as possible.

Each pass traces the function with the results so far as constants, and finds the analyzer calls whose input
does not depend on a call without a result. It computes them with Ibis on DuckDB: for a raw column, directly
from the shards; for a derived tensor, from a temporary Parquet file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ibis.expr.types as ir
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import tensorflow as tf

from stoker.cluster.limits import usable_cores
from stoker.core.errors import ConfigError, Plain
from stoker.core.files import write_atomic
from stoker.core.user_code import first_line
from stoker.data.columns import Column, to_numpy
from stoker.data.dataset import BATCH_ROWS, Dataset
from stoker.data.features import analyzers, engine
from stoker.data.features.engine import Progress
from stoker.data.features.preprocessing.trace import Call, VocabularyFile, changed_requests, sources
from stoker.data.features.preprocessing.trace_function import Plan, TracedFunction, trace_function
from stoker.data.features.spec import escaped, json_number
from stoker.data.ingest.image_store import encoded_image

TRAIN = "train"
"""The only split that a transform may learn from."""

_BATCH_BYTES = 32 << 20
"""Maximum size of decoded images and vectors held at a time; with floats made of them, well below 1 GiB."""

_SUMS = ("moments", "range")
"""Analyzers whose result depends on the order of the rows, even if only in the sign of a zero."""

_VALUE_BYTES = 8
"""Size of one number of a vector, bytes."""

_LONG_LIST = 1 << 12
"""Length that is assumed for the longest list in a batch, if lists have varying lengths."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A function whose analyzer calls all have a result."""

    traced: TracedFunction
    """The last trace."""

    answers: list[Any]
    """The result of each analyzer call."""

    objects: list[Any]
    """The tables and other objects that the last trace created."""


def resolve(plan: Plan, scratch: Path, progress: Progress) -> Resolved:
    """Trace the function and run its analyzers until every call has a result.

    Args:
        plan: The function, and the dataset and columns to trace it with.
        scratch: Folder for vocabularies (kept until the transform is saved) and for temporary files.
        progress: Called with the rows done in each pass.

    Raises:
        ConfigError: the function fails, or calls different analyzers when it is traced again.
        DataError: a shard is damaged, or the training split is empty.
    """
    answers: list[Any] = []
    requests: list[Any] = []
    for phase in itertools.count(1):
        objects: list[Any] = []
        traced = trace_function(plan, answers=answers, requests=requests, objects=objects)
        if requests and len(traced.trace.calls) < len(requests):
            raise changed_requests()
        requests = [(call.kind, call.params) for call in traced.trace.calls]
        answers = answers or [None] * len(requests)
        ready = _answerable(traced, answers)
        if not ready:
            break
        pass_progress = _pass_progress(progress, plan.dataset, phase)
        for index, answer in _run_pass(plan, traced, ready, scratch, pass_progress):
            answers[index] = answer
    return Resolved(traced=traced, answers=answers, objects=objects)


def batch_rows(dataset: Dataset) -> int:
    """Return the number of rows that run through the graph at a time."""
    image = dataset.image
    pixels = 0 if image is None else image.height * image.width * image.channels
    values = sum(_LONG_LIST if c.is_ragged else c.length or 0 for c in dataset.columns)
    size = pixels + _VALUE_BYTES * values
    return max(1, min(BATCH_ROWS, _BATCH_BYTES // max(size, 1)))


def needed_columns(
    traced: TracedFunction, tensors: Sequence[tf.Tensor], dataset: Dataset
) -> list[Column]:
    """Return the raw columns that tensors depend on, in the dataset's order."""
    names = sources(tensors)
    return [column for column in dataset.columns if traced.raw[column.name].op.name in names]


def as_tensors(batch: pa.RecordBatch, columns: Sequence[Column]) -> list[tf.Tensor]:
    """Return a batch's columns as the graph's input tensors."""
    return [
        tf.constant(_feed_values(column, batch.column(column.name)), column.tensor_dtype)
        for column in columns
    ]


def _feed_values(column: Column, values: pa.Array) -> Any:
    found = to_numpy(column, values)
    # An image store of the kind `raw` holds pixels, but the graph takes only encoded images.
    return [encoded_image(each) for each in found] if column.dtype == "image" else found


def describe_call(call: Call, traced: TracedFunction, answer: Any) -> dict[str, Any]:
    """Return an analyzer call and its result as JSON values, for people."""
    column = _raw_column(traced, call.tensor)
    return {
        "kind": call.kind,
        "of": column if column is not None else call.tensor.op.name,
        "is_raw_column": column is not None,
        "params": call.params,
        "answer": _json_value(answer),
    }


def _json_value(answer: Any) -> Any:
    match answer:
        case analyzers.Moments():
            numbers = asdict(answer) | {"mean": float(answer.mean)}
            return {name: json_number(value) for name, value in numbers.items()}
        case VocabularyFile():
            return {"file": answer.name, "terms": answer.terms}
        case bytes():
            return answer.decode(errors="backslashreplace")
        case list() | tuple():
            return [_json_value(item) for item in answer]
    return json_number(answer)


def _answerable(traced: TracedFunction, answers: Sequence[Any]) -> list[int]:
    calls = traced.trace.calls
    waiting = {calls[i].placeholder.op.name for i, answer in enumerate(answers) if answer is None}
    return [
        index
        for index, answer in enumerate(answers)
        if answer is None and not sources([calls[index].tensor]) & waiting
    ]


def _run_pass(
    plan: Plan,
    traced: TracedFunction,
    ready: Sequence[int],
    scratch: Path,
    progress: Callable[[int], None],
) -> Iterator[tuple[int, Any]]:
    calls = traced.trace.calls
    raw = {index: _raw_column(traced, calls[index].tensor) for index in ready}
    derived = [index for index in ready if raw[index] is None]
    spilled = {index: scratch / f"spill-{index}.parquet" for index in derived}
    if derived:
        _spill(plan.dataset, traced, spilled, progress)
    by_pages = [index for index in ready if raw[index] and calls[index].kind == "classes"]
    is_empty = not plan.dataset.rows(TRAIN)
    if is_empty or any(raw[index] and index not in by_pages for index in ready):
        engine.verify_split(plan.dataset, TRAIN)

    def answer(index: int, threads: int = 1) -> Any:
        column = raw[index]
        with engine.connection(threads=threads) as backend:
            if column is None:
                table = engine.read_parquet(backend, [spilled[index]]).table
            else:
                train = engine.read_split(backend, plan.dataset, TRAIN)
                table = train.present_values(plan.dataset.column(column))
            return _analyze(calls[index], index, table, scratch)

    sums = [index for index in ready if calls[index].kind in _SUMS]
    yield from zip(sums, engine.in_parallel(answer, sums), strict=True)
    for index in by_pages:
        yield index, _classes(plan.dataset, str(raw[index]))
    for index in ready:
        if index not in sums and index not in by_pages:
            yield index, answer(index, threads=usable_cores())
    for path in spilled.values():
        path.unlink()
    progress(plan.dataset.rows(TRAIN))


def _classes(dataset: Dataset, column: str) -> list[bytes]:
    """Return what `analyzers.classes` does, for a raw column; reads only this column of the shards."""
    found: set[str] = set()
    for batch in dataset.batches(TRAIN, columns=[column], whole=False):
        found.update(pc.unique(batch.column(0)).to_pylist())
    return sorted(name.encode() for name in found if name)


def _raw_column(traced: TracedFunction, tensor: tf.Tensor) -> str | None:
    values = traced.raw | {name: lists.flat_values for name, lists in traced.lists.items()}
    known = {value.ref(): name for name, value in values.items()}
    while tensor.ref() not in known and tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return known.get(tensor.ref())


def _analyze(call: Call, index: int, table: ir.Table, scratch: Path) -> Any:
    match call.kind:
        case "moments":
            return analyzers.moments(table)
        case "range":
            return analyzers.value_range(table)
        case "quantiles":
            return analyzers.quantiles(table, call.params["num_buckets"])
        case "classes":
            return analyzers.classes(table)
        case "vocabulary":
            return _vocabulary(call, index, table, scratch)


def _vocabulary(call: Call, index: int, table: ir.Table, scratch: Path) -> VocabularyFile:
    terms = analyzers.vocabulary(
        table,
        top_k=call.params["top_k"],
        frequency_threshold=call.params["frequency_threshold"],
    )
    name = call.params["vocab_filename"] or f"vocab_{index}"
    path = scratch / "vocabularies" / f"{index}" / name
    escapes = any(b"\n" in term or b"\r" in term for term in terms)
    lines = [escaped(term) for term in terms] if escapes else terms
    write_atomic(path, b"".join(line + b"\n" for line in lines))
    return VocabularyFile(name=name, path=str(path), terms=len(terms), escaped=escapes)


def _spill(
    dataset: Dataset,
    traced: TracedFunction,
    paths: dict[int, Path],
    progress: Callable[[int], None],
) -> None:
    """Run the graph over the training split; write the values that analyzers need to Parquet files."""
    calls = [traced.trace.calls[index] for index in paths]
    tensors = [_storable(call.tensor) for call in calls]
    columns = needed_columns(traced, tensors, dataset)
    pruned = traced.wrapped.prune([traced.raw[column.name] for column in columns], tensors)
    writers: dict[int, pq.ParquetWriter] = {}
    done = 0
    names = [column.name for column in columns]
    try:
        for batch in dataset.batches(TRAIN, columns=names, rows=batch_rows(dataset)):
            for index, call, values in zip(
                paths, calls, run_graph(pruned, batch, columns), strict=True
            ):
                table = pa.table(_spilled_columns(call, values))
                if index not in writers:
                    writers[index] = pq.ParquetWriter(paths[index], table.schema)
                writers[index].write_table(table)
            done += batch.num_rows
            progress(done)
    finally:
        for writer in writers.values():
            writer.close()


def run_graph(pruned: Any, batch: pa.RecordBatch, columns: Sequence[Column]) -> list[Any]:
    """Run one batch through a part of the graph on the CPU; return NumPy arrays.

    Raises:
        ConfigError: an operation of the user's function fails on these rows.
    """
    try:
        with tf.device("CPU:0"):
            return [tensor.numpy() for tensor in pruned(*as_tensors(batch, columns))]
    except tf.errors.OpError as error:
        raise ConfigError(
            "preprocessing_fn must work on every row of the training split",
            got=Plain(first_line(error)),
            fix="Fix the operation in the message, or the rows on which it fails.",
        ) from error


def _storable(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype not in (tf.float16, tf.bfloat16):
        return tensor
    with tensor.graph.as_default():
        return tf.cast(tensor, tf.float32)


def _spilled_columns(call: Call, values: Any) -> dict[str, Any]:
    # Partial results of moments are float64, which does not hold every 64-bit integer.
    if call.kind == "moments" and values.dtype not in (np.int64, np.uint64):
        return analyzers.row_moments(values)
    if call.kind == "range":
        return analyzers.row_range(values)
    flat = np.asarray(values).reshape(-1)
    is_text = flat.dtype == object
    return {"value": pa.array(flat.tolist(), pa.binary()) if is_text else pa.array(flat)}


def _pass_progress(progress: Progress, dataset: Dataset, phase: int) -> Callable[[int], None]:
    rows = dataset.rows(TRAIN)
    return lambda done: progress(done, rows, f"analysis, pass {phase}")
