"""What a server takes up of its file of models while it runs, and what it says of a wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.serve.servables.config_file import ConfigFile, Configs
from stoker.serve.servables.model_config import read_model_config

GOOD = 'model_config_list { config { name: "%s" base_path: "/srv" } }'


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "models.config"
    path.write_text(GOOD % "one")
    return path


def look(watched: ConfigFile, times: int = 6) -> None:
    for _ in range(times):
        watched.look()


def test_a_wrong_file_is_reported_once_for_each_content_and_changes_nothing(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "stoker.serve.servables.config_file")
    taken_up: list[Configs] = []
    watched = ConfigFile(file, read_model_config(file), taken_up.append)
    look(watched)
    for content in ("broken", "broken too"):
        file.write_text(content)
        look(watched)
    file.unlink()
    look(watched)
    file.write_text(GOOD % "two")
    look(watched)

    first, second, missing, changed = [record.getMessage() for record in caplog.records]
    assert str(file) in first
    assert first.endswith('"broken".')
    assert second.endswith('"broken".')
    assert "No such file" in missing
    assert changed == f"{file} has changed and is applied"
    assert [[config.name for config in configs] for configs in taken_up] == [["two"]]
