"""Requests that a version brings with it, run before it takes others.

Source: TensorFlow Serving, "SavedModel Warmup": `assets.extra/tf_serving_warmup_requests`, a TFRecord
of `PredictionLog`, at most 1,000.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError
from tensorflow_serving.apis import input_pb2, prediction_log_pb2

from stoker.export.callpath import DEFAULT_SIGNATURE
from stoker.export.repository import WARM_UP_FILE
from stoker.serve.batching.batcher import Batcher
from stoker.serve.inference import INPUT, joined_examples
from stoker.serve.records import damaged, read_records
from stoker.serve.tensors import to_array

MAX_RECORDS = 1000
"""Most requests in the file; TensorFlow Serving's limit."""


def warm_up(model: Batcher, folder: Path) -> int:
    """Run the requests of a version.

    Returns:
        How many there were.

    Raises:
        DataError: the file is damaged, or holds more records than it may.
        UserError: the model refused a request.
        ServeError: a request names a signature that is not there.
    """
    path = folder / WARM_UP_FILE
    if not path.is_file():
        return 0
    count = 0
    for record in read_records(path):
        count += 1
        if count > MAX_RECORDS:
            raise damaged(path, f"Number of warmup records exceeds the maximum ({MAX_RECORDS})")
        try:
            log = prediction_log_pb2.PredictionLog.FromString(record)
        except DecodeError as error:
            raise damaged(path, f"record {count} is no PredictionLog") from error
        _run(model, log, path)
    return count


def _run(model: Batcher, log: prediction_log_pb2.PredictionLog, path: Path) -> None:
    kind = log.WhichOneof("log_type")
    if kind == "predict_log":
        request = log.predict_log.request
        name = request.model_spec.signature_name or DEFAULT_SIGNATURE
        inputs = {key: to_array(value, name=key) for key, value in request.inputs.items()}
        model.call(name, inputs)
    elif kind in ("classify_log", "regress_log"):
        asked = getattr(log, kind).request
        _run_examples(model, asked.model_spec.signature_name, asked.input)
    elif kind == "multi_inference_log":
        for task in log.multi_inference_log.request.tasks:
            _run_examples(
                model, task.model_spec.signature_name, log.multi_inference_log.request.input
            )
    else:
        raise damaged(path, f"Unsupported log_type for warmup: {kind}")


def _run_examples(model: Batcher, signature: str, given: input_pb2.Input) -> None:
    examples, context = given.example_list.examples, b""
    if given.WhichOneof("kind") == "example_list_with_context":
        examples = given.example_list_with_context.examples
        context = given.example_list_with_context.context.SerializeToString()
    rows = joined_examples([one.SerializeToString() for one in examples], context=context)
    model.call(signature or DEFAULT_SIGNATURE, {INPUT: rows})
