"""Small SavedModels, exported as users' models are, and a real server over them."""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from keras.export import ExportArchive

from stoker.registry.repository import Repository
from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server


def export(
    path: Path, call: Callable[..., Any], inputs: list[tf.TensorSpec], *tracked: tf.Module
) -> Path:
    archive = ExportArchive()
    for module in tracked:
        archive.track(module)
    archive.add_endpoint("serving_default", tf.function(call), input_signature=inputs)
    archive.write_out(str(path), verbose=False)
    return path


def half_plus(path: Path, *, addend: Any) -> Path:
    """TensorFlow Serving's own example model: y = x / 2 + 2."""
    module: Any = tf.Module()
    module.addend = tf.Variable(addend)
    spec = [tf.TensorSpec([None, 1], tf.float32, name="x")]
    return export(path, lambda x: {"y": x * 0.5 + module.addend}, spec, module)


def words(path: Path) -> Path:
    module: Any = tf.Module()
    rows = tf.lookup.KeyValueTensorInitializer(["cash", "card"], [1, 2], tf.string, tf.int64)
    module.table = tf.lookup.StaticHashTable(rows, -1)
    spec = [tf.TensorSpec([None], tf.string, name="word")]
    return export(
        path, lambda word: {"id": module.table.lookup(word), "raw_bytes": word}, spec, module
    )


def two(path: Path) -> Path:
    spec = [
        tf.TensorSpec([None], tf.float32, name="fare"),
        tf.TensorSpec([None, 2], tf.int64, name="place"),
    ]
    return export(
        path, lambda fare, place: {"double": fare * 2.0, "sum": tf.reduce_sum(place, 1)}, spec
    )


def image(path: Path) -> Path:
    def shape_of(image_bytes: tf.Tensor) -> tf.Tensor:
        def one(raw: tf.Tensor) -> tf.Tensor:
            return tf.shape(tf.io.decode_png(raw, channels=3))

        signature: Any = tf.TensorSpec([3], tf.int32)
        return tf.map_fn(one, image_bytes, fn_output_signature=signature)

    return export(path, shape_of, [tf.TensorSpec([None], tf.string, name="image_bytes")])


def everything(path: Path) -> Path:
    """Gives back what it gets, one input for every dtype that is served."""
    dtypes = [tf.float16, tf.bfloat16, tf.float64, tf.int8, tf.int16, tf.int32, tf.uint8]
    dtypes += [tf.uint16, tf.uint32, tf.uint64, tf.bool, tf.complex64, tf.string]
    any_rank: Any = None
    spec = [tf.TensorSpec(any_rank, dtype, name=f"a_{dtype.name}") for dtype in dtypes]

    def same(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        return {f"b_{d.name}": tf.identity(v) for d, v in zip(dtypes, values, strict=True)}

    return export(path, same, spec)


def sums(path: Path) -> Path:
    spec = [tf.TensorSpec([None, None], tf.float32, name="x")]
    return export(path, lambda x: {"sum": tf.reduce_sum(x, 1)}, spec)


def picky(path: Path) -> Path:
    """Three times the first of two values, if the second is not zero in any row."""

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.control_dependencies([tf.debugging.assert_none_equal(x[:, 1], 0.0)]):
            return {"y": x[:, 0] * 3.0}

    return export(path, call, [tf.TensorSpec([None, 2], tf.float32, name="x")])


def judge(path: Path) -> Path:
    """Classifies and regresses Examples: the default signature classifies."""
    spec = [tf.TensorSpec([None], tf.string, name="inputs")]
    parsed: Any = {"x": tf.io.FixedLenFeature([], tf.float32, 0.0)}

    def x_of(rows: tf.Tensor) -> Any:
        return tf.io.parse_example(rows, parsed)["x"]

    def classify(inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        score = tf.sigmoid(x_of(inputs))
        classes = tf.tile(tf.constant([["low", "high"]]), tf.stack([tf.shape(inputs)[0], 1]))
        return {"scores": tf.stack([1.0 - score, score], 1), "classes": classes}

    def regress(inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"outputs": x_of(inputs)[:, None] * 0.5 + 2.0}

    def wide(inputs: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"outputs": tf.stack([x_of(inputs)] * 2, 1)}

    archive = ExportArchive()
    endpoints = {"serving_default": classify, "regress": regress, "wide": wide}
    for name, call in endpoints.items():
        archive.add_endpoint(name, tf.function(call), input_signature=spec)
    archive.write_out(str(path), verbose=False)
    return path


@dataclass(frozen=True)
class Answer:
    status: int
    body: str
    headers: dict[str, str]

    def json(self) -> Any:
        return json.loads(self.body)


def ask_port(
    port: int,
    path: str,
    body: Any = None,
    *,
    method: str = "",
    timeout_s: float = 30.0,
    **headers: str,
) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        connection.request(method or ("GET" if raw is None else "POST"), path, raw, headers)
        response = connection.getresponse()
        return Answer(response.status, response.read().decode(), dict(response.getheaders()))
    finally:
        connection.close()


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Name -> SavedModel of every small model."""
    folder = tmp_path_factory.mktemp("exported")
    return {
        "half_plus_two": half_plus(folder / "half_plus_two", addend=2.0),
        "half_plus_three": half_plus(folder / "half_plus_three", addend=3.0),
        "words": words(folder / "words"),
        "two": two(folder / "two"),
        "image": image(folder / "image"),
        "everything": everything(folder / "everything"),
        "judge": judge(folder / "judge"),
        "sums": sums(folder / "sums"),
        "picky": picky(folder / "picky"),
    }


@contextmanager
def started(config: ServeConfig) -> Iterator[Server]:
    """A server that is ready, until the block ends."""
    server = Server(config)
    server.start()
    try:
        assert server.wait_until_ready(60)
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def server(exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server over a repository with all of them but the second half_plus."""
    repository = Repository(tmp_path_factory.mktemp("models"))
    for name, path in exported.items():
        if name != "half_plus_three":
            repository.push(path, name)
    config = ServeConfig(
        root=repository.root, rest_port=0, grpc_port=0, poll_s=0.1, lame_duck_s=0.0, drain_s=5
    )
    with started(config) as running:
        yield running


@pytest.fixture
def foreign(exported: dict[str, Path], tmp_path: Path) -> Path:
    """A base path as others write it: version 1 without a manifest."""
    shutil.copytree(exported["half_plus_two"], tmp_path / "foreign" / "1")
    return tmp_path / "foreign"


@pytest.fixture(scope="session")
def ask_at() -> Callable[..., Answer]:
    """Asks a port: `ask_at(port, path, body, method=..., **headers)`."""
    return ask_port


@pytest.fixture
def ask(server: Server) -> Callable[..., Answer]:
    """Asks the server: `ask(path, body)`."""

    def to_server(path: str, body: Any = None, **more: Any) -> Answer:
        return ask_port(server.rest_port, path, body, **more)

    return to_server
