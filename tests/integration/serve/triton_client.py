"""What NVIDIA's client for Triton gets of a server; a script for an environment that has it.

    python triton_client.py REST_PORT GRPC_PORT

Prints a JSON object for each of its clients: call -> answer, or `HttpError: TEXT`.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

X = np.array([[1.0], [2.0], [5.0]], np.float32)
NUMBERS = [
    "float16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
]


class Client:
    """Either of the clients, so far as they differ."""

    def __init__(self, module: Any, port: int) -> None:
        self.module = module
        self.is_http = module is tritonclient.http
        self.client = module.InferenceServerClient(f"127.0.0.1:{port}")

    def tensor(self, name: str, array: Any, *, binary: bool = True) -> Any:
        made = self.module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        made.set_data_from_numpy(array, **({"binary_data": binary} if self.is_http else {}))
        return made

    def wanted(self, name: str, *, binary: bool = True) -> Any:
        return self.module.InferRequestedOutput(
            name, **({"binary_data": binary} if self.is_http else {})
        )

    def half(self, **more: Any) -> Any:
        found = self.client.infer("half_plus_two", [self.tensor("x", X)], **more)
        return found.as_numpy("y").tolist()


def echoed(client: Client, *, binary: bool) -> dict[str, bool]:
    """Each datatype of the protocol, there and back."""
    rng = np.random.default_rng(0)
    sent = {name: (rng.random((2, 3)) * 100).astype(name) for name in NUMBERS}
    if not binary:  # JSON has none of 16 bits
        del sent["float16"]
    sent["string"] = np.array([[b"a", "\u00e9".encode(), b""], [b"x" * 300, b"\\", b'"']], object)
    inputs = [client.tensor(name, array, binary=binary) for name, array in sent.items()]
    model = "echo" if binary else "echo_json"
    outputs = [client.wanted(f"{name}_out", binary=binary) for name in sent]
    if binary:
        sent["bfloat16"] = (rng.random((2, 3)) * 100).astype(ml_dtypes.bfloat16)
        inputs.append(client.tensor("bfloat16", sent["bfloat16"]))
        outputs.append(client.wanted("bfloat16_out"))
    found = client.client.infer(model, inputs, outputs=outputs)
    return {name: same(array, found.as_numpy(f"{name}_out")) for name, array in sent.items()}


def same(sent: Any, came: Any) -> bool:
    if sent.dtype == object:
        texts = [one if isinstance(one, bytes) else one.encode() for one in came.reshape(-1)]
        return texts == list(sent.reshape(-1)) and came.shape == sent.shape
    return came.dtype == sent.dtype and np.array_equal(sent, came)


def described(client: Client) -> Any:
    found = client.client.get_model_metadata("two")
    if not client.is_http:
        inputs = [[one.name, one.datatype, list(one.shape)] for one in found.inputs]
        return [found.platform, list(found.versions), inputs]
    inputs = [[one["name"], one["datatype"], one["shape"]] for one in found["inputs"]]
    return [found["platform"], found["versions"], inputs]


def mixed(client: Client) -> Any:
    """A request that its client does not wait for."""
    inputs = [client.tensor("x", X)]
    if client.is_http:
        return (
            client.client.async_infer("half_plus_two", inputs).get_result().as_numpy("y").tolist()
        )
    answers: queue.Queue[Any] = queue.Queue()
    client.client.async_infer(
        "half_plus_two", inputs, callback=lambda result, error: answers.put((result, error))
    )
    result, error = answers.get(timeout=30)
    if error:
        raise error
    return result.as_numpy("y").tolist()


def questions(client: Client) -> dict[str, Callable[[], Any]]:
    """The calls of each of the two clients."""
    infer, own = client.client.infer, client.client
    calls: dict[str, Callable[[], Any]] = {
        "live": own.is_server_live,
        "ready": own.is_server_ready,
        "model ready": lambda: own.is_model_ready("two", "1"),
        "version not ready": lambda: own.is_model_ready("two", "9"),
        "model not there": lambda: own.is_model_ready("none"),
        "described": lambda: described(client),
        "half": client.half,
        "version": lambda: client.half(model_version="1"),
        "signature": lambda: client.half(parameters={"signature_name": "serving_default"}),
        "priority": lambda: client.half(priority=1, timeout=5_000_000),
        "echo": lambda: echoed(client, binary=True),
        "mixed": lambda: mixed(client),
        "empty": lambda: list(
            infer("half_plus_two", [client.tensor("x", X[:0])]).as_numpy("y").shape
        ),
        "wrong datatype": lambda: infer("half_plus_two", [client.tensor("x", X.astype("int64"))]),
        "wrong name": lambda: infer("half_plus_two", [client.tensor("z", X)]),
        "wrong output": lambda: client.half(outputs=[client.wanted("z")]),
        "wrong model": lambda: infer("none", [client.tensor("x", X)]),
        "sequence": lambda: client.half(sequence_id=3, sequence_start=True),
    }
    if client.is_http:
        calls["echo in JSON"] = lambda: echoed(client, binary=False)
        for coding in ("gzip", "deflate"):
            calls[coding] = partial(
                client.half,
                request_compression_algorithm=coding,
                response_compression_algorithm=coding,
            )
    else:
        calls["gzip"] = lambda: client.half(compression_algorithm="gzip")
    return calls


def answers(client: Client) -> dict[str, Any]:
    said: dict[str, Any] = {}
    for name, ask in questions(client).items():
        try:
            said[name] = ask()
        except InferenceServerException as error:
            said[name] = f"Refused: {error.status()} {error.message()}"
    return said


async def several(module: Any, parent: Any, port: int) -> Any:
    """Twenty at once, by the client for asyncio."""
    tensor = parent.InferInput("x", [3, 1], "FP32")
    tensor.set_data_from_numpy(X)
    async with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
        found = await asyncio.gather(*[client.infer("half_plus_two", [tensor]) for _ in range(20)])
    return [one.as_numpy("y").tolist() for one in found]


def main() -> None:
    said = {}
    for name, port in zip(("http", "grpc"), map(int, sys.argv[1:]), strict=True):
        module = getattr(tritonclient, name)
        said[name] = answers(Client(module, port))
        said[name]["several"] = asyncio.run(several(module.aio, module, port))
    print(json.dumps(said))


main()
