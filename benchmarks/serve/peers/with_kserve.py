"""KServe's Python server with a custom model.

python with_kserve.py PORT MODELS
"""

import sys
import uuid
from pathlib import Path

import numpy as np
import tensorflow as tf
import uvicorn
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer

PORT, MODELS = int(sys.argv[1]), Path(sys.argv[2])


class LocalConfig(uvicorn.Config):
    """uvicorn's, on this machine's own address."""

    def __init__(self, app: object, *, host: str, **options: object) -> None:  # noqa: ARG002 - that is what it is for
        """As uvicorn's."""
        super().__init__(app, host="127.0.0.1", **options)


class SavedModel(Model):
    """One SavedModel."""

    def load(self) -> bool:
        """Load it."""
        self.loaded = tf.saved_model.load(str(MODELS / self.name / "1"))
        self.signature = self.loaded.signatures["serving_default"]
        self.ready = True
        return self.ready

    def predict(
        self,
        payload: dict | InferRequest,
        headers: dict | None = None,  # noqa: ARG002 - the base's
    ) -> dict | InferResponse:
        """Ask it, by either protocol."""
        if isinstance(payload, InferRequest):
            answer = self._answer(payload.inputs[0].as_numpy())
            output = InferOutput("output", list(answer.shape), "FP32")
            output.set_data_from_numpy(answer, binary_data=False)
            return InferResponse(str(uuid.uuid4()), self.name, [output])
        answer = self._answer(np.asarray(payload["instances"], np.float32))
        return {"predictions": answer.tolist()}

    def _answer(self, rows: np.ndarray) -> np.ndarray:
        return self.signature(tf.constant(rows))["output"].numpy()


if __name__ == "__main__":
    uvicorn.Config = LocalConfig  # KServe listens on every address, and has no option for it
    served = [SavedModel("mlp"), SavedModel("cnn")]
    for model in served:
        model.load()
    ModelServer(http_port=PORT, workers=1, enable_grpc=False, enable_latency_logging=False).start(
        served
    )
