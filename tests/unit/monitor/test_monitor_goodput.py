"""`stoker goodput`: the wall time of a run in parts, from the account on the disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from stoker.core.errors import ConfigError, DataError
from stoker.monitor.goodput import RunGoodput, goodput_of, restarts_line
from stoker.monitor.goodput_page import goodput_page

PARTS = {
    "start": 5.0,
    "other_stages": 20.0,
    "compile": 10.0,
    "steps": 100.0,
    "repeated": 25.0,
    "validation": 15.0,
    "checkpoints": 5.0,
}


def write_run(folder: Path, **changes: Any) -> Path:
    """A run with the account of two processes; waiting: 20 s."""
    (folder / "train").mkdir(parents=True)
    account = {
        "parts": PARTS,
        "processes": 3,
        "repeated_steps": 50,
        "input_wait_s": 30.0,
        "step": 200,
        "waiting_s": 20.0,
        "restarts": {"killed": 1, "preempted": 1},
        "alive": None,
        "end": "done",
    }
    (folder / "train" / "wall_time.json").write_text(json.dumps(account | changes))
    return folder


def test_the_parts_add_up_and_goodput_leaves_out_what_was_before_training(tmp_path: Path) -> None:
    report = goodput_of(write_run(tmp_path / "r1"))

    seconds = {part.name: part.seconds for part in report.parts}
    assert list(seconds)[:7] == [
        *("steps", "input_wait", "compile", "checkpoints", "validation", "repeated", "waiting")
    ]
    assert (seconds["steps"], seconds["input_wait"], seconds["waiting"]) == (70.0, 30.0, 20.0)
    assert report.wall_s == sum(seconds.values()) == 200.0
    assert sum(part.share for part in report.parts) == pytest.approx(1.0)
    # 100 s of steps, of the 180 s after the other stages.
    assert report.goodput == pytest.approx(100 / 180)
    assert (report.run, report.processes, report.repeated_steps) == ("r1", 3, 50)
    assert restarts_line(report) == "2 restarts: 1 killed, 1 preempted"


def test_a_run_that_has_just_begun_has_no_steps(tmp_path: Path) -> None:
    parts = {"start": 2.0}
    report = goodput_of(
        write_run(tmp_path, parts=parts, input_wait_s=0.0, waiting_s=0.0, restarts={})
    )

    assert (report.goodput, report.wall_s) == (0.0, 2.0)
    assert restarts_line(report) == "no restarts"


def test_an_account_that_is_empty_missing_or_damaged_is_one_line(tmp_path: Path) -> None:
    empty = write_run(tmp_path / "empty", parts={}, input_wait_s=0.0, waiting_s=0.0)
    assert goodput_of(empty).parts == ()
    with pytest.raises(ConfigError, match="must be the folder of a run"):
        goodput_of(tmp_path)
    damaged = write_run(tmp_path / "damaged", parts={"steps": -1.0})
    with pytest.raises(DataError, match="must be as training wrote it"):
        goodput_of(damaged)
    later = write_run(tmp_path / "later", format=2)
    with pytest.raises(DataError, match=r"Received: format 2; this version of Stoker reads 1"):
        goodput_of(later)
    huge = write_run(tmp_path / "huge", waiting_s=10**400)
    with pytest.raises(DataError, match=r"Received: it has another form: int too large"):
        goodput_of(huge)
    (damaged / "train" / "wall_time.json").unlink()
    with pytest.raises(DataError, match="parameter servers"):
        goodput_of(damaged)


def reports(folder: Path) -> list[RunGoodput]:
    return [goodput_of(write_run(folder / name)) for name in ("20261127T184133Z-4f1a", "n" * 60)]


def test_the_page_names_each_part_and_compares_runs(tmp_path: Path) -> None:
    first, second = reports(tmp_path)

    one, both = goodput_page([first]), goodput_page([first, second])

    for text in ("waiting for machines", "lost work, done again", "55.6%", "1 killed"):
        assert text in one
    assert "Runs" not in one
    assert "<h2>Runs</h2>" in both
    assert both.count("n" * 60) == 3


def stoker(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stoker", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def test_the_command_prints_a_table_json_and_a_page(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "digits" / "r1")

    by_id = stoker("goodput", "r1", folder=tmp_path)
    done = stoker("goodput", "runs/digits/r1", "--json", "--page", "g.html", folder=tmp_path)

    assert by_id.returncode == done.returncode == 0, by_id.stderr + done.stderr
    lines = by_id.stdout.splitlines()
    assert lines[0] == "run r1: goodput 55.6% of 3 min 20 s, 2 restarts: 1 killed, 1 preempted"
    assert lines[2].split() == ["waiting", "for", "input", "30", "s", "15.0%"]
    (report,) = json.loads(done.stdout)
    first = {"name": "steps", "label": "steps", "seconds": 70.0, "share": 0.35, "advice": ""}
    assert report["parts"][0] == first
    assert "Run r1" in (tmp_path / "g.html").read_text()


def test_a_run_that_does_not_exist_is_one_line_of_json_with_the_option_json(
    tmp_path: Path,
) -> None:
    done = stoker("goodput", "runs/r9", "--log-json", folder=tmp_path)

    assert (done.returncode, done.stdout) == (2, "")
    line = json.loads(done.stderr)
    assert list(line) == ["time", "level", "run", "worker", "message"]
    assert line["level"] == "error"
    assert "RUN must be the folder of a run" in line["message"]
