"""`stoker serve` against the same calls in its own process, by batch size, on the available device.

python benchmarks/serve/gpu.py --batch-sizes 1 8 32 128 --model resnet50 --seconds 3 --out FILE

Clients send raw tensors over the loopback: gRPC with `tensor_content`, and the Open Inference Protocol's
binary form. The same number of threads call the loaded model in this process. Windows of the two
alternate, so that disturbances affect both. The file is written after each batch size.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from servers import HERE, post, start_ours

from stoker.app.import_tensorflow import import_tensorflow

MODELS = {"resnet50": (224, 224, 3), "small": (32, 32, 3)}
"""Name -> shape of an image, of uint8."""

_GRPC = "/tensorflow.serving.PredictionService/Predict"
_INFER = "/v2/models/served/infer"
_INFER_HEADER = "Inference-Header-Content-Length"


@dataclass(frozen=True, kw_only=True)
class Body:
    """One way to send a batch."""

    name: str
    kind: str
    port: int
    path: str
    message: bytes
    headers: tuple[str, ...] = ()


def export_model(name: str, folder: Path) -> None:
    """Build a model with random weights that takes pixels, and export it."""
    import keras
    import tensorflow as tf
    from keras.export import ExportArchive

    keras.utils.set_random_seed(1)
    shape = MODELS[name]
    if name == "resnet50":
        net = keras.applications.ResNet50(weights=None, input_shape=shape)
    else:
        layers = [keras.layers.Conv2D(16, 3, strides=2, activation="relu") for _ in range(3)]
        net = keras.Sequential(
            [keras.Input(shape), *layers, keras.layers.Flatten(), keras.layers.Dense(10)]
        )

    @tf.function
    def call(image: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"output": net(tf.cast(image, tf.float32) / 127.5 - 1.0, training=False)}

    archive = ExportArchive()
    archive.track(net)
    spec = [tf.TensorSpec((None, *shape), tf.uint8, name="image")]
    archive.add_endpoint("serving_default", call, input_signature=spec)
    archive.write_out(str(folder), verbose=False)


def bodies_of(batch: np.ndarray[Any, Any], *, rest_port: int, grpc_port: int) -> list[Body]:
    """A batch in each form that is measured."""
    from tensorflow.core.framework import types_pb2
    from tensorflow_serving.apis import predict_pb2

    request = predict_pb2.PredictRequest()
    request.model_spec.name = "served"
    proto = request.inputs["image"]
    proto.dtype, proto.tensor_content = types_pb2.DT_UINT8, batch.tobytes()
    for size in batch.shape:
        proto.tensor_shape.dim.add(size=size)
    tensor = {
        "name": "image",
        "datatype": "UINT8",
        "shape": list(batch.shape),
        "parameters": {"binary_data_size": batch.nbytes},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return [
        Body(
            name="grpc",
            kind="grpc",
            port=grpc_port,
            path=_GRPC,
            message=request.SerializeToString(),
        ),
        Body(
            name="open-inference",
            kind="http",
            port=rest_port,
            path=_INFER,
            message=head + batch.tobytes(),
            headers=(f"{_INFER_HEADER}={len(head)}", "Content-Type=application/octet-stream"),
        ),
    ]


class Clients:
    """Processes that send one body repeatedly, each over its own connection."""

    def __init__(self, body: Body, count: int, folder: Path) -> None:
        """Start them."""
        file = folder / body.name
        file.write_bytes(body.message)
        command = [sys.executable, str(HERE / "raw_client.py"), body.kind, str(body.port)]
        command += [body.path, str(file), *body.headers]
        self._processes = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(count)
        ]

    def per_s(self, seconds: float) -> float:
        """Calls per second over all of them, in one window.

        Raises:
            RuntimeError: a client ended; its message was printed.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
        total = 0.0
        for process in self._processes:
            assert process.stdout is not None
            calls, _, took_s = process.stdout.readline().partition(" ")
            if not took_s:
                raise RuntimeError("a client ended before its window did")
            total += int(calls) / float(took_s)
        return total

    def end(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.communicate()


def in_process_per_s(call: Callable[[], object], *, threads: int, seconds: float) -> float:
    """Calls per second of as many threads as there are clients, in one window."""
    rates: list[float] = []

    def run() -> None:
        calls, began_s = 0, time.monotonic()
        while (took_s := time.monotonic() - began_s) < seconds or not calls:
            call()
            calls += 1
        rates.append(calls / took_s)

    callers = [threading.Thread(target=run) for _ in range(threads)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    if len(rates) != threads:
        raise RuntimeError("a call in this process failed; its traceback is above")
    return sum(rates)


def summary(per_s: Sequence[float], rows: int) -> dict[str, float]:
    """Rows per second: the median of the windows, the least and the most."""
    found = [each * rows for each in per_s]
    return {
        "median": round(statistics.median(found), 1),
        "least": round(min(found), 1),
        "most": round(max(found), 1),
    }


def measure(
    rows: int, call: Callable[[Any], object], ports: tuple[int, int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure one batch size: each body alternates with calls in this process."""
    batch = np.random.default_rng(rows).integers(
        0, 256, (rows, *MODELS[options.model]), dtype=np.uint8
    )
    found: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clients: dict[str, Clients] = {}
        for body in bodies_of(batch, rest_port=ports[0], grpc_port=ports[1]):
            clients[body.name] = Clients(body, options.connections, folder)
            stack.callback(clients[body.name].end)
        per_s: dict[str, list[float]] = {name: [] for name in ("in process", *clients)}
        for window in range(options.windows + 1):  # the first warms up and is not counted
            seconds = options.seconds if window else min(options.seconds, 1.0)
            own = in_process_per_s(
                lambda: call(batch), threads=options.connections, seconds=seconds
            )
            rates = {"in process": own}
            rates |= {name: each.per_s(seconds) for name, each in clients.items()}
            if window:
                for name, rate in rates.items():
                    per_s[name].append(rate)
    for name in clients:
        pairs = zip(per_s[name], per_s["in process"], strict=True)
        found.append(
            {
                "batch": rows,
                "body": name,
                "served_rows_per_s": summary(per_s[name], rows),
                "in_process_rows_per_s": summary(per_s["in process"], rows),
                "served_share": round(statistics.median(a / b for a, b in pairs), 3),
            }
        )
    return found


@contextmanager
def serving(root: Path, log: Path, options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Start `stoker serve` on the model; return its ports."""
    cores = sorted(os.sched_getaffinity(0))
    more = ["--max-body-mb", "256", *options.serve]
    server, grpc_port = start_ours(
        ["--model_name", "served", "--model_base_path", str(root)], log, *more, cores=cores
    )
    try:
        server.wait_until(lambda: post(server.port, "/readyz", b"")[0] == 200)
        yield server.port, grpc_port
    finally:
        server.stop()


def device() -> dict[str, Any]:
    """The device that the models run on."""
    import tensorflow as tf

    from stoker.cluster.devices import cpu_name, find_devices
    from stoker.cluster.doctor.gpus import read_gpus

    seen = bool(tf.config.list_physical_devices("GPU"))
    gpus = find_devices().gpus
    return {
        "device": gpus[0].name if seen and gpus else cpu_name(),
        "gpu": seen,
        "driver": read_gpus().driver,
        "cores": len(os.sched_getaffinity(0)),
        "tensorflow": tf.__version__,
    }


def main() -> None:
    """Measure every batch size."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--model", choices=MODELS, default="resnet50")
    parser.add_argument("--seconds", type=float, default=3.0, help="Length of a window.")
    parser.add_argument("--windows", type=int, default=5, help="Windows of each.")
    parser.add_argument("--connections", type=int, default=4, help="Clients, and threads here.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--serve", nargs="*", default=[], help="More options of stoker serve.")
    options = parser.parse_args()
    import_tensorflow()
    from stoker.registry.exported_model import DEFAULT_SIGNATURE, load_model

    with tempfile.TemporaryDirectory() as made:
        root = Path(made) / "served"
        export_model(options.model, root / "1")
        model = load_model(root / "1")
        result: dict[str, Any] = {
            "what": "served rows a second against the same calls in process",
            "model": options.model,
            "connections": options.connections,
            "seconds": options.seconds,
            "windows": options.windows,
            **device(),
            "rows": [],
        }
        with serving(root, Path(made) / "log", options) as ports:
            for rows in options.batch_sizes:
                found = measure(
                    rows,
                    lambda batch: model.call(DEFAULT_SIGNATURE, {"image": batch}),
                    ports,
                    options,
                )
                result["rows"] += found
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(result, indent=1) + "\n")
                for each in found:
                    print(json.dumps(each), flush=True)


if __name__ == "__main__":
    main()
