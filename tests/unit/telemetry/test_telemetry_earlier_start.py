"""What an earlier start of a job has open, it neither changes nor removes once a later one has begun."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.core.errors import Superseded
from stoker.core.files import hash_folder
from stoker.core.incarnation import VARIABLE, take_next
from stoker.telemetry import publish
from stoker.telemetry.account import read_account
from stoker.telemetry.publish import Destinations, offered
from stoker.telemetry.run_info import RunInfo
from stoker.telemetry.run_time import RunTime
from stoker.telemetry.targets import published
from stoker.telemetry.writers.append_only import JsonLines
from stoker.telemetry.writers.live import LiveMetrics, Sources
from stoker.train.watch.stragglers import Stragglers


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes this process one of the next start."""
    job = tmp_path / "job"
    job.mkdir()
    return lambda: monkeypatch.setenv(VARIABLE, f"{job}:{take_next(job)}")


def test_nothing_of_the_later_start_is_removed_or_written(
    tmp_path: Path, begin: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publish, "TEXTFILE_EVERY_S", 0.01)
    run = tmp_path / "run"
    live = LiveMetrics(RunInfo(run="r1", experiment="e"), Sources(run_time=RunTime()))
    begin()
    with contextlib.ExitStack() as older:
        older.enter_context(published(run, "r1", "127.0.0.1:1"))
        older.enter_context(
            offered(live, Destinations(runs=run, textfile=run / "run.prom"), environ={})
        )
        older.enter_context(Stragglers(run / "steps", rank=0, median_s=lambda: 1.0, reads=True))
        older.enter_context(RunTime(path=run / "wall_time.json"))
        take_next(tmp_path / "job")
        (run / "steps" / "1.json").write_text("of the later start")
        for thread in threading.enumerate():
            if thread.name == "stoker-textfile":
                thread.join(60)  # it ends by itself
                assert not thread.is_alive()
        before = hash_folder(run)
        older.close()

    assert hash_folder(run) == before
    assert {"steps/1.json", "wall_time.json", "run.prom"} < before.keys()
    assert len(before) == 4, "and the announced address"


def test_a_later_start_takes_files_of_its_own_for_what_an_earlier_one_has_open(
    tmp_path: Path, begin: Callable[[], None]
) -> None:
    lines, account = tmp_path / "metrics.jsonl", tmp_path / "wall_time.json"
    begin()
    with RunTime(path=account) as older_time:
        older = JsonLines(lines)
        older.write(1, {"loss": 3.0})
        files = {path: path.stat().st_ino for path in (lines, account)}

        begin()
        newer = JsonLines(lines)
        newer.rewind(1)
        with RunTime(path=account):
            assert all(path.stat().st_ino != inode for path, inode in files.items())
        assert read_account(account)["processes"] == 2
        assert older_time.report()["run"]["processes"] == 1

    assert lines.read_text() == '{"step": 1, "loss": 3.0}\n'
    take_next(tmp_path / "job")
    with pytest.raises(Superseded):
        newer.write(2, {"loss": 2.0})
    newer.close()
    older.close()


def test_an_earlier_start_neither_announces_its_address_nor_touches_a_file_in_the_making(
    tmp_path: Path, begin: Callable[[], None]
) -> None:
    begin()
    older = JsonLines(tmp_path / "metrics.jsonl")
    begin()
    newer = JsonLines(tmp_path / "metrics.jsonl")
    newer.write(1, {"loss": 3.0})
    with published(tmp_path, "r1", "127.0.0.1:1"):
        take_next(tmp_path / "job")
        before = hash_folder(tmp_path)
        with published(tmp_path, "r1", "127.0.0.1:2"):
            for late in (older, newer):
                with pytest.raises(Superseded):
                    late.rewind(0)
        assert hash_folder(tmp_path) == before
    older.close()
    newer.close()
