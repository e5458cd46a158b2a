"""Asking a model server over REST and gRPC, as any client of TensorFlow Serving does."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import Plain, UserError
from stoker.core.outputs import ONLY

TIMEOUT_S = 30.0
"""Longest wait for one answer, seconds."""


def json_instances(rows: Mapping[str, NDArray[Any]], *, binary: Sequence[str]) -> list[Any]:
    """Rows as TensorFlow Serving's `instances`: one object a row.

    Args:
        rows: [rows] or [rows, length] values by input; strings as bytes.
        binary: Inputs that hold bytes (images), sent as `{"b64": ...}`.
    """
    count = len(next(iter(rows.values())))
    return [
        {name: _json_value(values[row], binary=name in binary) for name, values in rows.items()}
        for row in range(count)
    ]


def _json_value(value: Any, *, binary: bool) -> Any:
    if isinstance(value, np.ndarray):
        return [_json_value(item, binary=binary) for item in value]
    if isinstance(value, bytes):
        if not binary:
            try:
                return value.decode()
            except UnicodeDecodeError:
                pass
        return {"b64": base64.b64encode(value).decode()}
    return value.item()


def ask_rest(url: str, model: str, instances: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """`POST <url>/v1/models/<model>:predict`.

    Returns:
        Output name -> answers, one a row; a single output stands alone there, and is `ONLY`.

    Raises:
        UserError: the server refused, or did not answer.
    """
    request = urllib.request.Request(  # noqa: S310 - the scheme is ours
        f"{url}/v1/models/{urllib.parse.quote(model)}:predict",
        data=json.dumps({"instances": list(instances)}).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:  # noqa: S310
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        raise UserError(
            "the server must answer over REST",
            got=Plain(f"HTTP {error.code}: {error.read().decode(errors='replace')}"),
        ) from None
    except OSError as error:
        raise UserError("the server must answer over REST", got=Plain(str(error))) from None
    predictions = answer["predictions"]
    if not isinstance(predictions[0], dict):
        return {ONLY: np.asarray(predictions)}
    return {name: np.asarray([row[name] for row in predictions]) for name in predictions[0]}


def ask_grpc(
    address: str, model: str, inputs: Mapping[str, NDArray[Any]]
) -> tuple[dict[str, NDArray[Any]], int]:
    """`PredictionService.Predict` through tensorflow-serving-api's own stubs.

    Args:
        address: `host:port`.
        model: Name of the model.
        inputs: [rows] or [rows, length] values by input.

    Returns:
        Output name -> array, and the version that answered.

    Raises:
        UserError: the server refused, or did not answer.
    """
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    for name, values in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(values))
    with grpc.insecure_channel(address) as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        try:
            response = stub.Predict(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            raise UserError(
                "the server must answer over gRPC",
                got=Plain(f"{error.code().name}: {error.details()}"),
            ) from None
    answers = {name: tf.make_ndarray(tensor) for name, tensor in response.outputs.items()}
    return answers, int(response.model_spec.version.value)
