"""A server with one small model, and with the counts of many models; prints its port, and ends with its standard input.

python benchmarks/monitor/scrape_server.py MODELS VERSIONS FOLDER

The counts are made by the calls that count requests, and lie in a worker's file as those of `stoker serve` do. The
models themselves are not loaded: a scrape does not touch them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tensorflow as tf
from keras.export import ExportArchive

from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.errors import Code
from stoker.serve.observability.version_metrics import VersionMetrics
from stoker.serve.process.server import Server

TOOK_S = (0.0004, 0.002, 0.03)
"""Times of the requests to each model."""


def export(folder: Path) -> Path:
    """A model of one multiplication."""
    archive = ExportArchive()
    spec = [tf.TensorSpec([None, 1], tf.float32, name="x")]
    archive.add_endpoint(
        "serving_default", tf.function(lambda x: {"y": x * 0.5}), input_signature=spec
    )
    archive.write_out(str(folder), verbose=False)
    return folder


def count(server: Server, *, models: int, versions: int) -> None:
    """Count requests to each version of each model over both protocols."""
    metrics = server.plane.metrics
    by_version = VersionMetrics(metrics)
    for name in (f"model-of-a-team-{number:04}" for number in range(models)):
        for took_s in TOOK_S:
            metrics.request_count.add(model_name=name, status="OK")
            metrics.request_latency.observe(
                took_s * 1e6, model_name=name, API="predict", entrypoint="REST"
            )
            metrics.runtime_latency.observe(
                took_s * 9e5, model_name=name, API="Predict", runtime="TF1"
            )
            for version in range(1, versions + 1):
                by_version.count(name, version, Code.OK, took_s=took_s)
        metrics.queued_requests.add(0.0, model_name=name)


def main() -> None:
    """Serve until standard input ends."""
    models, versions, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    repository = Repository(folder / "models")
    repository.push(export(folder / "exported"), "small")
    (folder / "workers").mkdir()
    config = ServeConfig(
        root=repository.root,
        rest_port=0,
        grpc_port=0,
        poll_s=1.0,
        lame_duck_s=0.0,
        worker_folder=folder / "workers",
    )
    server = Server(config)
    server.start()
    server.wait_until_ready(120)
    count(server, models=models, versions=versions)
    print(server.rest_port, flush=True)
    sys.stdin.read()
    server.stop()


if __name__ == "__main__":
    main()
