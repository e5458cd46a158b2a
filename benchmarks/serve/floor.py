"""grpcio without a model: the same service, and its answer is always the same.

python floor.py PORT ANSWER, the file of a serialized PredictResponse
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc

WORKERS = 8
"""As `stoker serve` has by default."""


class Constant(prediction_service_pb2_grpc.PredictionServiceServicer):
    """Parses what comes, serializes what goes; nothing between."""

    def __init__(self, answer: predict_pb2.PredictResponse) -> None:
        """Args: answer: the answer to every call."""
        self._answer = answer

    def Predict(  # noqa: N802 - the protocol's name
        self,
        request: predict_pb2.PredictRequest,  # noqa: ARG002 - the protocol's
        context: grpc.ServicerContext,  # noqa: ARG002 - the protocol's
    ) -> predict_pb2.PredictResponse:
        """Answer."""
        return self._answer


def main() -> None:
    """Serve."""
    answer = predict_pb2.PredictResponse.FromString(Path(sys.argv[2]).read_bytes())
    server = grpc.server(ThreadPoolExecutor(WORKERS))
    prediction_service_pb2_grpc.add_PredictionServiceServicer_to_server(Constant(answer), server)
    server.add_insecure_port(f"127.0.0.1:{sys.argv[1]}")
    server.start()
    server.wait_for_termination()


if __name__ == "__main__":
    main()
