"""Versions that come, go, are half there or broken, under a server and alone."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.registry.repository import MANIFEST, Repository
from stoker.serve.config import ServeConfig
from stoker.serve.errors import Code, ServeError
from stoker.serve.process.server import Server
from stoker.serve.servables.model_config import ModelConfig
from stoker.serve.servables.servable import LoadOptions, Servable, State
from stoker.serve.servables.versions import ModelVersions

Exported = dict[str, Path]


@pytest.fixture
def opened() -> Iterator[list[ModelVersions]]:
    """What is put in here is unloaded at the end."""
    models: list[ModelVersions] = []
    yield models
    for model in models:
        model.close()


def answer(versions: ModelVersions) -> tuple[int, float]:
    with versions.use() as (number, model):
        outputs = model.call("serving_default", {"x": np.array([[0.0]], np.float32)})
    return number, float(outputs["y"][0, 0])


def states(versions: ModelVersions) -> dict[int, State]:
    return {number: state for number, state, _ in versions.statuses()}


def test_the_newest_version_is_served_and_the_old_one_unloaded(
    exported: Exported, tmp_path: Path, opened: list[ModelVersions]
) -> None:
    repository = Repository(tmp_path)
    repository.push(exported["half_plus_two"], "half")
    versions = ModelVersions(ModelConfig(name="half", base=repository.base("half")))
    opened.append(versions)
    versions.poll()
    assert answer(versions) == (1, 2.0)

    repository.push(exported["half_plus_three"], "half")
    versions.poll()

    assert answer(versions) == (2, 3.0)
    assert states(versions) == {2: State.AVAILABLE, 1: State.END}


@pytest.mark.parametrize("unload_first", [False, True])
def test_the_old_version_goes_before_or_after_the_new_one_comes(
    exported: Exported,
    tmp_path: Path,
    opened: list[ModelVersions],
    monkeypatch: pytest.MonkeyPatch,
    unload_first: bool,
) -> None:
    repository = Repository(tmp_path)
    repository.push(exported["half_plus_two"], "half")
    options = LoadOptions(unload_first=unload_first)
    versions = ModelVersions(ModelConfig(name="half", base=repository.base("half")), options)
    opened.append(versions)
    versions.poll()
    repository.push(exported["half_plus_three"], "half")
    seen: list[dict[int, State]] = []
    load = Servable.load

    def looked_at(servable: Servable) -> bool:
        seen.append(states(versions))
        return load(servable)

    monkeypatch.setattr(Servable, "load", looked_at)
    versions.poll()

    # While the second is loaded the first serves, or its memory is given back already.
    assert seen == [{2: State.START, 1: State.END if unload_first else State.AVAILABLE}]
    assert answer(versions) == (2, 3.0)
    assert states(versions) == {2: State.AVAILABLE, 1: State.END}


def test_what_was_unloaded_first_comes_back_where_the_new_one_does_not_load(
    exported: Exported, tmp_path: Path, opened: list[ModelVersions]
) -> None:
    repository = Repository(tmp_path)
    repository.push(exported["half_plus_two"], "half")
    options = LoadOptions(unload_first=True)
    versions = ModelVersions(ModelConfig(name="half", base=repository.base("half")), options)
    opened.append(versions)
    versions.poll()
    damaged = repository.push(exported["half_plus_three"], "half")
    (damaged.path / "saved_model.pb").write_bytes(b"no model")

    versions.poll()

    assert answer(versions) == (1, 2.0)
    assert states(versions) == {2: State.END, 1: State.AVAILABLE}
    with pytest.raises(ServeError):
        versions.hold(2)


def test_deleting_the_newest_version_goes_back_to_the_one_before(
    exported: Exported, tmp_path: Path, opened: list[ModelVersions]
) -> None:
    repository = Repository(tmp_path)
    repository.push(exported["half_plus_two"], "half")
    repository.push(exported["half_plus_three"], "half")
    versions = ModelVersions(ModelConfig(name="half", base=repository.base("half")))
    opened.append(versions)
    versions.poll()
    assert answer(versions) == (2, 3.0)

    shutil.rmtree(repository.path("half", 2))
    versions.poll()

    assert answer(versions) == (1, 2.0)


def test_the_last_version_serves_on_when_the_disk_is_lost(
    foreign: Path, opened: list[ModelVersions]
) -> None:
    versions = ModelVersions(ModelConfig(name="half", base=foreign))
    opened.append(versions)
    versions.poll()
    versions.poll()
    shutil.rmtree(foreign)

    versions.poll()

    assert answer(versions) == (1, 2.0)


def test_a_foreign_version_is_loaded_only_when_it_was_at_rest_between_two_looks(
    exported: Exported, foreign: Path, opened: list[ModelVersions]
) -> None:
    versions = ModelVersions(ModelConfig(name="half", base=foreign))
    opened.append(versions)
    versions.poll()
    assert not versions.available

    with (foreign / "1" / "growing").open("w") as growing:
        for _ in range(3):
            growing.write("more")
            growing.flush()
            versions.poll()
            assert not versions.available
    versions.poll()

    assert answer(versions) == (1, 2.0)


def test_a_half_copied_version_is_never_served_and_then_loads(
    exported: Exported, foreign: Path, opened: list[ModelVersions]
) -> None:
    versions = ModelVersions(ModelConfig(name="half", base=foreign))
    opened.append(versions)
    versions.poll()
    versions.poll()
    source = exported["half_plus_three"]
    half = foreign / "2"
    half.mkdir()
    for number, path in enumerate(sorted(p for p in source.rglob("*") if p.is_file())):
        (half / path.relative_to(source)).parent.mkdir(exist_ok=True)
        raw = path.read_bytes()
        for content in (raw[: len(raw) // 2], raw):
            assert answer(versions) == (1, 2.0), number
            (half / path.relative_to(source)).write_bytes(content)
            if path.name == "variables.index" and content is raw:
                break  # all is there now
            versions.poll()
            versions.poll()

    versions.poll()
    versions.poll()

    assert answer(versions) == (2, 3.0)


@pytest.mark.parametrize("damage", ["flip", "cut", "missing", "extra", "manifest", "link"])
def test_a_damaged_version_ends_with_its_reason_while_the_old_one_serves(
    exported: Exported,
    tmp_path: Path,
    opened: list[ModelVersions],
    damage: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    repository = Repository(tmp_path)
    repository.push(exported["half_plus_two"], "half")
    versions = ModelVersions(ModelConfig(name="half", base=repository.base("half")))
    opened.append(versions)
    versions.poll()
    path = repository.push(exported["half_plus_three"], "half").path
    hurt(path, damage)

    versions.poll()

    assert answer(versions) == (1, 2.0)
    assert states(versions) == {2: State.END, 1: State.AVAILABLE}
    ((_, _, reason),) = versions.statuses(2)
    assert reason.startswith("2/")
    assert str(tmp_path) not in reason  # clients read it
    assert str(path) in caplog.text
    assert "\n" not in reason


def hurt(path: Path, damage: str) -> None:
    data = next((path / "variables").glob("*.data*"))
    raw = data.read_bytes()
    if damage == "flip":
        data.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    elif damage == "cut":
        data.write_bytes(raw[:-1])
    elif damage == "missing":
        data.unlink()
    elif damage == "extra":
        (path / "assets" / "foreign").write_text("x")
    elif damage == "link":
        (path / "assets" / "foreign").symlink_to("/etc/passwd")
    else:
        manifest = (path / MANIFEST).read_text()
        (path / MANIFEST).write_text(manifest.replace('"lineage": {}', '"lineage": {"a": 1}'))


def test_a_damaged_version_is_tried_again_only_when_its_files_change(
    exported: Exported, tmp_path: Path, opened: list[ModelVersions]
) -> None:
    repository = Repository(tmp_path)
    path = repository.push(exported["half_plus_two"], "half").path
    raw = (path / "saved_model.pb").read_bytes()
    (path / "saved_model.pb").write_bytes(raw[:-1])
    versions = ModelVersions(ModelConfig(name="half", base=repository.base("half")))
    opened.append(versions)
    versions.poll()
    first = versions._servables[1]
    versions.poll()
    assert versions._servables[1] is first

    (path / "saved_model.pb").write_bytes(raw)
    versions.poll()

    assert answer(versions) == (1, 2.0)


def test_with_only_a_damaged_newest_at_start_the_one_before_is_served(
    exported: Exported, tmp_path: Path, opened: list[ModelVersions]
) -> None:
    repository = Repository(tmp_path)
    repository.push(exported["half_plus_two"], "half")
    hurt(repository.push(exported["half_plus_three"], "half").path, "cut")
    versions = ModelVersions(ModelConfig(name="half", base=repository.base("half")))
    opened.append(versions)

    versions.poll()

    assert answer(versions) == (1, 2.0)


def by_label(versions: ModelVersions, label: str = "champion") -> int:
    with versions.use(label=label) as (number, _):
        return number


def test_a_label_is_never_without_its_version(
    exported: Exported, tmp_path: Path, opened: list[ModelVersions]
) -> None:
    """A look between a push's two writes, a broken version, and the way back by the label alone."""
    repository = Repository(tmp_path)
    repository.push(exported["half_plus_two"], "half")
    versions = ModelVersions(ModelConfig(name="half", base=repository.base("half")))
    opened.append(versions)
    versions.poll()
    repository.push(exported["half_plus_three"], "half")
    repository.set_alias("half", "champion", version=1)  # as it is before the push's last write
    versions.poll()
    assert (answer(versions), by_label(versions)) == ((2, 3.0), 1)

    repository.set_alias("half", "champion", version=2)
    versions.poll()
    assert by_label(versions) == 2
    assert states(versions) == {2: State.AVAILABLE, 1: State.END}

    hurt(repository.push(exported["half_plus_two"], "half").path, "cut")
    versions.poll()
    assert (answer(versions)[0], by_label(versions)) == (2, 2)

    repository.set_alias("half", "champion", version=1)
    versions.poll()
    assert (answer(versions)[0], by_label(versions)) == (2, 1)


