"""The in-job side of a job, without training: its code, its log, and what is wrong with a job."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.job_folder import submitted
from tests.small_disk import mounted

from stoker.app.experiment import path_overrides
from stoker.app.task.job_code import local_folder, unpack_code
from stoker.app.task.job_log import TaskLog
from stoker.cli.main import app, invoke
from stoker.core.errors import DataError
from stoker.jobs.job import read_job


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    folder = tmp_path / "trip"
    folder.mkdir()
    (folder / "stoker.yaml").write_text(
        "name: trip\ndata: {source: trips.csv}\nmodel: model:build\nlabel: tip\n"
    )
    (folder / "model.py").write_text("def build(features):\n    return None\n")
    return folder


@pytest.fixture
def job(experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "local").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "local"))
    return submitted(experiment, tmp_path / "runs", "ingest", secrets=("TOKEN",))


def test_the_code_is_unpacked_once_on_the_machines_own_disk(job: Path, tmp_path: Path) -> None:
    environ = {"SLURM_TMPDIR": str(tmp_path / "scratch"), "TMPDIR": "/elsewhere"}
    digest = read_job(job).code

    code = unpack_code(job, digest, environ)
    (job / "code.tar.gz").unlink()

    assert unpack_code(job, digest, environ) == code
    assert tmp_path / "scratch" in code.experiment.parents
    assert sorted(path.name for path in code.experiment.iterdir()) == ["model.py", "stoker.yaml"]
    assert local_folder({}).parent == Path("/tmp")


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_a_damaged_archive_is_one_line_and_leaves_nothing(
    job: Path, tmp_path: Path, damage: str
) -> None:
    archive, digest = job / "code.tar.gz", read_job(job).code
    content = archive.read_bytes()
    archive.unlink()
    if damage != "gone":
        archive.write_bytes(content[:-9] if damage == "cut" else content[:-9] + b"x" + content[-8:])

    with pytest.raises(DataError) as caught:
        unpack_code(job, digest, os.environ)

    assert f"{archive} must be the code that was submitted" in caught.value.line()
    assert not [path for path in local_folder(os.environ).iterdir() if path.suffix != ".lock"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 8 KiB."""
    folder = tmp_path / "disk"
    with mounted(folder, size="8k") as why_not:
        if why_not:
            pytest.skip(why_not)
        yield folder


def test_a_local_disk_without_room_is_one_line(
    job: Path, disk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TMPDIR", str(disk))
    monkeypatch.setenv("TOKEN", "t0ken")
    try:
        (disk / "other").write_bytes(b"x" * 4000)
        assert invoke(["job-start", str(job)], debug=False) == 0
        capfd.readouterr()

        assert invoke(["job-task", str(job), "--incarnation", "1"], debug=False) == 2
    finally:
        monkeypatch.delenv("STOKER_INCARNATION", raising=False)

    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(r"the disk that holds .* must have room for it", line)
    assert line in (job / "logs" / "task-0.log").read_text()


def test_a_log_is_bounded_holds_the_time_and_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "task-0.log"
    for start in (1, 2):
        log = TaskLog(path, secrets=["t0ken", ""], file_bytes=200)
        for count in range(6):
            log.write(f"start {start} line {count} t0ken")

    names = sorted(each.name for each in path.parent.iterdir())
    assert names == ["task-0.log", "task-0.log.1", "task-0.log.2"]
    assert all(each.stat().st_size <= 200 for each in path.parent.iterdir())
    kept = "".join((path.parent / name).read_text() for name in reversed(names)).splitlines()
    assert [line.partition(" ")[2] for line in kept[-7:]] == [
        "start 1 line 5 ***",
        *(f"start 2 line {count} ***" for count in range(6)),
    ]
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", line) for line in kept)


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file in the way")

    TaskLog(tmp_path / "logs" / "task-0.log").write("a line")


def test_a_log_on_a_full_disk_goes_on_when_there_is_room_again(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (disk / "other").write_bytes(b"x" * 4096)
    log = TaskLog(disk / "task-0.log")
    for count in range(50):
        log.write(f"line {count} {'x' * 100}")
    (disk / "other").unlink()
    log.write("the last line")
    log.end()

    *lines, cut, last = (disk / "task-0.log").read_text().splitlines()
    assert last.endswith("Z the last line")
    assert [line.split()[1:3] for line in (*lines, cut)] == [
        ["line", str(count)] for count in range(len(lines) + 1)
    ]
    assert len(lines) + 1 < 50
    assert len(cut) < len(lines[0])
    (warning,) = caplog.messages
    assert warning.endswith("the task continues: [Errno 28] No space left on device")


def test_paths_of_the_experiment_stay_where_they_were_on_submission(
    experiment: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(experiment, copy)

    assert path_overrides(copy, experiment) == [
        f'models="{experiment / "models"}"',
        f'data.source="{experiment / "trips.csv"}"',
    ]
    (copy / "stoker.yaml").write_text(
        "name: t\nmodels: /m\nruns: r\ndata: {source: s3://b/x, cache_dir: c}\n"
    )
    assert path_overrides(copy, experiment) == [
        'models="/m"',
        'data.source="s3://b/x"',
        f'data.cache_dir="{experiment / "c"}"',
    ]
    (copy / "stoker.yaml").write_text("name: t\ndata: model:data\n")
    assert path_overrides(copy, experiment) == [f'models="{experiment / "models"}"']


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["job-start", "nowhere"], "nowhere must be the folder of a job"),
        (["job-task", "nowhere", "--incarnation", "1"], "nowhere must be the folder of a job"),
        (["job-task", "JOB", "--incarnation", "7"], "must be a number that `stoker job-start` has"),
        (["job-task", "JOB", "--incarnation", "1"], "every secret of the job must be in"),
    ],
)
def test_what_is_wrong_with_a_job_is_one_line(
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    arguments: list[str],
    rule: str,
) -> None:
    monkeypatch.setenv("STOKER_INCARNATION", "")  # undone at the end
    assert invoke(["job-start", str(job)], debug=False) == 0
    assert capfd.readouterr().out == "1\n"

    code = invoke([str(job) if each == "JOB" else each for each in arguments], debug=False)

    assert code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert rule in line
    assert sorted(path.name for path in (job / "incarnations").iterdir()) == ["1"]


def test_an_earlier_start_does_not_begin(
    job: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STOKER_INCARNATION", "")
    for _ in range(2):
        assert invoke(["job-start", str(job)], debug=False) == 0

    assert invoke(["job-task", str(job), "--incarnation", "1"], debug=False) == 76

    assert "start 2 has begun" in capfd.readouterr().err
    assert not (job / "logs").exists()


def test_the_verbs_of_schedulers_are_not_in_the_list_of_commands() -> None:
    hidden = {command.name for command in app.registered_commands if command.hidden}

    assert hidden == {"job-start", "job-task"}
