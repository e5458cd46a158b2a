"""A sample of the requests with their answers, as TFRecords of `PredictionLog`.

They are what TensorFlow Serving's request logging writes: a file of them is a version's warm-up
(`assets.extra/tf_serving_warmup_requests`) as it stands, and a sample of what clients really send.

Source: TensorFlow Serving, `logging_config.proto`, `prediction_log.proto`.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence

import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import input_pb2, prediction_log_pb2

from stoker.core.errors import UserError
from stoker.serve.dataplane.requests import Answered, InferResponse, PredictResponse, Tensors
from stoker.serve.grpc.inference import classification_of, regression_of, spec_proto
from stoker.serve.observability.metrics import Counter
from stoker.serve.request_log.files import RecordFile, make_room
from stoker.serve.runtime.background import Background
from stoker.serve.servables.examples import CLASSIFY
from stoker.serve.servables.prediction_logs import framed
from stoker.serve.tensor_protos import to_proto

MAX_FILE_BYTES = 64 << 20
"""A file that has grown so large is closed, and the next begun."""

MAX_BYTES = 1 << 30
"""What all files of one log may have together where nobody says otherwise: days of a sample, no disk."""

_FILES = 16
"""A log at its limit has at least so many files: one of them goes at a time, and each worker holds one."""

_LOOKS = 64
"""How often the others' files are looked at while the log grows by its limit."""

_TAGS = ("serve",)


class RequestLog:
    """Takes answered requests of all models, and writes those that the dice choose."""

    def __init__(
        self,
        *,
        dropped: Counter,
        max_bytes: int = MAX_BYTES,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        """Log to files of bounded size.

        Args:
            dropped: Counts what is lost.
            max_bytes: Most that all files of one log may have, 0 for no limit; the oldest go first.
            max_file_bytes: Size at which the next file begins.
        """
        self._max_bytes = max_bytes
        self._max_file_bytes = min(max_file_bytes, max_bytes // _FILES or max_file_bytes)
        self._files: dict[str, RecordFile] = {}
        self._unseen: dict[str, int] = {}
        self._dropped = dropped
        self._waiting: Background[Answered] = Background(
            self._write, name="stoker-request-log", on_drop=self._drop
        )

    def add(self, answered: Answered) -> None:
        """Have it written, if it is one of the sample; returns at once."""
        if random.random() < answered.log.rate:  # noqa: S311 - a sample, no secret
            self._waiting.offer(answered, size=_size(answered))

    def close(self) -> None:
        """Write what waits, and give the files their names."""
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
            except (
                UserError,
                ValueError,
            ):  # a dtype without a field, above 2 GiB or the log's limit
                self._drop(1)
            except OSError as error:
                self._give_up(prefix, error)
        for prefix in touched & self._files.keys():
            try:
                self._files[prefix].flush()
            except OSError as error:
                self._give_up(prefix, error)

    def _file_for(self, prefix: str, size: int) -> RecordFile:
        """The file that a record of this size goes to, with room for it."""
        file = self._files.get(prefix)
        if file is not None and file.size + size > self._max_file_bytes:
            self._files.pop(prefix).close()
            file = None
        if file is None:
            file = self._files[prefix] = RecordFile(prefix)
            self._unseen[prefix] = self._max_bytes
        if self._max_bytes:
            self._make_room(prefix, size)
        return file

    def _make_room(self, prefix: str, size: int) -> None:
        """Look at all files of the log where it has grown; what others write is seen at the next look.

        Raises:
            ValueError: there is none, as other workers write all the rest.
        """
        step = self._max_bytes // _LOOKS
        self._unseen[prefix] += size
        if self._unseen[prefix] <= step:
            return
        self._files[prefix].flush()
        if not make_room(prefix, max_bytes=self._max_bytes, needed=max(size, step)):
            self._files.pop(prefix).close()  # what is whole may go
            raise ValueError("the log has no room")
        self._unseen[prefix] = size

    def _give_up(self, prefix: str, error: OSError) -> None:
        """Leave a file as it is, maybe with half a record at its end; the next request begins another."""
        self._drop(1)
        self._waiting.say(error)
        file = self._files.pop(prefix, None)
        if file is not None:
            with contextlib.suppress(OSError):
                file.abandon()


def record_of(answered: Answered) -> prediction_log_pb2.PredictionLog:
    """What stands in the file for a request.

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
    """Text as bytes: a client of REST may send either."""
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
            asked = several.request.tasks.add(method_name=inferred.task.method)
            asked.model_spec.CopyFrom(own)
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