def test_a_call_under_way_ends_on_the_version_that_it_began_on(
    exported: Exported, tmp_path: Path, opened: list[ModelVersions]
) -> None:
    repository = Repository(tmp_path)
    repository.push(exported["half_plus_two"], "half")
    versions = ModelVersions(ModelConfig(name="half", base=repository.base("half")))
    opened.append(versions)
    versions.poll()
    with versions.use() as (number, model):
        repository.push(exported["half_plus_three"], "half")
        swap = threading.Thread(target=versions.poll)
        swap.start()
        wait_for(lambda: states(versions).get(1) is State.UNLOADING)
        assert answer(versions) == (2, 3.0)
        outputs = model.call("serving_default", {"x": np.array([[0.0]], np.float32)})
        assert (number, float(outputs["y"][0, 0])) == (1, 2.0)
    swap.join(timeout=30)

    assert states(versions)[1] is State.END


def test_no_version_is_not_found_in_tensorflow_servings_words(tmp_path: Path) -> None:
    versions = ModelVersions(ModelConfig(name="half", base=tmp_path))
    versions.poll()

    with pytest.raises(ServeError) as caught, versions.use():
        pass

    assert caught.value.code is Code.NOT_FOUND
    assert caught.value.message == "Servable not found for request: Latest(half)"


