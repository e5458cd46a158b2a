"""A server whose repository is read-only: the controller fetches its counts."""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.serve.conftest import ask_port, half_plus

from stoker.core.errors import ConfigError
from stoker.registry.repository import Repository
from stoker.rollout.control.supervisor import Controllers
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.routing.router import RolloutRouter
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import FOLDER, Phase
from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server

LIMIT_S = 60.0

KEY = "the-key-of-the-test"


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    found = Repository(tmp_path / "models")
    for version in (1, 2):
        found.push(half_plus(tmp_path / str(version), addend=float(version)), "m")
    return found


@pytest.fixture
def read_only(repository: Repository, tmp_path: Path) -> Iterator[Path]:
    """The same folder, mounted read-only."""
    folder = tmp_path / "read-only"
    folder.mkdir()
    commands = [["mount", "--bind", str(repository.root), str(folder)]]
    commands += [["mount", "-o", "remount,bind,ro", str(folder)]]
    try:
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def test_the_counts_of_a_server_with_a_read_only_repository_are_fetched(
    repository: Repository,
    read_only: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "keys.yaml").write_text(f"- {{name: ops, role: admin, key: {KEY}}}\n")
    router = RolloutRouter(server="pod", folder=tmp_path / "workers")
    config = ServeConfig(
        root=read_only,
        rest_port=0,
        grpc_port=0,
        poll_s=0.1,
        lame_duck_s=0.0,
        drain_s=5,
        keys_file=tmp_path / "keys.yaml",
    )
    server = Server(config, router=router)
    server.start()
    try:
        assert server.wait_until_ready(60)
        port, key = server.rest_port, f"Bearer {KEY}"
        assert ask_port(port, "/v1/rollouts/m/counts", Authorization=key).status == 400
        settings = RolloutSettings(
            stages="50,100",
            min_requests=20,
            step_time_s=0,
            warm_up_s=0,
            dry_run=("slow_p99", "slow_p50", "prediction_shift"),
            servers=(f"http://127.0.0.1:{port}", "http://127.0.0.1:9"),
        )
        rollouts = ModelRollouts(repository.root, "m")
        rollouts.start(2, settings, why="", baseline=1)
        controllers, end_s = Controllers(), time.monotonic() + LIMIT_S
        while "STOKER_TOKEN of this server must hold a key of the role admin" not in caplog.text:
            assert time.monotonic() < end_s
            controllers.look({"m": repository.base("m")})
        monkeypatch.setenv("STOKER_TOKEN", KEY)
        while rollouts.status().state.phase is not Phase.COMPLETED:
            assert time.monotonic() < end_s
            for _ in range(20):
                answer = ask_port(
                    port, "/v1/models/m:predict", {"inputs": [[1.0]]}, Authorization=key
                )
                assert answer.status == 200
            controllers.look({"m": repository.base("m")})
    finally:
        server.stop()

    counts = rollouts.status().counts
    assert counts[0][2].requests >= 20
    assert (repository.base("m") / FOLDER / "counts" / "1" / "pod.json").is_file()
    said = [each.getMessage() for each in caplog.records if each.levelno == logging.ERROR]
    assert len([text for text in said if "its counts cannot be written" in text]) == 1
    assert len([text for text in said if "the counts of http://127.0.0.1:9 are not" in text]) == 1


def test_a_server_without_a_scheme_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be a REST address"):
        RolloutSettings(servers=("localhost:8501",))
