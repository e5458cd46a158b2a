"""The first version of a shared repository, put there by several servers at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stoker.core.errors import DataError, UserError
from stoker.registry.repository import Repository
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.seed import main, seed
from stoker.rollout.state.changes import start
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import Phase


def image(folder: Path, *, version: int, content: bytes) -> Path:
    """A repository with one version."""
    saved = folder / f"saved{version}"
    (saved / "variables").mkdir(parents=True)
    (saved / "saved_model.pb").write_bytes(content)
    repository = Repository(folder / f"image{version}")
    made = repository.push(saved, "taxi")
    made.path.rename(repository.base("taxi") / str(version))
    return repository.root


def test_servers_that_start_together_leave_one_version_and_one_state(tmp_path: Path) -> None:
    source, target = image(tmp_path, version=3, content=b"three"), tmp_path / "models"
    command = [sys.executable, "-m", "stoker.rollout.seed", str(source), str(target)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    said = [process.communicate(timeout=300) for process in running]

    assert [process.returncode for process in running] == [0, 0, 0], said
    assert sorted(out.split()[-1] for out, _ in said) == ["already", "already", "new"]
    assert Repository(target).versions("taxi") == [3]
    assert Repository(target).content_hash("taxi", 3) == Repository(source).content_hash("taxi", 3)
    assert [stored.number for stored in StateFiles(target / "taxi" / ".rollout").history()] == [1]


def test_a_later_version_is_a_candidate_and_takes_no_traffic(tmp_path: Path) -> None:
    target = tmp_path / "models"
    seed(image(tmp_path, version=3, content=b"three"), target)
    seed(image(tmp_path, version=7, content=b"seven"), target)

    state = ModelRollouts(target, "taxi").status().state
    assert Repository(target).versions("taxi") == [3, 7]
    assert (state.stable, state.phase) == (3, Phase.COMPLETED)
    assert state.split("taxi").weights == {3: 1.0}
    begun = start(state, 7, serving=0, settings=RolloutSettings(), now_s=0.0)
    assert (begun.baseline, begun.candidate) == (3, 7)


def test_a_repository_that_was_served_before_goes_on_with_its_newest_version(
    tmp_path: Path,
) -> None:
    target = image(tmp_path, version=3, content=b"three")
    seed(image(tmp_path, version=7, content=b"seven"), target)
    assert ModelRollouts(target, "taxi").status().state.stable == 3


def test_another_model_under_the_same_number_is_refused_and_nothing_changes(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "models"
    seed(image(tmp_path / "a", version=3, content=b"three"), target)
    other = image(tmp_path / "b", version=3, content=b"another")

    with pytest.raises(DataError, match="other content under the same number"):
        seed(other, target)
    assert main([str(other), str(target)]) == UserError("").exit_code
    said = capfd.readouterr().err
    assert (said.count("\n"), "Push the model under another number" in said) == (1, True)
    assert (target / "taxi" / "3" / "saved_model.pb").read_bytes() == b"three"
    assert not list((target / "taxi").glob(".*.tmp"))


def test_a_damaged_version_is_not_added(tmp_path: Path) -> None:
    source = image(tmp_path, version=3, content=b"three")
    (source / "taxi" / "3" / "saved_model.pb").write_bytes(b"damaged")
    with pytest.raises(DataError, match="must be as it was pushed"):
        seed(source, tmp_path / "models")
    assert Repository(tmp_path / "models").versions("taxi") == []
