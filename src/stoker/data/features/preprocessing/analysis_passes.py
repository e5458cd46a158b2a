"""Answer what `preprocessing_fn` asks of the data: a full pass, then the questions that hang on it.

Each phase walks through the function with the answers so far as constants, finds the questions
that hang on no open one, and answers them in one pass over the training split: raw columns by Ibis
on DuckDB straight from the shards, derived tensors by way of a temporary Parquet file.
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
from stoker.data.features.preprocessing.trace import Call, VocabularyFile, asks_otherwise, sources
from stoker.data.features.preprocessing.trace_function import Plan, Walk, walk
from stoker.data.features.spec import escaped, json_number
from stoker.data.ingest.stored_images import encoded_image

TRAIN = "train"
"""The only split that a transform may learn from."""

_BATCH_BYTES = 32 << 20
"""Decoded images and vectors held at a time: with their floats beside them still well below 1 GiB."""

_SUMS = ("moments", "range")
"""Analyzers whose result depends on the order of the rows, if only in the sign of a zero."""

_VALUE_BYTES = 8
"""A number of a vector."""

_LONG_LIST = 1 << 12
"""Values of the longest list that a batch is taken to hold, of those whose length varies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """A walk in which nothing is open."""

    walk: Walk
    """The last walk."""

    answers: list[Any]
    """By call."""

    objects: list[Any]
    """The tables of the last walk."""


def resolve(plan: Plan, scratch: Path, progress: Progress) -> Resolved:
    """Walk and answer until nothing is open.

    Args:
        plan: What to build.
        scratch: Folder for vocabularies (kept until saving) and for temporary files.
        progress: Told of the rows of each pass.

    Raises:
        ConfigError: the function is at fault, or asks otherwise when it is called again.
        DataError: a shard is damaged, the training split is empty.
    """
    answers: list[Any] = []
    asked: list[Any] = []
    for phase in itertools.count(1):
        objects: list[Any] = []
        walked = walk(plan, answers=answers, asked=asked, objects=objects)
        if asked and len(walked.trace.calls) < len(asked):
            raise asks_otherwise()
        asked = [(call.kind, call.params) for call in walked.trace.calls]
        answers = answers or [None] * len(asked)
        ready = _ready(walked, answers)
        if not ready:
            break
        told = _told(progress, plan.dataset, phase)
        for index, answer in _answered(plan, walked, ready, scratch, told):
            answers[index] = answer
    return Resolved(walk=walked, answers=answers, objects=objects)


