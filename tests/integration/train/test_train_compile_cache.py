"""What XLA has compiled once is read from the disk by the next process; hits are counted, not timed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.integration.train.killed import Trainer, newest, runs_of, write_table

from stoker.app.experiment import load_experiment
from stoker.app.tuning.trials import Trials
from stoker.tune.client import TrialLimits

XLA = ("--set", "train.xla=true")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table, and a model of numbers only."""
    folder = tmp_path_factory.mktemp("experiment") / "small"
    write_table(folder, tensorboard=False)
    settings, code = folder / "stoker.yaml", folder / "model.py"
    # How many steps are one program is decided by their speed: here it is always one.
    alone = settings.read_text().replace("steps_per_call: 20", "steps_per_call: 1")
    settings.write_text(alone.replace("  deterministic: true\n", ""))
    code.write_text(code.read_text().replace("Slow()(x)", "x"))
    return folder


def trained(
    trainer: Trainer, folder: Path, runs: Path, cache: Path, *more: str, **environment: str
) -> dict[str, Any]:
    """The facts of a training in a separate process."""
    environment |= {"STOKER_CACHE": str(cache)}
    assert trainer.run(folder, runs, *more, environment=environment) == 0, trainer.said()
    (run,) = runs_of(runs)
    record: dict[str, Any] = json.loads((run / "stages" / "train.json").read_text())
    facts: dict[str, Any] = record["result"]
    return facts


def programs(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.glob("xla/*/store/programs/*"))


@pytest.fixture(scope="module")
def cold(trainer: Trainer, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache that a first training has filled."""
    root = tmp_path_factory.mktemp("cold")
    cache = root / "cache"
    facts = trained(trainer, folder, root / "runs", cache, *XLA)
    used = facts["xla"]["cache"]
    assert (used["found"], used["written"]) == (0, len(programs(cache)))
    assert used["written"] >= 2, "full steps and an epoch's last one"
    return cache


def test_a_run_that_is_killed_and_resumed_compiles_nothing_again(
    trainer: Trainer, folder: Path, cold: Path, tmp_path: Path
) -> None:
    before, runs = programs(cold), tmp_path / "runs"
    # Settings that do not change the step: another seed, more epochs, other checkpoints.
    others = (*XLA, "--set", "train.seed=7", "--set", "train.epochs=4")
    environment = {"STOKER_CACHE": str(cold)}
    assert trainer.run(folder, runs, *others, verb="transform") == 0, trainer.said()
    killed = trainer.run(folder, runs, *others, environment=environment, kill=16)
    assert killed == -signal.SIGKILL, trainer.said()
    assert newest(runs).facts["position"]["step"] > 0

    used = trained(trainer, folder, runs, cold, *others)["xla"]["cache"]

    assert used["written"] == 0
    assert programs(cold) == before
    if used["read"]:
        # If the file system records access times.
        assert used["read"] == used["found"] == len(before)


@pytest.mark.soak
def test_a_tuning_trial_of_the_same_step_compiles_nothing_again(
    folder: Path, cold: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_CACHE", str(cold))
    experiment = load_experiment(folder, overrides=["train.xla=true", f"runs={tmp_path / 'runs'}"])

    held = [programs(cold)]
    trials = Trials(experiment, tmp_path / "trials", progress=print)
    for prefetch in (2, 3):
        settings = {"train.feed.prefetch": prefetch}
        trials.open(settings, name=str(prefetch), limits=TrialLimits.within(600.0)).close()
        held.append(programs(cold))

    # A trial also has its own step, for a resident batch with a known number of rows; the next
    # trial finds it.
    assert len(held[1]) <= len(held[0]) + 1
    assert held[2] == held[1]


def test_a_damaged_program_is_compiled_again_and_the_run_goes_on(
    trainer: Trainer, folder: Path, cold: Path, tmp_path: Path
) -> None:
    for path in cold.glob("xla/*/store/programs/*"):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)

    used = trained(trainer, folder, tmp_path, cold, *XLA)["xla"]["cache"]

    assert used["found"] == 0
    assert used["written"] >= 2


FULL = """\
import sys
from pathlib import Path
from stoker.cli.main import invoke
from stoker.cluster import compile_cache

compile_cache.MIN_FREE_BYTES = 0
sys.exit(invoke(sys.argv[1:], debug=False))
"""


@pytest.mark.soak
def test_a_full_disk_costs_the_cache_and_not_the_run(
    folder: Path, tmp_path: Path, small_disk: Path
) -> None:
    (small_disk / "rest").write_bytes(bytes(800 << 10))
    arguments = ["train", str(folder), "--set", f"runs={tmp_path / 'runs'}", *XLA]

    done = subprocess.run(
        [sys.executable, "-c", FULL, *arguments, "--set", "train.epochs=1"],
        env=os.environ | {"STOKER_CACHE": str(small_disk)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "the disk with XLA's cache cannot be written" in done.stderr
    assert newest(tmp_path / "runs").facts["position"]["over"]
    assert list(small_disk.glob("xla/*/work-*")) == []
    assert list(Path("/dev/shm").glob("stoker-programs-*")) == []
