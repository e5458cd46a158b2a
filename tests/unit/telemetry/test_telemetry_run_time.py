"""The wall time of a run over all of its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.telemetry.run_time import RunTime, seconds_of_run, until_now
from stoker.telemetry.wall_time import NAMES, WallTime


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def process(path: Path | None) -> tuple[Clock, WallTime, RunTime]:
    clock = Clock()
    wall = WallTime(clock=clock)
    return clock, wall, RunTime(wall, path)


def steps(clock: Clock, wall: WallTime, run: RunTime, count: int, seconds: float) -> None:
    with wall.within("steps"):
        clock.now_s += seconds
    run.stepped(count, seconds, step=run._step + count, wait_s=0.0, first=False)


def test_sums_go_on_over_processes_and_steps_that_were_lost_are_repeated(tmp_path: Path) -> None:
    path = tmp_path / "wall_time.json"
    clock, wall, run = process(path)
    with run:
        clock.now_s += 5
        run.begin(0)
        steps(clock, wall, run, 100, 50.0)
    # The last checkpoint was that of step 60: 20 of the 50 s were wasted.
    clock, wall, run = process(path)
    with run:
        clock.now_s += 5
        run.begin(60)
        steps(clock, wall, run, 40, 20.0)

        report = run.report()

    assert seconds_of_run(report) == pytest.approx(
        dict.fromkeys(NAMES, 0.0) | {"start": 10.0, "steps": 50.0, "repeated": 20.0}
    )
    assert (report["run"]["processes"], report["run"]["repeated_steps"]) == (2, 40)
    assert report["run"]["wall_s"] == pytest.approx(80.0)
    assert report["process"]["wall_s"] == pytest.approx(25.0)
    assert run.goodput == pytest.approx(50 / 80)


def test_steps_that_a_rollback_undoes_are_repeated() -> None:
    clock, wall, run = process(None)
    run.begin(0)
    steps(clock, wall, run, 10, 10.0)

    run.went_back(6)

    assert (wall.parts()["steps"], wall.parts()["repeated"]) == (6.0, 4.0)


def test_the_steps_of_a_call_that_compiles_are_steps_and_the_rest_compilation() -> None:
    clock, wall, run = process(None)
    run.begin(0)
    with wall.within("compile"):
        clock.now_s += 30
    run.stepped(10, 30.0, step=10, wait_s=0.0, first=True)

    steps(clock, wall, run, 10, 5.0)

    assert (wall.parts()["compile"], wall.parts()["steps"]) == (25.0, 10.0)


def test_the_wait_for_the_first_batch_is_opening_the_data_and_not_a_wait_of_later_steps() -> None:
    clock, wall, run = process(None)
    run.begin(0)
    with wall.within("compile"):
        clock.now_s += 50
    run.stepped(10, 50.0, step=10, wait_s=40.0, first=True)
    with wall.within("steps"):
        clock.now_s += 5
    run.stepped(10, 5.0, step=20, wait_s=4.0, first=False)

    parts = wall.parts()
    assert (parts["steps"], parts["data"], parts["compile"]) == pytest.approx((10.0, 36.0, 9.0))
    assert run.report()["process"]["input_wait_s"] == pytest.approx(8.0)


def test_a_run_of_one_call_is_split_by_its_own_steps() -> None:
    clock, wall, run = process(None)
    run.begin(0)
    with wall.within("compile"):
        clock.now_s += 20
    run.stepped(10, 20.0, step=10, wait_s=15.0, first=True)

    run.settle(2.0, waiting=0.75)

    parts = wall.parts()
    assert (parts["steps"], parts["data"], parts["compile"]) == pytest.approx((20.0, 0.0, 0.0))
    assert run.report()["process"]["input_wait_s"] == pytest.approx(15.0)


def test_the_wait_of_repeated_steps_is_repeated_time(tmp_path: Path) -> None:
    path = tmp_path / "wall_time.json"
    clock, wall, run = process(path)
    with run:
        run.begin(0)
        with wall.within("steps"):
            clock.now_s += 100
        run.stepped(100, 100.0, step=100, wait_s=90.0, first=False)
        run.went_back(80)
        assert run.report()["process"]["input_wait_s"] == pytest.approx(72.0)
    _, _, run = process(path)
    run.begin(40)

    account = run.report()["run"]
    assert account["parts"]["steps"] == pytest.approx(40.0)
    assert account["input_wait_s"] == pytest.approx(36.0)


WHOLE = (
    '{"format": 1, "parts": {"steps": 5.0}, "processes": 3, "repeated_steps": 0, "step": 0,'
    ' "input_wait_s": 0.0, "alive": null}'
)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"parts": 3}',
        json.dumps({"parts": {"steps": -1.0}, "processes": 1}),
        json.dumps(
            {
                "parts": {"steps": float("nan")},
                "processes": 1,
                "repeated_steps": 0,
                "step": 0,
                "input_wait_s": 0.0,
            }
        ),
        "[" * 100_000,
        WHOLE.replace("0.0", "1" + "0" * 400),
        WHOLE.replace("null", '{"unix_s": 1.0, "boot": "", "boot_s": "1"}'),
        WHOLE.replace('"format": 1', '"format": 2'),
    ],
    ids=lambda content: content[:30],
)
def test_a_file_that_is_cut_or_damaged_is_begun_again(tmp_path: Path, content: str) -> None:
    path = tmp_path / "wall_time.json"
    path.write_text(content)

    _, _, run = process(path)
    with run:
        pass

    written = json.loads(path.read_text())
    assert written["processes"] == 1
    assert sum(written["parts"].values()) == 0.0


def test_a_process_that_is_killed_has_reported_its_time(tmp_path: Path) -> None:
    path = tmp_path / "wall_time.json"
    code = (
        "import sys, time; from pathlib import Path;"
        "from stoker.telemetry import run_time; from stoker.telemetry.wall_time import WallTime;"
        "run_time.WRITE_EVERY_S = 0.05; wall = WallTime();"
        "run = run_time.RunTime(wall, Path(sys.argv[1])).__enter__();"
        "wall.enter('validation'); time.sleep(600)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        deadline_s = time.monotonic() + 60
        while time.monotonic() < deadline_s and not _validated_s(path) > 0.2:
            time.sleep(0.02)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()

    _, _, run = process(path)

    assert seconds_of_run(run.report())["validation"] > 0.2


def _validated_s(path: Path) -> float:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return 0.0
    return float(found["parts"]["validation"])


def test_a_disk_that_takes_nothing_ends_no_training(tmp_path: Path) -> None:
    clock, wall, run = process(tmp_path / "missing" / "wall_time.json")
    with run:
        run.begin(0)
        steps(clock, wall, run, 1, 1.0)

    assert run.goodput == 1.0


def test_a_report_is_brought_up_to_now() -> None:
    clock, wall, run = process(None)
    run.begin(0)
    steps(clock, wall, run, 1, 3.0)
    report = run.report()
    wall.enter("ending")
    clock.now_s += 1

    later = until_now(report, wall)

    assert seconds_of_run(later)["ending"] == 1.0
    assert (later["run"]["wall_s"], later["process"]["wall_s"]) == (4.0, 4.0)