def batch_rows(dataset: Dataset) -> int:
    """Rows that are run through the graph at a time."""
    image = dataset.image
    pixels = 0 if image is None else image.height * image.width * image.channels
    values = sum(_LONG_LIST if c.is_ragged else c.length or 0 for c in dataset.columns)
    size = pixels + _VALUE_BYTES * values
    return max(1, min(BATCH_ROWS, _BATCH_BYTES // max(size, 1)))


def needed_columns(walked: Walk, tensors: Sequence[tf.Tensor], dataset: Dataset) -> list[Column]:
    """The raw columns that tensors hang on, in the dataset's order."""
    names = sources(tensors)
    return [column for column in dataset.columns if walked.raw[column.name].op.name in names]


def as_tensors(batch: pa.RecordBatch, columns: Sequence[Column]) -> list[tf.Tensor]:
    """A batch's columns as the tensors that the graph is fed with."""
    return [
        tf.constant(_fed(column, batch.column(column.name)), column.tensor_dtype)
        for column in columns
    ]


def _fed(column: Column, values: pa.Array) -> Any:
    found = to_numpy(column, values)
    # A `raw` store holds pixels, which the graph does not take from a stranger.
    return [encoded_image(each) for each in found] if column.dtype == "image" else found


def explain(call: Call, walked: Walk, answer: Any) -> dict[str, Any]:
    """A question and its answer, for reading."""
    column = _raw_column(walked, call.tensor)
    return {
        "kind": call.kind,
        "of": column if column is not None else call.tensor.op.name,
        "is_raw_column": column is not None,
        "params": call.params,
        "answer": _plain(answer),
    }


def _plain(answer: Any) -> Any:
    match answer:
        case analyzers.Moments():
            numbers = asdict(answer) | {"mean": float(answer.mean)}
            return {name: json_number(value) for name, value in numbers.items()}
        case VocabularyFile():
            return {"file": answer.name, "terms": answer.terms}
        case bytes():
            return answer.decode(errors="backslashreplace")
        case list() | tuple():
            return [_plain(item) for item in answer]
    return json_number(answer)


def _ready(walked: Walk, answers: Sequence[Any]) -> list[int]:
    calls = walked.trace.calls
    waiting = {calls[i].stand_in.op.name for i, answer in enumerate(answers) if answer is None}
    return [
        index
        for index, answer in enumerate(answers)
        if answer is None and not sources([calls[index].tensor]) & waiting
    ]


def _answered(
    plan: Plan, walked: Walk, ready: Sequence[int], scratch: Path, progress: Callable[[int], None]
) -> Iterator[tuple[int, Any]]:
    calls = walked.trace.calls
    raw = {index: _raw_column(walked, calls[index].tensor) for index in ready}
    derived = [index for index in ready if raw[index] is None]
    spilled = {index: scratch / f"spill-{index}.parquet" for index in derived}
    if derived:
        _spill(plan.dataset, walked, spilled, progress)
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
                table = train.only(plan.dataset.column(column))
            return _answer(calls[index], index, table, scratch)

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
    """As `analyzers.classes`, for a raw column; nothing else in the shards is read."""
    found: set[str] = set()
    for batch in dataset.batches(TRAIN, columns=[column], whole=False):
        found.update(pc.unique(batch.column(0)).to_pylist())
    return sorted(name.encode() for name in found if name)


def _raw_column(walked: Walk, tensor: tf.Tensor) -> str | None:
    values = walked.raw | {name: lists.flat_values for name, lists in walked.lists.items()}
    known = {value.ref(): name for name, value in values.items()}
    while tensor.ref() not in known and tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return known.get(tensor.ref())


def _answer(call: Call, index: int, table: ir.Table, scratch: Path) -> Any:
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
    dataset: Dataset, walked: Walk, paths: dict[int, Path], progress: Callable[[int], None]
) -> None:
    """Run the graph over the training split, and write what the questions need of it."""
    calls = [walked.trace.calls[index] for index in paths]
    tensors = [_storable(call.tensor) for call in calls]
    columns = needed_columns(walked, tensors, dataset)
    pruned = walked.wrapped.prune([walked.raw[column.name] for column in columns], tensors)
    writers: dict[int, pq.ParquetWriter] = {}
    done = 0
    names = [column.name for column in columns]
    try:
        for batch in dataset.batches(TRAIN, columns=names, rows=batch_rows(dataset)):
            for index, call, values in zip(paths, calls, run(pruned, batch, columns), strict=True):
                table = pa.table(_columns(call, values))
                if index not in writers:
                    writers[index] = pq.ParquetWriter(paths[index], table.schema)
                writers[index].write_table(table)
            done += batch.num_rows
            progress(done)
    finally:
        for writer in writers.values():
            writer.close()


def run(pruned: Any, batch: pa.RecordBatch, columns: Sequence[Column]) -> list[Any]:
    """One batch through a piece of the graph, on the CPU, as NumPy arrays.

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
            fix="Mend the operation that is named, or the rows that it cannot take.",
        ) from error


def _storable(tensor: tf.Tensor) -> tf.Tensor:
    if tensor.dtype not in (tf.float16, tf.bfloat16):
        return tensor
    with tensor.graph.as_default():
        return tf.cast(tensor, tf.float32)


def _columns(call: Call, values: Any) -> dict[str, Any]:
    # Partial results are float64, which does not hold every integer of 64 bits.
    if call.kind == "moments" and values.dtype not in (np.int64, np.uint64):
        return analyzers.row_moments(values)
    if call.kind == "range":
        return analyzers.row_range(values)
    flat = np.asarray(values).reshape(-1)
    is_text = flat.dtype == object
    return {"value": pa.array(flat.tolist(), pa.binary()) if is_text else pa.array(flat)}


def _told(progress: Progress, dataset: Dataset, phase: int) -> Callable[[int], None]:
    rows = dataset.rows(TRAIN)
    return lambda done: progress(done, rows, f"analysis, pass {phase}")
