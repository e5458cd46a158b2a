"""The models that are served, and the rows of their requests."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

FEATURES, CLASSES = 16, 2
IMAGE_SHAPE = (224, 224, 3)
_DECIMALS = 4
"""Of the image's values: a JSON image of 1.2 MB, as clients send them."""


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A model's name and the one row of every contestant's requests."""

    model: str
    row: NDArray[np.float32]

    @property
    def instances(self) -> bytes:
        """TensorFlow Serving's and KServe's body."""
        return json.dumps({"instances": [self.values]}).encode()

    @property
    def infer(self) -> bytes:
        """The Open Inference Protocol's body, its data flat."""
        tensor = {
            "name": "input",
            "shape": [1, *self.row.shape],
            "datatype": "FP32",
            "data": [_short(value) for value in self.row.reshape(-1)],
        }
        return json.dumps({"inputs": [tensor]}).encode()

    @property
    def values(self) -> list[object]:
        """The row as lists, each number with the digits that it was rounded to."""
        return json.loads(json.dumps(self.row.tolist(), default=float), parse_float=_short)


def _short(value: object) -> float:
    return round(float(value), _DECIMALS)  # type: ignore[arg-type] # a number or its text


def request_of(model: str) -> ModelRequest:
    """The request to a model: always the same."""
    shape = (FEATURES,) if model == "mlp" else IMAGE_SHAPE
    row = np.random.default_rng(7).uniform(size=shape).round(_DECIMALS)
    return ModelRequest(model=model, row=row.astype(np.float32))


class Weights(tf.Module):
    """A model whose variables are drawn from a fixed seed."""

    def __init__(self, seed: int) -> None:
        """Args: seed: of the weights."""
        super().__init__()
        self._random = np.random.default_rng(seed)
        self.all: list[tf.Variable] = []

    def new(self, *shape: int) -> tf.Variable:
        """A variable whose outputs keep the size of its inputs."""
        scale = np.sqrt(2.0 / np.prod(shape[:-1]))
        drawn = self._random.normal(scale=scale, size=shape).astype(np.float32)
        self.all.append(tf.Variable(drawn))
        return self.all[-1]


def write_mlp(path: Path) -> None:
    """16 numbers -> 2, over 32 and 32."""
    weights = Weights(1)
    layers = [weights.new(FEATURES, 32), weights.new(32, 32), weights.new(32, CLASSES)]

    @tf.function(input_signature=[tf.TensorSpec((None, FEATURES), tf.float32, name="input")])
    def serve(x: tf.Tensor) -> dict[str, tf.Tensor]:
        for layer in layers[:-1]:
            x = tf.nn.relu(tf.matmul(x, layer))
        return {"output": tf.nn.softmax(tf.matmul(x, layers[-1]))}

    tf.saved_model.save(weights, str(path), signatures={"serving_default": serve})


CNN_FILTERS = (48, 128, 224, 256)
"""About 5 ms a row on one core of the machine that the figures come from."""


def write_cnn(path: Path, *, filters: tuple[int, ...] = CNN_FILTERS, seed: int = 2) -> None:
    """A photograph of 224 x 224 -> 10, by convolutions that halve it each."""
    weights = Weights(seed)
    channels = (3, *filters)
    kernels = [weights.new(3, 3, before, after) for before, after in itertools.pairwise(channels)]
    head = weights.new(filters[-1], 10)

    @tf.function(input_signature=[tf.TensorSpec((None, *IMAGE_SHAPE), tf.float32, name="input")])
    def serve(x: tf.Tensor) -> dict[str, tf.Tensor]:
        for kernel in kernels:
            x = tf.nn.relu(tf.nn.conv2d(x, kernel, strides=2, padding="SAME"))
        return {"output": tf.nn.softmax(tf.matmul(tf.reduce_mean(x, axis=(1, 2)), head))}

    tf.saved_model.save(weights, str(path), signatures={"serving_default": serve})


def write_models(root: Path) -> None:
    """Both, each as version 1 in a folder of its name."""
    write_mlp(root / "mlp" / "1")
    write_cnn(root / "cnn" / "1")
