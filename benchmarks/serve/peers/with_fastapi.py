"""FastAPI + uvicorn, as it is commonly written: a pydantic body, the SavedModel's signature.

python with_fastapi.py PORT MODELS
"""

import sys
from pathlib import Path

import tensorflow as tf
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

PORT, MODELS = int(sys.argv[1]), Path(sys.argv[2])

app = FastAPI()
loaded = {name: tf.saved_model.load(str(MODELS / name / "1")) for name in ("mlp", "cnn")}
signatures = {name: model.signatures["serving_default"] for name, model in loaded.items()}


class Rows(BaseModel):
    """A batch of rows."""

    instances: list[list[float]]


class Images(BaseModel):
    """A batch of images."""

    instances: list[list[list[list[float]]]]


def _predicted(model: str, instances: list) -> dict[str, list]:
    outputs = signatures[model](tf.constant(instances, tf.float32))
    return {"predictions": outputs["output"].numpy().tolist()}


# `async`, so that no thread stands between: for a model this small that is the quicker way.
@app.post("/mlp")
async def mlp(body: Rows) -> dict[str, list[list[float]]]:
    """Ask the perceptron."""
    return _predicted("mlp", body.instances)


@app.post("/cnn")
async def cnn(body: Images) -> dict[str, list[list[float]]]:
    """Ask the CNN."""
    return _predicted("cnn", body.instances)


if __name__ == "__main__":
    uvicorn.run(app, host="127.0.0.1", port=PORT, access_log=False)
