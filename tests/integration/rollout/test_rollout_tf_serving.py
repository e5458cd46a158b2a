"""The labels of a rollout in a server that speaks TensorFlow Serving's HandleReloadConfigRequest: our own."""

from __future__ import annotations

import http.client
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.tools.conftest import half

from stoker.cli.main import invoke
from stoker.registry.repository import Repository
from stoker.rollout.control.controller import Event, change
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import Phase, RolloutState
from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 (plus two), 2 (plus three) and a damaged 3 of one model, and another model."""
    folder = tmp_path_factory.mktemp("labels")
    repository = Repository(folder / "models")
    for addend in (2.0, 3.0):
        repository.push(half(folder / f"plus{addend}", addend=addend), "half")
    repository.push(folder / "plus2.0", "other")
    shutil.copytree(repository.path("half", 1), repository.base("half") / "3")
    (repository.base("half") / "3" / "saved_model.pb").write_bytes(b"damaged")
    return repository.root


@pytest.fixture(scope="module")
def server(models: Path) -> Iterator[Server]:
    config = models / "models.config"
    config.write_text(
        "model_config_list {\n"
        f'config {{ name: "half" base_path: "{models / "half"}" model_platform: "tensorflow" '
        "model_version_policy { specific { versions: 1 } } }\n"
        f'config {{ name: "other" base_path: "{models / "other"}" model_platform: "tensorflow" }}\n'
        "}\n"
    )
    running = Server(
        ServeConfig(
            model_config_file=config,
            rest_port=0,
            grpc_port=0,
            poll_s=0.05,
            lame_duck_s=0.0,
            drain_s=5,
        )
    )
    running.start()
    assert running.wait_until_ready(60)
    yield running
    running.stop()


def export(models: Path, server: Server, state: RolloutState, *flags: str) -> int:
    """Make a state the newest, and send its labels to the server."""
    files = StateFiles(models / "half" / ".rollout")
    change(files, files.latest(), state, Event(what="test", who="test", why="", at_s=0.0))
    command = ["rollout", "export", "half", "--to", "tf-serving", "--models", str(models)]
    target = ["--target", f"127.0.0.1:{server.grpc_port}", *flags]
    return invoke([*command, *target], debug=False)


def state(phase: Phase, *, candidate: int = 2, baseline: int = 1) -> RolloutState:
    return RolloutState(
        rollout=1,
        baseline=baseline,
        candidate=candidate,
        settings=RolloutSettings(keep_previous_s=0.0),
        began_s=time.time() - 10.0,
        phase=phase,
    )


def ask(server: Server, path: str) -> Any:
    """What the model adds to a half of zero; else the error."""
    connection = http.client.HTTPConnection("127.0.0.1", server.rest_port, timeout=30)
    connection.request("POST", f"/v1/models/{path}:predict", json.dumps({"instances": [0.0]}))
    answer = json.loads(connection.getresponse().read())
    connection.close()
    return answer.get("predictions", [answer.get("error")])[0]


def test_labels_follow_a_rollout_from_the_first_stage_to_the_last(
    models: Path, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    others = ["--config", str(models / "models.config")]

    # Version 2 is not loaded yet: a label for it would be refused, so the versions come first.
    assert export(models, server, state(Phase.RUNNING), *others) == 0
    assert "half; stable: version 1, canary: version 2" in capfd.readouterr().out
    assert (ask(server, "half/labels/stable"), ask(server, "half/labels/canary")) == (2.0, 3.0)
    assert ask(server, "other") == 2.0

    assert export(models, server, state(Phase.COMPLETED), *others) == 0
    assert (ask(server, "half/labels/stable"), ask(server, "half/labels/canary")) == (3.0, 3.0)
    end_s = time.monotonic() + 60
    while "not found" not in str(ask(server, "half/versions/1")):
        assert time.monotonic() < end_s
        time.sleep(0.05)

    # A candidate that cannot be loaded: the labels stay, and one line says why.
    capfd.readouterr()
    broken = state(Phase.RUNNING, candidate=3, baseline=2)
    assert export(models, server, broken, *others, "--timeout-s", "20") == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "must load versions 2, 3 of 'half'" in said
    assert (ask(server, "half/labels/stable"), ask(server, "half/labels/canary")) == (3.0, 3.0)

    # Without --config the server serves this model alone, as TensorFlow Serving defines it.
    assert export(models, server, state(Phase.ROLLED_BACK)) == 0
    assert ask(server, "half/labels/canary") == 2.0
    assert ask(server, "other") != 2.0


def test_a_server_that_is_not_there_is_one_line(
    models: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = ["rollout", "export", "half", "--to", "tf-serving", "--models", str(models)]
    assert invoke([*command, "--target", "127.0.0.1:1"], debug=False) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "127.0.0.1:1 must answer over gRPC" in said


def test_the_file_is_what_the_server_reads(models: Path, tmp_path: Path) -> None:
    from stoker.serve.servables.model_config import read_model_config

    out = tmp_path / "models.config"
    command = ["rollout", "export", "half", "--to", "tf-serving", "--models", str(models)]
    assert invoke([*command, "--out", str(out)], debug=False) == 0
    (half,) = read_model_config(out)
    assert half.base == models / "half"
    assert dict(half.labels) == {"stable": 1, "canary": 1}
