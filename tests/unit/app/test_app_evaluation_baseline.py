"""The version with which the gate `max_drop` compares."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stoker.app.evaluation import find_baseline
from stoker.rollout.control.controller import Event, change
from stoker.rollout.state.changes import advance, roll_back, start
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import FOLDER

EVENT = Event(what="test", who="me", why="", at_s=0.0)


def saved(folder: Path, content: str) -> Path:
    folder.mkdir(parents=True)
    folder.joinpath("saved_model.pb").write_text(content)
    return folder


def compared(root: Path, model: Path) -> int | None:
    experiment: Any = SimpleNamespace(models_root=root, model_name="m")
    found = find_baseline(experiment, model)
    return None if found is None else found.version


def test_a_model_is_compared_with_the_version_that_takes_the_traffic(tmp_path: Path) -> None:
    root, new = tmp_path / "models", saved(tmp_path / "new", "new")
    assert compared(root, new) is None
    for version in (1, 2, 3):
        saved(root / "m" / str(version), f"model {version}")
    assert compared(root, new) == 3
    assert compared(root, root / "m" / "3") == 2, "a model is not compared with itself"

    files = StateFiles(root / "m" / FOLDER)
    state = start(None, 2, serving=1, settings=RolloutSettings(), now_s=0.0)
    change(files, None, advance(state, now_s=0.0), EVENT)
    assert compared(root, new) == 1
    back = roll_back(state, reason="bad", now_s=0.0)
    change(files, files.latest(), back, EVENT)
    assert compared(root, new) == 1
    assert compared(root, root / "m" / "1") == 3, "version 2 was rolled back"
