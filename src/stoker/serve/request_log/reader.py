"""Reads logged requests from the files of a request log."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow_serving.apis import input_pb2, prediction_log_pb2

from stoker.serve.servables.examples import joined_examples
from stoker.serve.servables.prediction_logs import damaged, read_records
from stoker.serve.tensor_protos import to_array

Request = dict[str, np.ndarray[Any, Any]]
"""A logged request: input -> [rows, ...] values. For Examples: feature -> values, without missing features."""

EXAMPLES = "examples"
"""Name of the input of the signature `serving_examples`; its serialized `tf.train.Example`s are parsed."""


def logged_requests(paths: Iterable[Path]) -> Iterator[Request]:
    """Yield the requests of files, in order. Each Example becomes a request of one row.

    Raises:
        DataError: a file is damaged, or contains other records.
    """
    for path in paths:
        for number, record in enumerate(read_records(path), start=1):
            try:
                log = prediction_log_pb2.PredictionLog.FromString(record)
            except DecodeError as error:
                raise damaged(path, f"record {number} is not a PredictionLog") from error
            yield from _requests(log, path)


def _requests(log: prediction_log_pb2.PredictionLog, path: Path) -> Iterator[Request]:
    kind = log.WhichOneof("log_type")
    if kind == "predict_log":
        given = log.predict_log.request.inputs
        inputs = {name: to_array(value, name=name) for name, value in given.items()}
        if list(inputs) == [EXAMPLES] and inputs[EXAMPLES].dtype == object:
            yield from map(_features, inputs[EXAMPLES].reshape(-1))
        else:
            yield inputs
    elif kind in ("classify_log", "regress_log", "multi_inference_log"):
        yield from map(_features, _serialized(getattr(log, kind).request.input))
    else:
        raise damaged(path, f"a log of the kind {kind}")


def _serialized(given: input_pb2.Input) -> np.ndarray[Any, Any]:
    several, context = given.example_list.examples, b""
    if given.WhichOneof("kind") == "example_list_with_context":
        several = given.example_list_with_context.examples
        context = given.example_list_with_context.context.SerializeToString()
    return joined_examples([one.SerializeToString() for one in several], context=context)


def _features(raw: bytes) -> Request:
    found: Request = {}
    for name, feature in tf.train.Example.FromString(raw).features.feature.items():
        kind = feature.WhichOneof("kind")
        values = getattr(feature, kind).value if kind else ()
        if values:
            dtype = {"int64_list": np.int64, "float_list": np.float32}.get(str(kind), object)
            found[name] = np.array([list(values)], dtype=dtype)
    return found
