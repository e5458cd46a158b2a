"""gRPC compared with grpcio without a model, and the time of each side."""

from __future__ import annotations

import struct
import sys

import grpc
import models
import numpy as np
import servers
from figures import Figure, figure
from lineup import Lineup, ratio, shown
from load import Window, by_h2load
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc
from tensorflow_serving.apis.predict_pb2 import PredictRequest

METHOD = "/tensorflow.serving.PredictionService/Predict"

_CONNECTIONS = (1, 16)
_FLOOR = "grpcio, no model"


def predict_request(model: str) -> PredictRequest:
    """The model's row as a client's tensor: raw content, as `tf.make_tensor_proto` writes it."""
    row = models.request_of(model).row[None]
    request = PredictRequest()
    request.model_spec.name = model
    tensor = request.inputs["input"]
    tensor.dtype = 1  # DT_FLOAT
    for size in row.shape:
        tensor.tensor_shape.dim.add(size=size)
    tensor.tensor_content = row.tobytes()
    return request


def predicted(port: int, request: PredictRequest) -> predict_pb2.PredictResponse:
    """What a server says to one call."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        return stub.Predict(request, timeout=60, wait_for_ready=True)


def grpc_case(lineup: Lineup, *, seconds: int, rounds: int) -> list[Figure]:
    """The perceptron by gRPC."""
    lineup.start(["stoker"])
    request, ours = predict_request("mlp"), lineup["stoker"]
    contestants = lineup.contestants("mlp", ["stoker"])
    with ours.running():
        answer = predicted(lineup.grpc_port, request)
        rest = contestants[0].read(
            servers.post(ours.port, contestants[0].request.path, contestants[0].request.body)[1]
        )
    if not np.allclose(_values(answer), np.ravel(rest), atol=1e-5):
        raise RuntimeError(f"gRPC answers {answer}, REST {rest}")
    floor = _floor(lineup, request, answer)
    figures = []
    for connections in _CONNECTIONS:
        found: dict[str, list[Window]] = {"stoker": [], _FLOOR: []}
        for number in range(rounds):
            for name in list(found)[:: -1 if number % 2 else 1]:
                server = ours if name == "stoker" else floor
                port = lineup.grpc_port if name == "stoker" else floor.port
                with server.running():
                    window = by_h2load(
                        server,
                        port=port,
                        method=METHOD,
                        message=request.SerializeToString(),
                        answer_bytes=answer.ByteSize(),
                        connections=connections,
                        seconds=seconds,
                        scratch=lineup.scratch,
                    )
                found[name].append(window)
                sys.stderr.write(f"bench-serve: gRPC {connections} {name}: {shown([window])}\n")
        figures += _figures(found, connections)
    return figures


def _floor(
    lineup: Lineup, request: PredictRequest, answer: predict_pb2.PredictResponse
) -> servers.Server:
    if "floor" not in lineup:
        path = lineup.scratch / "answer.pb"
        path.write_bytes(answer.SerializeToString())
        log = lineup.scratch / "floor.log"
        server = servers.of_ours(_FLOOR, "floor.py", str(path), log=log)

        def answers() -> bool:
            try:
                return predicted(server.port, request) == answer
            except grpc.RpcError as error:
                raise ConnectionError(str(error)) from error

        lineup.add("floor", server, answers)
    return lineup["floor"]


def _values(answer: predict_pb2.PredictResponse) -> tuple[float, ...]:
    tensor = answer.outputs["output"]
    content = tensor.tensor_content
    return struct.unpack(f"<{len(content) // 4}f", content) if content else tuple(tensor.float_val)


def _figures(found: dict[str, list[Window]], connections: int) -> list[Figure]:
    begin = f"gRPC, MLP, {connections} connection" + ("s" if connections > 1 else "")
    ours, floor = found["stoker"], found[_FLOOR]
    how = (
        f"{len(ours)} windows in turn by h2load, one call under way a connection; "
        f"ours: {shown(ours)}; floor: {shown(floor)}"
    )
    share = 100 * ratio(ours, floor)
    return [
        figure(f"{begin}: against {_FLOOR}", share, "%", at_least=90.0, peer=_FLOOR, how=how),
        *(
            figure(
                f"{begin}: {name}",
                float(np.median([window.per_s for window in windows])),
                "calls/s",
                how=shown(windows),
            )
            for name, windows in found.items()
        ),
    ]
