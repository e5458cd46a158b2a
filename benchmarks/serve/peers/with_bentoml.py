"""BentoML, each model once alone and once with adaptive batching.

python with_bentoml.py PORT MODELS; `bentoml serve` imports it again with PEER_MODELS set.
"""

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    os.environ["PEER_MODELS"] = sys.argv[2]
    os.environ["BENTOML_DO_NOT_TRACK"] = "True"
    os.chdir(Path(__file__).parent)
    serve = ["serve", "with_bentoml:SavedModels", "--host", "127.0.0.1", "--port", sys.argv[1]]
    os.execv(sys.executable, [sys.executable, "-m", "bentoml", *serve])  # noqa: S606 - no shell is the point

import bentoml
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

MODELS = Path(os.environ["PEER_MODELS"])


@bentoml.service(workers=1, logging={"access": {"enabled": False}}, metrics={"enabled": False})
class SavedModels:
    """Both models."""

    def __init__(self) -> None:
        """Load them."""
        names = ("mlp", "cnn")
        self.loaded = {name: tf.saved_model.load(str(MODELS / name / "1")) for name in names}

    def _answer(self, model: str, instances: NDArray[np.float32]) -> NDArray[np.float32]:
        rows = tf.constant(np.asarray(instances, np.float32))
        return self.loaded[model].signatures["serving_default"](rows)["output"].numpy()

    @bentoml.api
    async def mlp(self, instances: NDArray[np.float32]) -> NDArray[np.float32]:
        """Ask the perceptron."""
        return self._answer("mlp", instances)

    @bentoml.api
    async def cnn(self, instances: NDArray[np.float32]) -> NDArray[np.float32]:
        """Ask the CNN."""
        return self._answer("cnn", instances)

    @bentoml.api(batchable=True, max_batch_size=64)
    async def mlp_batched(self, instances: NDArray[np.float32]) -> NDArray[np.float32]:
        """Ask the perceptron about what came together."""
        return self._answer("mlp", instances)

    @bentoml.api(batchable=True, max_batch_size=64)
    async def cnn_batched(self, instances: NDArray[np.float32]) -> NDArray[np.float32]:
        """Ask the CNN about what came together."""
        return self._answer("cnn", instances)
