"""Logs a sample of requests with their answers as TFRecords of `PredictionLog`.

The format is that of TensorFlow Serving's request logging. A file is a sample of real requests, and can be used
unchanged for the warm-up of a version (`assets.extra/tf_serving_warmup_requests`).

Source: TensorFlow Serving, `logging_config.proto`, `prediction_log.proto`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import logging
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import input_pb2, prediction_log_pb2

from stoker.core.errors import UserError
from stoker.serve.dataplane.requests import Answered, InferResponse, PredictResponse, Tensors
from stoker.serve.grpc.inference import classification_of, regression_of, spec_proto
from stoker.serve.observability.counters import Counter
from stoker.serve.runtime.background import Background
from stoker.serve.servables.examples import CLASSIFY
from stoker.serve.servables.prediction_logs import framed
from stoker.serve.tensor_protos import to_proto

MAX_FILE_BYTES = 64 << 20
"""Size at which a file is closed and the next file begins, bytes."""

MAX_BYTES = 1 << 30
"""Default limit of all files of a log together, bytes: room for a sample of several days, but small next to a disk."""

_FILES = 16
"""A log at its size limit has at least this many files, because files are removed one at a time and each worker writes
one."""

_SCANS = 64
"""Number of scans of all workers' files while the log grows by as many bytes as its limit."""

_TAGS = ("serve",)


