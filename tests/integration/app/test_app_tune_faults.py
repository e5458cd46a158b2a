"""What a tuning meets: levers that crash or are refused, kill -9, a second tuning, no time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from stoker.app.experiment import load_experiment
from stoker.app.tuning.trials import Trials
from stoker.cli.main import invoke
from stoker.core.files import read_json
from stoker.tune.client import TrialLimits
from stoker.tune.ledger import events
from stoker.tune.levers import Situation, levers
from stoker.tune.lock import FILE
from stoker.tune.process import TrialFailed

pytestmark = pytest.mark.slow

PLANTED = Path(__file__).parent / "planted"
LONG_S = 600.0


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PLANTED, tmp_path / "planted"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the shared trials."""
    return tmp_path_factory.mktemp("trials") / "planted" / "trials"


@pytest.fixture(scope="module")
def trials(folder: Path) -> Trials:
    """The stages before training are run once for all of its trials."""
    shutil.copytree(PLANTED, folder.parent)
    return Trials(load_experiment(folder.parent), folder, progress=print)


def fail(trials: Trials, name: str, settings: Mapping[str, object]) -> TrialFailed:
    with pytest.raises(TrialFailed) as failed:
        trials.open(settings, name=name, limits=TrialLimits.within(LONG_S))
    return failed.value


def test_a_lever_that_ends_its_process_is_a_crash(trials: Trials) -> None:
    crashing = {"model": "model:build_crashing", "train.precision": "mixed_bfloat16"}
    failed = fail(trials, "crash", crashing)

    assert failed.kind == "crash"
    assert "exit code 9" in failed.text


def test_a_lever_that_the_settings_do_not_take_is_refused(trials: Trials) -> None:
    failed = fail(trials, "refused", {"train.steps_per_call": 0})

    assert failed.kind == "refused"
    assert "train.steps_per_call must be at least 1" in failed.text


def test_code_that_fails_under_a_lever_is_refused_with_its_reason(trials: Trials) -> None:
    failed = fail(trials, "fails", {"train.replicas": 2, "train.strategy": "one_device"})

    assert failed.kind == "refused"
    assert "one_device has one replica" in failed.text


def test_a_graph_that_xla_does_not_compile_is_refused_with_tensorflows_reason(
    trials: Trials,
) -> None:
    failed = fail(trials, "xla", {"model": "model:build_without_xla", "train.xla": True})

    assert failed.kind == "refused"
    assert "PyFunc" in failed.text
    assert "XLA" in failed.text
    assert len(failed.text.splitlines()) == 1


@pytest.mark.soak
def test_levers_of_devices_and_memory_train_on_stages_that_were_run_once(
    trials: Trials, folder: Path
) -> None:
    mirrored = {
        "model": "model:build_blocks",
        "train.strategy": "mirrored",
        "train.replicas": 2,
    }

    def opened(settings: dict[str, object], name: str) -> Situation:
        added = mirrored | settings
        trial = trials.open(added, name=name, limits=TrialLimits.within(LONG_S))
        try:
            assert trial.speed() > 0
            return trial.situation
        finally:
            trial.close()

    several = opened({}, "several")
    resolved = several.resolved
    assert (resolved.strategy, resolved.replicas, several.model.blocks) == (
        "mirrored",
        2,
        ("encoder",),
    )
    assert not several.has_service
    found = {name: value for each in levers(several) for name, value in each.settings.items()}
    one = {name: found[name] for name in ("train.strategy", "train.replicas", "train.remat")}

    alone = opened(one, "alone")

    assert (alone.resolved.strategy, alone.resolved.replicas) == ("one_device", 1)
    assert alone.model.blocks == (), "they are computed again already"
    # Whichever trial of the same data came first, its stages served all others.
    assert len(list(folder.glob("*-prepare.json"))) == 1
    first, second = (read_json(folder / f"{name}.json") for name in ("several", "alone"))
    assert first["outputs"] == second["outputs"]
    assert set(first["outputs"]) == {"ingest", "analyze", "transform"}
    assert all(Path(output).is_dir() for output in first["outputs"].values())


def wait_for(condition: object, what: str) -> None:
    deadline_s = time.monotonic() + LONG_S
    while not condition():  # type: ignore[operator]  # any callable
        assert time.monotonic() < deadline_s, what
        time.sleep(0.1)  # another process's work


def children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True)
    return [int(line) for line in found.stdout.split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.soak
def test_a_tuning_that_is_killed_leaves_the_experiment_as_it_was(
    planted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path.name: path.read_bytes() for path in planted.iterdir()}
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker", "tune", str(planted)],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ,
    )
    root = planted / "runs" / ".tune" / "planted"
    wait_for(
        lambda: any(
            event["event"] == "before"
            for path in root.glob("*/ledger.jsonl")
            for event in events(path)
        ),
        "the experiment is measured",
    )
    trials = children(process.pid)
    assert trials

    # A second one would measure the first.
    assert invoke(["tune", str(planted)], debug=False) == 2
    assert "measured by only one process at a time" in capsys.readouterr().err

    process.send_signal(signal.SIGKILL)
    process.wait()

    wait_for(lambda: not any(map(is_running, trials)), "its trials end with it")
    after = {path.name: path.read_bytes() for path in planted.iterdir() if path.is_file()}
    assert after == before
    (ledger,) = root.glob("*/ledger.jsonl")
    assert next(events(ledger))["event"] == "begin"
    # Nothing of it hinders the next one, whose budget is too short for a measurement.
    assert invoke(["tune", str(planted), "--budget", "0.01s"], debug=False) == 2
    assert "--budget must be long enough" in capsys.readouterr().err
    assert not (planted / FILE).exists()


def test_a_check_needs_a_lock_file(planted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["tune", "--check", str(planted)], debug=False) == 2
    assert "a check needs a lock file" in capsys.readouterr().err


@pytest.mark.parametrize("budget", ["", "0", "-1m", "ten minutes", "5 d"])
def test_a_budget_is_a_length_of_time(
    planted: Path, budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["tune", str(planted), f"--budget={budget}"], debug=False) == 2
    assert "--budget must be a duration" in capsys.readouterr().err
