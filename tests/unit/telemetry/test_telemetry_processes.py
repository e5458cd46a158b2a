"""Restarts of a run, and the time between its processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stoker.core.errors import ConfigError, Plain, Preempted
from stoker.telemetry import run_time
from stoker.telemetry.processes import Moment, end_of
from stoker.telemetry.run_time import RunTime
from stoker.telemetry.wall_time import WallTime


def moment(boot_s: float, *, boot: str = "b", unix_s: float | None = None) -> Moment:
    return Moment(unix_s=boot_s if unix_s is None else unix_s, boot=boot, boot_s=boot_s)


def test_a_clock_that_is_set_changes_no_time_between_processes_of_one_boot() -> None:
    assert moment(30.0, unix_s=5.0).since(moment(10.0, unix_s=1e9)) == 20.0
    assert moment(30.0, boot="c", unix_s=90.0).since(moment(10.0, unix_s=50.0)) == 40.0
    assert moment(30.0, boot="c", unix_s=5.0).since(moment(10.0, unix_s=50.0)) == 0.0


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (None, "done"),
        (Preempted("stopped", got=Plain("a signal"), fix="Again."), "preempted"),
        (KeyboardInterrupt(), "preempted"),
        (ConfigError("wrong"), "error"),
        (RuntimeError("lost"), "failed"),
    ],
)
def test_how_a_process_ended_is_one_of_a_few_words(error: BaseException | None, end: str) -> None:
    assert end_of(error) == end


class Processes:
    """The processes of a run, each alive for some seconds of a clock."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self._path = 100.0, path
        monkeypatch.setattr(run_time, "now", lambda: moment(self.now_s))

    def run(self, seconds: float, error: type[BaseException] | None = None) -> RunTime:
        began_s = self.now_s
        self.now_s += 1.0
        made = RunTime(WallTime(began_s=began_s, clock=lambda: self.now_s), self._path)
        try:
            with made:
                self.now_s += seconds - 1.0
                if error is not None:
                    raise error
        except BaseException:  # noqa: BLE001 - the test's own
            pass
        return made


def test_the_time_between_processes_and_the_causes_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "wall_time.json"
    processes = Processes(path, monkeypatch)
    assert processes.run(10.0, KeyboardInterrupt).report()["run"]["restarts"] == {}
    processes.now_s += 60.0
    processes.run(10.0, RuntimeError)
    # Killed: it wrote no end.
    killed = json.loads(path.read_text())
    path.write_text(json.dumps(killed | {"end": ""}))
    processes.now_s += 5.0

    report = processes.run(10.0).report()["run"]

    assert report["waiting_s"] == pytest.approx(65.0)
    assert report["restarts"] == {"preempted": 1, "killed": 1}
    assert report["wall_s"] == pytest.approx(30.0)
    assert report["processes"] == 3


def test_an_account_of_an_earlier_version_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "wall_time.json"
    with RunTime(WallTime(), path):
        pass
    old = json.loads(path.read_text())
    for name in ("waiting_s", "restarts", "alive", "end"):
        del old[name]
    path.write_text(json.dumps(old))

    report = RunTime(WallTime(), path).report()["run"]

    assert (report["processes"], report["waiting_s"]) == (2, 0.0)
    assert report["restarts"] == {"killed": 1}
