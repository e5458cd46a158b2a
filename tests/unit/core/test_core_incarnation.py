"""Only the newest start of a job writes."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.core.errors import ConfigError, Superseded, UserError
from stoker.core.files import lasting_folder, publish_folder, sweep, write_atomic
from stoker.core.incarnation import Incarnation, own_incarnation, require_newest, take_next


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job: one"
    folder.mkdir()
    return folder


def test_starts_at_the_same_time_get_different_numbers(job: Path) -> None:
    taken: list[int] = []
    threads = [
        threading.Thread(target=lambda: taken.extend(take_next(job) for _ in range(20)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(taken) == list(range(1, 161))
    (job / "incarnations" / "160.tasks").mkdir()
    assert take_next(job) == 161


def test_a_process_belongs_to_the_start_that_its_environment_names(job: Path) -> None:
    start = Incarnation(job=job, number=take_next(job))

    assert own_incarnation(start.to_environment()) == start
    assert own_incarnation({}) is None
    assert Incarnation(job=job, number=2).replaces(start)
    assert not start.replaces(start)
    assert not Incarnation(job=job / "other", number=2).replaces(start)
    for wrong in ("7", ":7", "/job:", "/job:-1", "/job:x"):
        with pytest.raises(ConfigError, match="STOKER_INCARNATION must be FOLDER:N"):
            own_incarnation({"STOKER_INCARNATION": wrong})


def replace_file(folder: Path) -> None:
    write_atomic(folder / "run.json", "new")


def publish(folder: Path) -> None:
    publish_folder(folder / "made", folder / "final")


def remove_partial(folder: Path) -> None:
    sweep(folder, "*")


@pytest.mark.parametrize("change", [replace_file, publish, remove_partial])
def test_an_earlier_start_changes_no_file_after_a_later_one_has_begun(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None]
) -> None:
    def begin() -> Path:
        folder = tmp_path / "run"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "made").mkdir(parents=True)
        (folder / "run.json").write_text("old")
        (folder / ".state.0a.tmp").write_text("of the later start")
        return folder

    before = sorted(os.listdir(begin()))
    start = Incarnation(job=job, number=take_next(job))
    monkeypatch.setenv(*next(iter(start.to_environment().items())))
    change(begin())
    folder = begin()
    take_next(job)

    with pytest.raises(Superseded) as caught:
        change(folder)

    assert caught.value.exit_code == 76
    assert caught.value.line() == (
        "start 1 of job job: one must not write any more. Received: start 2 has begun. "
        "Nothing is left to do: start 2 goes on from the last checkpoint, and this one ends."
    )
    assert sorted(os.listdir(folder)) == before
    assert (folder / "run.json").read_text() == "old"


def test_a_later_start_continues_partial_work_under_a_name_of_its_own(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin() -> None:
        monkeypatch.setenv("STOKER_INCARNATION", f"{job}:{take_next(job)}")

    final = tmp_path / "data"
    begin()
    with lasting_folder(final, "0a" * 32) as older:
        (older / "part-0").write_text("whole")
    with lasting_folder(final, "0a" * 32) as same:
        assert same == older, "of one start"
    (tmp_path / ".data.other.1.partial").mkdir()

    begin()
    with lasting_folder(final, "0a" * 32) as newer:
        assert (newer / "part-0").read_text() == "whole"
        assert not older.exists()
    monkeypatch.delenv("STOKER_INCARNATION")
    with lasting_folder(final, "0a" * 32) as outside:
        assert (outside / "part-0").exists()

    assert [path.name for path in tmp_path.glob(".data*")] == [outside.name]


def test_a_job_whose_folder_is_gone_is_one_line(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Incarnation(job=job, number=take_next(job))
    monkeypatch.setenv(*next(iter(start.to_environment().items())))
    require_newest()
    shutil.rmtree(job)

    with pytest.raises(UserError) as caught:
        require_newest()

    assert "the folder of job job: one must stay while the job runs" in caught.value.line()
    assert "No such file or directory" in caught.value.line()