class RequestLog:
    """Writes a random sample of the answered requests of all models."""

    def __init__(
        self,
        *,
        dropped: Counter,
        max_bytes: int = MAX_BYTES,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """Log to files of bounded size.

        Args:
            dropped: Counts lost records.
            max_bytes: Limit of all files of a log together, bytes; the oldest files are removed. 0: no limit.
            max_file_bytes: Size at which the next file begins, bytes.
        """
        self._max_bytes = max_bytes
        self._max_file_bytes = min(max_file_bytes, max_bytes // _FILES or max_file_bytes)
        self._files: dict[str, RecordFile] = {}
        self._unscanned: dict[str, int] = {}
        self._dropped = dropped
        self._waiting: Background[Answered] = Background(
            self._write, name="stoker-request-log", on_drop=self._drop
        )

    def add(self, answered: Answered) -> None:
        """Queue a request if it is part of the sample; returns at once."""
        if random.random() < answered.log.rate:  # noqa: S311 - a sample, not a secret
            self._waiting.offer(answered, size=_size(answered))

    def close(self) -> None:
        """Write the pending records, and give the files their final names."""
        self._waiting.close()
        for file in self._files.values():
            file.close()

    def _drop(self, count: int) -> None:
        self._dropped.add(count, log="request")

    def _write(self, batch: Sequence[Answered]) -> None:
        touched = set()
        for answered in batch:
            prefix = answered.log.prefix
            try:
                record = framed(record_of(answered).SerializeToString())
                self._file_for(prefix, len(record)).write(record)
                touched.add(prefix)
            # a dtype that no field holds, or a record above 2 GiB or the log's limit
            except (
                UserError,
                ValueError,
            ):
                self._drop(1)
            except OSError as error:
                self._give_up(prefix, error)
        for prefix in touched & self._files.keys():
            try:
                self._files[prefix].flush()
            except OSError as error:
                self._give_up(prefix, error)

    def _file_for(self, prefix: str, size: int) -> RecordFile:
        """Return the file for a record of this size, after making room for it."""
        file = self._files.get(prefix)
        if file is not None and file.size + size > self._max_file_bytes:
            self._files.pop(prefix).close()
            file = None
        if file is None:
            file = self._files[prefix] = RecordFile(prefix)
            self._unscanned[prefix] = self._max_bytes
        if self._max_bytes:
            self._make_room(prefix, size)
        return file

    def _make_room(self, prefix: str, size: int) -> None:
        """Make room for a record if the log has grown enough since the last scan of all workers' files.

        Raises:
            ValueError: the log is full, and no file can be removed.
        """
        step = self._max_bytes // _SCANS
        self._unscanned[prefix] += size
        if self._unscanned[prefix] <= step:
            return
        self._files[prefix].flush()
        if not make_room(prefix, max_bytes=self._max_bytes, needed=max(size, step)):
            self._files.pop(prefix).close()  # a finished file can be removed
            raise ValueError("the log has no room")
        self._unscanned[prefix] = size

    def _give_up(self, prefix: str, error: OSError) -> None:
        """Abandon a file after an error, because it may end with a partial record.

        The next request begins another file.
        """
        self._drop(1)
        self._waiting.log_failure(error)
        file = self._files.pop(prefix, None)
        if file is not None:
            with contextlib.suppress(OSError):
                file.abandon()


def record_of(answered: Answered) -> prediction_log_pb2.PredictionLog:
    """Return the log record of a request.

    Raises:
        UserError: a tensor has a dtype that no field holds.
    """
    log = prediction_log_pb2.PredictionLog()
    metadata = log.log_metadata
    metadata.sampling_config.sampling_rate = answered.log.rate
    metadata.saved_model_tags.extend(_TAGS)
    metadata.timestamp_secs = int(time.time())
    if isinstance(answered.response, PredictResponse):
        _fill_predict(log, answered.inputs, answered.response)
    else:
        _fill_examples(log, answered, answered.response)
    return log


def _fill_predict(
    log: prediction_log_pb2.PredictionLog, inputs: Tensors, response: PredictResponse
) -> None:
    spec = spec_proto(response.model, response.signature)
    log.log_metadata.model_spec.CopyFrom(spec)
    request, answer = log.predict_log.request, log.predict_log.response
    request.model_spec.CopyFrom(spec)
    answer.model_spec.CopyFrom(spec)
    for name, array in inputs.items():
        request.inputs[name].CopyFrom(to_proto(_plain(array)))
    for name, array in response.outputs.items():
        answer.outputs[name].CopyFrom(to_proto(array))


def _plain(array: np.ndarray) -> np.ndarray:
    """Return an array whose strings are bytes; REST requests may have `str` or bytes."""
    if array.dtype.kind not in "SU":
        return array
    flat = [item.encode() if isinstance(item, str) else item for item in array.reshape(-1).tolist()]
    plain = np.empty(len(flat), dtype=object)
    plain[:] = flat
    return plain.reshape(array.shape)


def _fill_examples(
    log: prediction_log_pb2.PredictionLog, answered: Answered, response: InferResponse
) -> None:
    given = _input(answered)
    first = response.results[0]
    spec = spec_proto(response.model, first.task.signature)
    log.log_metadata.model_spec.CopyFrom(spec)
    if len(response.results) > 1:
        several = log.multi_inference_log
        several.request.input.CopyFrom(given)
        for inferred in response.results:
            own = spec_proto(response.model, inferred.task.signature)
            requested = several.request.tasks.add(method_name=inferred.task.method)
            requested.model_spec.CopyFrom(own)
            answer = several.response.results.add()
            answer.model_spec.CopyFrom(own)
            if inferred.task.method == CLASSIFY:
                answer.classification_result.CopyFrom(classification_of(inferred))
            else:
                answer.regression_result.CopyFrom(regression_of(inferred))
        return
    classifies = first.task.method == CLASSIFY
    one = log.classify_log if classifies else log.regress_log
    one.request.model_spec.CopyFrom(spec)
    one.request.input.CopyFrom(given)
    one.response.model_spec.CopyFrom(spec)
    one.response.result.CopyFrom(classification_of(first) if classifies else regression_of(first))


def _input(answered: Answered) -> input_pb2.Input:
    given = input_pb2.Input()
    examples = [tf.train.Example.FromString(raw) for raw in answered.examples]
    if answered.context:
        given.example_list_with_context.context.ParseFromString(answered.context)
        given.example_list_with_context.examples.extend(examples)
    else:
        given.example_list.examples.extend(examples)
    return given


def _size(answered: Answered) -> int:
    outputs = answered.response.outputs if isinstance(answered.response, PredictResponse) else {}
    arrays = [*answered.inputs.values(), *outputs.values()]
    held = sum(_bytes_of(array) for array in arrays)
    return held + sum(map(len, answered.examples)) + len(answered.context)


def _bytes_of(array: np.ndarray) -> int:
    inside = sum(map(len, array.reshape(-1).tolist())) if array.dtype == object else 0
    return int(array.nbytes) + inside


_log = logging.getLogger(__name__)

UNFINISHED = ".unfinished"
"""Suffix of a file that is being written."""

_REST = re.compile(rf"(?P<stamp>\d{{8}}T\d{{12}})-\d+\.tfrecord(?:{re.escape(UNFINISHED)})?")
"""The part of a log file's name after the prefix."""


class RecordFile:
    """A log file, which gets its final name when it is complete."""

    def __init__(self, prefix: str) -> None:
        """Create the file.

        Args:
            prefix: Beginning of the file's path.

        Raises:
            OSError: the file cannot be created.
        """
        now = dt.datetime.now(dt.UTC)
        stamp = f"{now:%Y%m%dT%H%M%S}{now.microsecond:06}"
        self._final = Path(f"{prefix}-{stamp}-{os.getpid()}.tfrecord")
        self._path = self._final.with_name(self._final.name + UNFINISHED)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _opened(self._path)
        self.size = 0

    def write(self, record: bytes) -> None:
        """Append a framed record."""
        self._file.write(record)
        self.size += len(record)

    def flush(self) -> None:
        """Pass the written bytes to the kernel."""
        self._file.flush()

    def abandon(self) -> None:
        """Close the file, which keeps its unfinished name."""
        self._file.close()

    def close(self) -> None:
        """Close the file, and give it its final name."""
        try:
            self._file.flush()
            # before the lock is released, so that no other worker removes the file as unfinished
            os.replace(self._path, self._final)
        finally:
            self._file.close()


def _opened(path: Path) -> IO[bytes]:
    """Create and lock a file; try again if another process removes it before it is locked."""
    while True:
        file = path.open("xb")
        fcntl.flock(file, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """One of a log's files."""

    path: Path
    stamp: str
    size: int


def make_room(prefix: str, *, max_bytes: int, needed: int) -> bool:
    """Remove the oldest files of a log until it has room. Files that are being written are kept.

    Args:
        prefix: Beginning of the files' paths.
        max_bytes: Limit of all files of the log together, bytes.
        needed: Number of bytes that will be added.

    Returns:
        Whether there is room.
    """
    if needed > max_bytes:
        return False
    files = sorted(_files(prefix), key=lambda found: (found.stamp, found.path.name))
    held = sum(found.size for found in files)
    for found in files:
        if held + needed <= max_bytes:
            break
        if _removed(found.path):
            held -= found.size
            _log.info("%s was removed, because its log has reached its size limit", found.path)
    return held + needed <= max_bytes


def _files(prefix: str) -> Iterator[_Found]:
    """Yield the files of a log, without other files whose names begin with the same prefix."""
    start = Path(f"{prefix}-")
    with os.scandir(start.parent) as entries:
        for entry in entries:
            found = _REST.fullmatch(entry.name.removeprefix(start.name))
            if not entry.name.startswith(start.name) or found is None:
                continue
            # Raised if another worker has removed or renamed the file.
            with contextlib.suppress(FileNotFoundError):
                size = entry.stat(follow_symlinks=False).st_size
                yield _Found(path=Path(entry.path), stamp=found["stamp"], size=size)


def _removed(path: Path) -> bool:
    """Remove a file; return False if a worker writes it or it belongs to another user."""
    try:
        if path.name.endswith(UNFINISHED):
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        else:
            path.unlink()
    except FileNotFoundError:  # another worker has removed it
        return True
    except (BlockingIOError, PermissionError):
        return False
    return True
