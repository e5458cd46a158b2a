"""Small models, and a real `stoker serve` over them, as the tools' users have it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from keras.export import ExportArchive

from stoker.registry.repository import Repository

DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int8, tf.int16, tf.int32, tf.int64]
DTYPES += [tf.uint8, tf.uint16, tf.uint32, tf.uint64, tf.bool, tf.complex64, tf.string]
START_S = 600.0


def export(path: Path, call: Any, inputs: list[tf.TensorSpec]) -> Path:
    archive = ExportArchive()
    archive.add_endpoint("serving_default", tf.function(call), input_signature=inputs)
    archive.write_out(str(path), verbose=False)
    return path


def half(path: Path, *, addend: float) -> Path:
    """TensorFlow Serving's own example model: y = x / 2 + 2."""
    spec = [tf.TensorSpec([None], tf.float32, name="x")]
    return export(path, lambda x: {"y": x * 0.5 + addend}, spec)


def write_models(folder: Path) -> Iterator[tuple[str, Path]]:
    """Half plus two; two inputs and outputs; the length of an image; what comes in goes out."""
    yield "half", half(folder / "half", addend=2.0)
    taxi = [tf.TensorSpec([None], tf.float32, name="fare")]
    taxi += [tf.TensorSpec([None, 2], tf.int64, name="place")]
    taxi += [tf.TensorSpec([None], tf.string, name="company")]
    yield (
        "taxi",
        export(
            folder / "taxi",
            lambda fare, place, company: {
                "double": fare * 2.0,
                "sum": tf.reduce_sum(place, 1),
                "who": tf.strings.join([company, "!"]),
            },
            taxi,
        ),
    )
    image = [tf.TensorSpec([None], tf.string, name="image")]
    yield "image", export(folder / "image", tf.strings.length, image)
    any_rank: Any = None
    specs = [tf.TensorSpec(any_rank, dtype, name=f"a_{dtype.name}") for dtype in DTYPES]

    def same(*values: tf.Tensor) -> dict[str, tf.Tensor]:
        return {f"b_{d.name}": tf.identity(v) for d, v in zip(DTYPES, values, strict=True)}

    yield "everything", export(folder / "everything", same, specs)


@dataclass(frozen=True)
class Served:
    rest: str
    grpc: str


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server in a process of its own, over all of the models."""
    folder = tmp_path_factory.mktemp("tools")
    repository = Repository(folder / "models")
    for name, path in write_models(folder):
        repository.push(path, name)
    ready = folder / "ready.json"
    command = [sys.executable, "-m", "stoker", "serve", str(repository.root), "--port", "0"]
    command += ["--rest-api-port", "0", "--ready-file", str(ready), "--stop-with-stdin"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        give_up_s = time.monotonic() + START_S
        while not ready.exists():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < give_up_s, (folder / "log").read_text()
            time.sleep(0.05)
        said = json.loads(ready.read_text())
        yield Served(
            rest=f"http://127.0.0.1:{said['rest_port']}", grpc=f"127.0.0.1:{said['grpc_port']}"
        )
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(300)
