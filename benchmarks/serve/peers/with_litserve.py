"""LitServe: one API a model, each with a worker of its own.

python with_litserve.py PORT MODELS
"""

import sys
from pathlib import Path

import litserve
import numpy as np

PORT, MODELS = int(sys.argv[1]), Path(sys.argv[2])


class SavedModel(litserve.LitAPI):
    """One SavedModel, answered in batches of what waits."""

    def setup(self, device: str) -> None:  # noqa: ARG002 - the base's
        """Load it."""
        import tensorflow as tf

        self.constant = tf.constant
        self.loaded = tf.saved_model.load(str(MODELS / self.api_path[1:] / "1"))
        self.signature = self.loaded.signatures["serving_default"]

    def decode_request(self, request: dict) -> np.ndarray:
        """The body's one row."""
        return np.asarray(request["instances"][0], np.float32)

    def batch(self, inputs: list) -> np.ndarray:
        """Rows as one array."""
        return np.stack(inputs)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Ask it."""
        return self.signature(self.constant(x))["output"].numpy()

    def unbatch(self, output: np.ndarray) -> list:
        """One array as rows."""
        return list(output)

    def encode_response(self, output: np.ndarray) -> dict:
        """The answer's body."""
        return {"predictions": [output.tolist()]}


if __name__ == "__main__":
    apis = [
        SavedModel(max_batch_size=64, batch_timeout=0.0, api_path=f"/{name}")
        for name in ("mlp", "cnn")
    ]
    server = litserve.LitServer(apis, accelerator="cpu", workers_per_device=1)
    server.run(
        host="127.0.0.1",
        port=PORT,
        num_api_servers=1,
        generate_client_file=False,
        log_level="warning",
        access_log=False,
    )
