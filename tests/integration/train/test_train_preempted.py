"""A run that gets a signal at any time saves its state, and the resumed run ends as an undisturbed one."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.integration.train.killed import (
    Trainer,
    checkpoints,
    newest,
    runs_of,
    until,
    weights,
    write_table,
)

from stoker.core.errors import EXIT_PREEMPTED, EXIT_USER

STEP_S = 0.1
"""Time of a slow step: a call of 20 takes 2 s."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_table(tmp_path / "small", tensorboard=False)
    return tmp_path / "small"


def has_begun(runs: Path, lines: int) -> bool:
    """Whether so many calls of steps have been written down."""
    found = list(runs.glob("small/*/train/metrics.jsonl"))
    return bool(found) and found[0].read_bytes().count(b"\n") > lines


def last_step(runs: Path) -> int:
    """The step of the last line; at an epoch's end validation begins, and no step."""
    (found,) = runs.glob("small/*/train/metrics.jsonl")
    return int(json.loads(found.read_bytes().splitlines()[-1])["step"])


def lines_of(runs: Path) -> int:
    found = list(runs.glob("small/*/train/metrics.jsonl"))
    return found[0].read_bytes().count(b"\n") if found else 0


@dataclass(frozen=True, kw_only=True)
class Slow:
    """A run whose steps take `STEP_S` each."""

    trainer: Trainer
    folder: Path
    runs: Path
    mark: Path
    """Is there as soon as a validation has begun."""

    def start(self, **environment: str) -> int:
        slow = {"STEP_S": str(STEP_S), "MARK": str(self.mark)} | environment
        return self.trainer.start(self.folder, self.runs, environment=slow)


def at_the_start(run: Slow) -> None:
    """Nothing is there to be saved."""
    pid = run.start()
    until(lambda: list(run.runs.glob("small/*/train")))
    os.kill(pid, signal.SIGTERM)
    assert run.trainer.end() == EXIT_PREEMPTED
    assert "ended by SIGTERM" in run.trainer.said()


def in_a_call(run: Slow) -> None:
    """It ends after the step, not after the call of many steps; in a job two signals are one request."""
    job = run.folder.parent / "job"
    (job / "incarnations").mkdir(parents=True)
    (job / "incarnations" / "1").touch()
    pid = run.start(STOKER_INCARNATION=f"{job}:1")
    until(lambda: has_begun(run.runs, 0))
    time.sleep(3 * STEP_S)  # into the middle of a call of many steps
    signal_s = time.monotonic()
    for number in (signal.SIGTERM, signal.SIGUSR1):  # as Slurm, and then the worker's parent
        os.kill(pid, number)
        time.sleep(0.01)  # two signals, not one that the kernel merged
    assert run.trainer.end() == EXIT_PREEMPTED
    assert time.monotonic() - signal_s < 30
    assert "Everything is saved" in run.trainer.said()
    assert 20 < newest(run.runs).step < 40


def in_the_validation(run: Slow) -> None:
    """It is given up, and done when the run goes on."""
    pid = run.start()
    until(run.mark.exists)
    os.kill(pid, signal.SIGUSR1)
    assert run.trainer.end() == EXIT_PREEMPTED
    position = newest(run.runs).facts["position"]
    assert position["step"] == position["per_epoch"]
    assert position["validated"] is False


def while_a_checkpoint_is_written(run: Slow) -> None:
    before = newest(run.runs).step
    pid = run.start()
    until(lambda: list(checkpoints(run.runs).glob(".step-*.tmp")))
    os.kill(pid, signal.SIGHUP)
    assert run.trainer.end() == EXIT_PREEMPTED
    assert newest(run.runs).step > before


def by_ctrl_c(run: Slow) -> None:
    """The person's own, and nothing is lost."""
    before, lines = newest(run.runs).step, lines_of(run.runs)
    pid = run.start()
    until(lambda: has_begun(run.runs, lines) and newest(run.runs).step > before)
    saved = newest(run.runs).step
    os.kill(pid, signal.SIGINT)
    assert run.trainer.end() not in (0, EXIT_PREEMPTED)
    assert newest(run.runs).step >= saved


