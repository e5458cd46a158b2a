"""Ray Serve: one replica a model behind its proxy, with Ray Serve's own batching.

python with_ray.py PORT MODELS
"""

import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
from ray import serve
from starlette.requests import Request

PORT, MODELS = int(sys.argv[1]), Path(sys.argv[2])


@serve.deployment(
    max_ongoing_requests=128,
    ray_actor_options={"num_cpus": 0},
    logging_config={"enable_access_log": False},
)
class SavedModel:
    """One SavedModel."""

    def __init__(self, path: str) -> None:
        """Load it."""
        import tensorflow as tf

        self.constant = tf.constant
        self.loaded = tf.saved_model.load(path)
        self.signature = self.loaded.signatures["serving_default"]

    @serve.batch(max_batch_size=64, batch_wait_timeout_s=0.0)
    async def rows(self, rows: list) -> list:
        """Ask it about what came together."""
        found = self.signature(self.constant(np.concatenate(rows)))["output"].numpy()
        return [row[None] for row in found]

    async def __call__(self, request: Request) -> dict:
        """Answer one request."""
        body = await request.json()
        answer = await self.rows(np.asarray(body["instances"], np.float32))
        return {"predictions": answer.tolist()}


if __name__ == "__main__":
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        _node_ip_address="127.0.0.1",
    )
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    for name in ("mlp", "cnn"):
        app = SavedModel.bind(str(MODELS / name / "1"))
        serve.run(app, name=name, route_prefix=f"/{name}")
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    over.wait()
    serve.shutdown()
    ray.shutdown()
