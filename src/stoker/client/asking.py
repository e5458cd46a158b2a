"""One call, and the connection is given back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from stoker.client.grpc_client import GrpcClient
from stoker.client.rest_client import RestClient


def ask_rest(url: str, model: str, instances: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """`POST <url>/v1/models/<model>:predict`.

    Returns:
        Output name -> answers, one a row; a single output stands alone there, and is `ONLY`.

    Raises:
        CallError: the server refused, or did not answer.
    """
    with RestClient(url) as client:
        return dict(client.predict(model, instances).outputs)


def ask_grpc(
    address: str, model: str, inputs: Mapping[str, NDArray[Any]]
) -> tuple[dict[str, NDArray[Any]], int]:
    """`PredictionService.Predict`.

    Args:
        address: `host:port`.
        model: Name of the model.
        inputs: [rows] or [rows, length] values by input.

    Returns:
        Output name -> array, and the version that answered.

    Raises:
        CallError: the server refused, or did not answer.
    """
    with GrpcClient(address) as client:
        answers = client.predict(model, inputs)
    return dict(answers.outputs), answers.version or 0
