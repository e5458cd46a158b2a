"""A training uses the lock file in its experiment's folder, and says so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import stoker
from stoker.cli.main import invoke
from stoker.cluster.devices import find_devices, hardware
from stoker.tune.lock import FILE, Lock, write_lock

PLANTED = Path(__file__).parent / "planted"

SMALL = ["--set", "model=model:build_small"]


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(PLANTED, tmp_path / "planted"))
    lock = Lock(
        settings={"train.steps_per_call": 4},
        replaced={"train.steps_per_call": "auto"},
        hardware=hardware(find_devices()),
        code={},
    )
    write_lock(folder / FILE, lock)
    return folder


@pytest.mark.parametrize("command", [pytest.param("run", marks=pytest.mark.soak), "train"])
def test_a_run_uses_its_lock_file_and_reports_it(
    locked: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke([command, str(locked), *SMALL], debug=False) == 0

    printed = capsys.readouterr()
    assert f"{FILE}: train.steps_per_call=4" in printed.err
    if command == "run":
        # What `auto` became, and why.
        assert "strategy one_device (" in printed.out
    (resolved,) = locked.glob("runs/planted/*/train/resolved.json")
    assert json.loads(resolved.read_text())["steps_per_call"] == 4


def test_load_in_python_applies_the_lock_file(locked: Path) -> None:
    assert stoker.load(locked).train.steps_per_call == 4
