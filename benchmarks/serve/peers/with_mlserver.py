"""MLServer with a custom runtime, each model once alone and once with adaptive batching.

python with_mlserver.py PORT MODELS
"""

import asyncio
import socket
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf
from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.settings import ModelParameters
from mlserver.types import InferenceRequest, InferenceResponse

PORT, MODELS = int(sys.argv[1]), Path(sys.argv[2])
BATCHED = {"max_batch_size": 64, "max_batch_time": 0.002}


class SavedModel(MLModel):
    """One SavedModel."""

    async def load(self) -> bool:
        """Load it."""
        self.loaded = tf.saved_model.load(self.settings.parameters.uri)
        self.signature = self.loaded.signatures["serving_default"]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """Ask it."""
        rows = NumpyCodec.decode_input(payload.inputs[0]).astype(np.float32, copy=False)
        answer = self.signature(tf.constant(rows))["output"].numpy()
        output = NumpyCodec.encode_output("output", answer)
        return InferenceResponse(model_name=self.name, outputs=[output])


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def _settings(name: str, **batching: float) -> ModelSettings:
    return ModelSettings(
        name=name + ("-batched" if batching else ""),
        implementation=SavedModel,
        parameters=ModelParameters(uri=str(MODELS / name / "1")),
        **batching,
    )


async def main() -> None:
    """Serve."""
    server = MLServer(
        Settings(
            host="127.0.0.1",
            http_port=PORT,
            grpc_port=_free_port(),
            metrics_endpoint=None,
            parallel_workers=0,  # in the server's own process: no copy to another
            debug=False,  # with it every request is logged
            use_structured_logging=False,
        )
    )
    models = [_settings(name, **batching) for name in ("mlp", "cnn") for batching in ({}, BATCHED)]
    await server.start(models)


if __name__ == "__main__":
    asyncio.run(main())
