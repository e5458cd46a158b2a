"""TensorFlow Serving's documented examples: the requests of its page on REST get the same bytes.

Source: tensorflow/serving, `docs/api_rest.md`, "Example", and `docs/signature_defs.md`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from keras.export import ExportArchive

from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server

Ask = Callable[..., Any]
HALF = "/v1/models/half_plus_three"

STATUS = """{
 "model_version_status": [
  {
   "version": "123",
   "state": "AVAILABLE",
   "status": {
    "error_code": "OK",
    "error_message": ""
   }
  }
 ]
}
"""


def half_plus_three(path: Path) -> Path:
    """Its example model: y = x / 2 + 3 to predict, and the same of Examples to regress."""
    parsed: Any = {"x": tf.io.FixedLenFeature([1], tf.float32, 0.0)}

    def predict(x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"y": x * 0.5 + 3.0}

    def regress(inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        features: Any = tf.io.parse_example(inputs, parsed)
        return {"outputs": features["x"] * 0.5 + 3.0}

    archive = ExportArchive()
    x = [tf.TensorSpec([None, 1], tf.float32, name="x")]
    archive.add_endpoint("serving_default", tf.function(predict), input_signature=x)
    texts = [tf.TensorSpec([None], tf.string, name="inputs")]
    archive.add_endpoint("tensorflow/serving/regress", tf.function(regress), input_signature=texts)
    archive.write_out(str(path), verbose=False)
    return path


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server of the model in the folder 00000123, as its repository has it."""
    folder = tmp_path_factory.mktemp("documented")
    base = folder / "half_plus_three"
    shutil.copytree(half_plus_three(folder / "export"), base / "00000123")
    server = Server(
        ServeConfig(
            models={"half_plus_three": base},
            rest_port=0,
            grpc_port=0,
            poll_s=0.05,
            lame_duck_s=0.0,
            drain_s=5,
        )
    )
    server.start()
    try:
        assert server.wait_until_ready(60)
        yield server.rest_port
    finally:
        server.stop()


@pytest.mark.parametrize("path", [HALF, f"{HALF}/versions/123", f"{HALF}/versions/00000123"])
def test_the_status_is_printed_as_documented(port: int, ask_at: Ask, path: str) -> None:
    answer = ask_at(port, path)

    assert (answer.status, answer.body) == (200, STATUS)
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"instances": [1.0, 2.0, 5.0]}, '{"predictions": [3.5, 4.0, 5.5]}'),
        ({"instances": [[1.0], [2.0]]}, '{"predictions": [[3.5], [4.0]]}'),
        ({"inputs": [[1.0], [2.0]]}, '{"outputs": [[3.5], [4.0]]}'),
    ],
)
def test_predict_is_answered_as_documented(port: int, ask_at: Ask, body: Any, text: str) -> None:
    answer = ask_at(port, f"{HALF}:predict", body)

    assert (answer.status, answer.body) == (200, text)


def test_regress_is_answered_as_documented(port: int, ask_at: Ask) -> None:
    """The page: `curl -d '{"signature_name": "tensorflow/serving/regress", "examples": [...]}'`."""
    body = {"signature_name": "tensorflow/serving/regress", "examples": [{"x": 1.0}, {"x": 2.0}]}

    answer = ask_at(port, f"{HALF}:regress", body)

    assert (answer.status, answer.body) == (200, '{"results": [3.5, 4.0]}')


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/models/nope:predict", "Servable not found for request: Latest(nope)"),
        ("/v1/models/nope/versions/2:predict", "Servable not found for request: Specific(nope, 2)"),
        (
            f"{HALF}/versions/1:predict",
            "Servable not found for request: Specific(half_plus_three, 1)",
        ),
    ],
)
def test_an_unknown_model_is_an_error_in_tensorflow_servings_words(
    port: int, ask_at: Ask, path: str, said: str
) -> None:
    answer = ask_at(port, path, {"instances": [1.0]})

    assert (answer.status, answer.json()) == (404, {"error": said})