def twice(run: Slow) -> None:
    """At once, in the middle of a step, of which each takes half a second from then on."""
    per_epoch = newest(run.runs).facts["position"]["per_epoch"]
    lines, slower = lines_of(run.runs), run.mark.with_name("slower")
    pid = run.start(SLOWER=str(slower))
    until(lambda: has_begun(run.runs, lines) and last_step(run.runs) % per_epoch != 0)
    slower.touch()
    time.sleep(2 * STEP_S)  # until a step has begun that sees it
    os.kill(pid, signal.SIGTERM)
    time.sleep(0.1)  # two signals sent at once would be one
    os.kill(pid, signal.SIGTERM)
    assert run.trainer.end() == EXIT_PREEMPTED
    assert "ended by SIGTERM" in run.trainer.said()


MOMENTS = (in_a_call, in_the_validation, twice)
ALL_MOMENTS = (
    *(at_the_start, in_a_call, in_the_validation),
    *(while_a_checkpoint_is_written, by_ctrl_c, twice),
)


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "moments",
    [
        pytest.param(MOMENTS, id="three moments"),
        pytest.param(ALL_MOMENTS, id="all moments", marks=pytest.mark.soak),
    ],
)
def test_a_run_that_is_stopped_again_and_again_ends_as_an_undisturbed_one(
    trainer: Trainer, folder: Path, tmp_path: Path, moments: tuple[Callable[[Slow], None], ...]
) -> None:
    calm, runs = tmp_path / "calm", tmp_path / "runs"
    # Long enough that something is left at the last of the ends.
    settings = folder / "stoker.yaml"
    settings.write_text(settings.read_text().replace("epochs: 3", f"epochs: {len(moments)}"))
    assert trainer.run(folder, calm) == 0, trainer.said()

    slow = Slow(trainer=trainer, folder=folder, runs=runs, mark=tmp_path / "validating")
    for stop in moments:
        stop(slow)

    assert trainer.run(folder, runs) == 0, trainer.said()
    assert weights(runs) == weights(calm)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_what_has_changed_is_named_and_goes_on_only_where_it_is_accepted(
    trainer: Trainer, folder: Path, tmp_path: Path
) -> None:
    runs, settings = tmp_path / "runs", folder / "stoker.yaml"
    pid = trainer.start(folder, runs, environment={"STEP_S": "0.05"})
    until(lambda: has_begun(runs, 0))
    os.kill(pid, signal.SIGTERM)
    assert trainer.end() == EXIT_PREEMPTED
    (run,) = runs_of(runs)
    step, last = newest(runs).step, newest(runs).facts["position"]["steps"]
    named = ("--resume", run.name)

    for file, old, new, said in (
        ("stoker.yaml", "ema: 0.9", "ema: 0.8", "configuration train.ema was 0.9 and is 0.8"),
        ("model.py", "Dropout(0.3)", "Dropout(0.2)", "code model:build has changed"),
        ("data.csv", "a,b,y\n", "a,b,y\n0.5,0.5,1\n", "data source has changed"),
    ):
        text = (folder / file).read_text()
        (folder / file).write_text(text.replace(old, new))
        assert trainer.run(folder, runs, *named) == EXIT_USER
        assert said in trainer.said()
        assert "--accept-change" in trainer.said()
        (folder / file).write_text(text)
    assert newest(runs).step == step

    # Without --resume a changed experiment is another run, which names the unfinished one.
    settings.write_text(settings.read_text().replace("ema: 0.9", "ema: 0.8"))
    assert trainer.run(folder, runs, verb="transform") == 0
    assert f"run {run.name} stopped training at step {step} with other inputs" in trainer.said()
    assert f"--resume {run.name} --accept-change continues it" in trainer.said()

    assert trainer.run(folder, runs, *named, "--accept-change") == 0, trainer.said()
    about = json.loads((run / "run.json").read_text())
    assert about["changes"][0]["differs"] == ["configuration train.ema was 0.9 and is 0.8"]
    lines = [json.loads(line) for line in (run / "train/metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    assert steps == sorted(steps)
    assert steps[0] <= step < steps[-1] == last
    # The change goes with the weights, into whichever run takes them and its lineage.
    assert trainer.run(folder, runs) == 0, trainer.said()
    assert re.search(r"train \d+\.\d s skipped", trainer.said())
    record = json.loads((runs_of(runs)[-1] / "stages" / "train.json").read_text())
    assert record["result"]["changes"] == about["changes"]
