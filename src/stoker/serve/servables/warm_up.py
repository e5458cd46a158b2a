"""Runs the warm-up requests of a version before it takes traffic.

Source: TensorFlow Serving, "SavedModel Warmup": `assets.extra/tf_serving_warmup_requests`, a TFRecord file with at most
1,000 records of `PredictionLog`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from google.protobuf.message import DecodeError
from tensorflow_serving.apis import input_pb2, prediction_log_pb2

from stoker.registry.exported_model import DEFAULT_SIGNATURE
from stoker.registry.repository import WARM_UP_FILE
from stoker.serve.batching.batcher import Batcher
from stoker.serve.batching.joined import Array, rows_of
from stoker.serve.servables.examples import INPUT, joined_examples
from stoker.serve.servables.prediction_logs import damaged, read_records
from stoker.serve.tensor_protos import to_array

MAX_RECORDS = 1000
"""Maximum number of requests in the file; TensorFlow Serving's limit."""


Samples = dict[str, Mapping[str, Array]]
"""Signature -> the inputs of its first request that has rows."""


def warm_up(model: Batcher, folder: Path, *, times: int = 1) -> tuple[int, Samples]:
    """Run the warm-up requests of a version.

    Args:
        model: The loaded version.
        folder: The version's folder.
        times: How often each request is run.

    Returns:
        The number of records, and for each signature the inputs of the first request that has rows.

    Raises:
        DataError: the file is damaged, or has too many records.
        UserError: the model refused a request.
        ServeError: a request names an unknown signature.
    """
    path = folder / WARM_UP_FILE
    samples: Samples = {}
    if not path.is_file():
        return 0, samples
    count = 0
    for record in read_records(path):
        count += 1
        if count > MAX_RECORDS:
            raise damaged(path, f"Number of warmup records exceeds the maximum ({MAX_RECORDS})")
        try:
            log = prediction_log_pb2.PredictionLog.FromString(record)
        except DecodeError as error:
            raise damaged(path, f"record {count} is not a PredictionLog") from error
        for signature, inputs in _requests(log, path):
            for _ in range(times):
                model.call(signature, inputs)
            if rows_of(list(inputs.values())):
                samples.setdefault(signature, inputs)
    return count, samples


def _requests(
    log: prediction_log_pb2.PredictionLog, path: Path
) -> Iterator[tuple[str, Mapping[str, Array]]]:
    """Yield the signature and the inputs of each request in a record."""
    kind = log.WhichOneof("log_type")
    if kind == "predict_log":
        request = log.predict_log.request
        inputs = {key: to_array(value, name=key) for key, value in request.inputs.items()}
        yield request.model_spec.signature_name or DEFAULT_SIGNATURE, inputs
    elif kind in ("classify_log", "regress_log"):
        requested = getattr(log, kind).request
        yield _examples(requested.model_spec.signature_name, requested.input)
    elif kind == "multi_inference_log":
        for task in log.multi_inference_log.request.tasks:
            yield _examples(task.model_spec.signature_name, log.multi_inference_log.request.input)
    else:
        raise damaged(path, f"Unsupported log_type for warmup: {kind}")


def _examples(signature: str, given: input_pb2.Input) -> tuple[str, Mapping[str, Array]]:
    examples, context = given.example_list.examples, b""
    if given.WhichOneof("kind") == "example_list_with_context":
        examples = given.example_list_with_context.examples
        context = given.example_list_with_context.context.SerializeToString()
    rows = joined_examples([one.SerializeToString() for one in examples], context=context)
    return signature or DEFAULT_SIGNATURE, {INPUT: rows}
