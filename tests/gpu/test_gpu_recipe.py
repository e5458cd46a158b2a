"""The digits recipe from data to a server that answers, and its model in `stoker serve`."""

from __future__ import annotations

import json
import shutil
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from children import Children
from tests.gpu.conftest import ROOT
from tests.gpu.pictures import TIMEOUT_S

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(
    children: Children, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """The recipe's folder, and what `stoker run` printed."""
    folder = tmp_path_factory.mktemp("recipes") / "digits"
    leave = shutil.ignore_patterns("runs", "models", "data", "__pycache__")
    shutil.copytree(ROOT / "recipes" / "digits", folder, ignore=leave)
    result = children.json("run", folder, timeout_s=TIMEOUT_S)
    return folder, result


def test_the_digits_recipe_runs_through_its_gates(run: tuple[Path, dict[str, Any]]) -> None:
    _, result = run

    assert [stage["stage"] for stage in result["stages"]][-2:] == ["push", "serve"]
    assert len(result["answers"]) == 5
    assert all(answer["rest"] == answer["grpc"] for answer in result["answers"])


def test_its_model_is_served(
    run: tuple[Path, dict[str, Any]], children: Children, tmp_path: Path
) -> None:
    folder, _ = run
    ready = tmp_path / "ready.json"
    server = children.stoker(
        "serve", folder, "--rest-api-port", "0", "--port", "0", "--ready-file", ready, "--json"
    )
    until_s = time.monotonic() + TIMEOUT_S
    while not ready.exists():
        assert server.running(), str(server)
        assert time.monotonic() < until_s, str(server)
        time.sleep(0.02)
    port = json.loads(ready.read_text())["rest_port"]
    images = sorted((folder / "data" / "digits").glob("*/*.png"))[:1]

    result = json.loads(
        children.stoker(
            "call", "digits", "--url", f"http://127.0.0.1:{port}", "--image", images[0], "--json"
        ).done(TIMEOUT_S)
    )
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models/digits", timeout=10) as page:
        states = [each["state"] for each in json.load(page)["model_version_status"]]
    server.kill()

    assert states == ["AVAILABLE"]
    assert images[0].parent.name in json.dumps(result)