def wait_for(claim: Callable[[], bool], *, timeout_s: float = 30.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not claim():
        assert time.monotonic() < end_s, "it did not come true"
        time.sleep(0.01)


@pytest.fixture
def empty_server(tmp_path: Path) -> Iterator[Server]:
    """A server over a repository that holds nothing yet."""
    (tmp_path / "models").mkdir()
    config = ServeConfig(
        root=tmp_path / "models", rest_port=0, grpc_port=0, poll_s=0.05, lame_duck_s=0.0
    )
    running = Server(config)
    running.start()
    yield running
    running.stop()


def test_a_server_waits_for_its_first_model_and_finds_it(
    empty_server: Server, exported: Exported, ask_at: Callable[..., Any]
) -> None:
    root = empty_server.config.root
    assert root is not None
    answer = ask_at(empty_server.rest_port, "/readyz")
    assert (answer.status, answer.json()["ready"]) == (503, False)
    assert ask_at(empty_server.rest_port, "/livez").status == 200

    Repository(root).push(exported["half_plus_two"], "half")

    assert empty_server.wait_until_ready(30)
    assert ask_at(empty_server.rest_port, "/readyz").status == 200


def test_a_model_that_cannot_be_loaded_does_not_take_the_others_out_of_service(
    empty_server: Server, exported: Exported, ask_at: Callable[..., Any]
) -> None:
    root = empty_server.config.root
    assert root is not None
    hurt(Repository(root).push(exported["half_plus_two"], "broken").path, "cut")
    wait_for(lambda: "broken" in empty_server.models.names())
    assert not empty_server.wait_until_ready(0.5)

    (root / "hollow" / "1").mkdir(parents=True)
    Repository(root).push(exported["half_plus_two"], "whole")

    assert empty_server.wait_until_ready(30)
    wait_for(lambda: "hollow" in empty_server.models.names())
    text = str(ask_at(empty_server.rest_port, "/monitoring/prometheus/metrics").body)
    loaded = {line for line in text.splitlines() if line.startswith("stoker_model_loaded{")}
    assert loaded == {
        'stoker_model_loaded{model_name="broken",version="1"} 0',
        'stoker_model_loaded{model_name="hollow",version=""} 0',
        'stoker_model_loaded{model_name="whole",version="1"} 1',
    }
    status = ask_at(empty_server.rest_port, "/v1/models/broken").json()
    assert status["model_version_status"][0]["state"] == "END"
    assert "variables" in status["model_version_status"][0]["status"]["error_message"]


def test_versions_change_under_load_without_a_lost_or_mixed_answer(
    empty_server: Server, exported: Exported, ask_at: Callable[..., Any]
) -> None:
    root = empty_server.config.root
    assert root is not None
    repository = Repository(root)
    repository.push(exported["half_plus_two"], "half")
    assert empty_server.wait_until_ready(30)
    ended = threading.Event()
    answers: list[tuple[int, Any]] = []

    def load() -> None:
        while not ended.is_set():
            body = {"instances": [[float(x)] for x in range(8)]}
            answer = ask_at(empty_server.rest_port, "/v1/models/half:predict", body)
            answers.append((answer.status, answer.json()))

    clients = [threading.Thread(target=load) for _ in range(3)]
    for client in clients:
        client.start()
    time.sleep(0.2)  # the load runs before the push
    repository.push(exported["half_plus_three"], "half")
    wait_for(lambda: states(empty_server.models.get("half")).get(1) is State.END)
    time.sleep(0.2)  # and after version 1 has ended
    ended.set()
    for client in clients:
        client.join()

    old = {"predictions": [[x / 2 + 2.0] for x in range(8)]}
    new = {"predictions": [[x / 2 + 3.0] for x in range(8)]}
    assert {status for status, _ in answers} == {200}
    assert all(body in (old, new) for _, body in answers)
    assert old in [body for _, body in answers]
    assert answers[-1][1] == new
