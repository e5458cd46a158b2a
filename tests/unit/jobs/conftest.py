"""A user without jobs and targets, and a small experiment."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.jobs import places
from stoker.jobs.job import Job


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "state"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
    monkeypatch.setattr(places, "_found", {})
    return folder


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    folder = tmp_path / "work" / "small"
    folder.mkdir(parents=True)
    (folder / "stoker.yaml").write_text(
        "name: small\ndata: {source: data/rows.csv}\nmodel: model:build\nlabel: y\n"
    )
    (folder / "model.py").write_text("import layers\n")
    (folder / "layers.py").write_text("UNITS = 8\n")
    (folder / "data").mkdir()
    (folder / "data" / "rows.csv").write_text("x,y\n1,0\n")
    return folder


@pytest.fixture
def job(tmp_path: Path) -> Job:
    runs = tmp_path / "runs"
    return Job(name="small", command=("ingest",), folder=tmp_path, runs=runs, code="0" * 64)
