"""Every way in which a version can fail to load, and what its clients read of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from tensorflow_serving.apis import get_model_status_pb2, model_service_pb2_grpc

from stoker.registry.repository import MANIFEST, Repository
from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server
from stoker.serve.servables.servable import LoadOptions, Servable, State


def cut(name: str, size: int) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:size])

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)

    return change


def link(folder: Path) -> None:
    (folder / "assets" / "x").symlink_to("/etc/hostname")


INDEX = "variables/variables.index"
DATA = "variables/variables.data-00000-of-00001"


@pytest.mark.parametrize(
    ("change", "pushed", "said"),
    [
        (cut("saved_model.pb", 300), False, "must contain one complete SavedModel"),
        (remove("saved_model.pb"), False, "no saved_model.pb"),
        (write("saved_model.pbtxt", ""), False, "several saved_model files"),
        (remove(INDEX), False, "1 must be a whole SavedModel with the tag 'serve'"),
        (cut(DATA, 2), False, "1 must be a whole SavedModel with the tag 'serve'"),
        (
            link,
            False,
            "every link in a version must point to a file inside its folder. Received: assets/x",
        ),
        (write("assets.extra/tf_serving_warmup_requests", "x"), False, "must be a TFRecord file"),
        (write("batching_params.pbtxt", "x"), False, "1/batching_params.pbtxt: 1:1"),
        (
            cut(DATA, 2),
            True,
            f"1/{DATA} must be as it was pushed. Received: bytes that differ from",
        ),
        (remove(INDEX), True, f"1/{INDEX} must be as it was pushed. Received: no such file"),
        (write("more", ""), True, "1/more must be as it was pushed. Received: a file that is not"),
        (cut(MANIFEST, 9), True, f"1/{MANIFEST} must be"),
    ],
)
def test_a_version_that_cannot_be_loaded_says_why_and_not_where(
    exported: dict[str, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path], None],
    pushed: bool,
    said: str,
) -> None:
    source = exported["half_plus_two"]
    if pushed:
        folder = Repository(tmp_path).push(source, "half").path
    else:
        folder = tmp_path / "half" / "1"
        shutil.copytree(source, folder)
    change(folder)
    servable = Servable(1, folder, LoadOptions(per_model_batching=True))

    assert not servable.load()

    assert servable.state is State.END
    assert said in servable.reason
    assert str(tmp_path) not in servable.reason
    assert "/tmp" not in servable.reason
    assert str(folder) in caplog.text


def test_no_client_learns_where_a_damaged_version_lies(
    exported: dict[str, Path], tmp_path: Path, ask_at: Callable[..., Any]
) -> None:
    base = tmp_path / "half"
    shutil.copytree(exported["half_plus_two"], base / "1")
    shutil.copytree(exported["half_plus_two"], base / "2")
    cut("saved_model.pb", 300)(base / "2")
    config = ServeConfig(
        models={"half": base}, rest_port=0, grpc_port=0, poll_s=0.05, lame_duck_s=0.0, drain_s=5
    )
    server = Server(config)
    server.start()
    try:
        assert server.wait_until_ready(60)
        by_rest = ask_at(server.rest_port, "/v1/models/half/versions/2")
        request = get_model_status_pb2.GetModelStatusRequest()
        request.model_spec.name = "half"
        request.model_spec.version.value = 2
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            stub = model_service_pb2_grpc.ModelServiceStub(channel)
            by_grpc = stub.GetModelStatus(request, timeout=30)
    finally:
        server.stop()

    for text in (by_rest.body, str(by_grpc)):
        assert "END" in text
        assert "complete SavedModel" in text
        assert "/tmp" not in text
        assert str(tmp_path) not in text
