"""`stoker profile` and `stoker tune` on planted problems, on this machine as it is.

Each of these measures, so nothing else may run meanwhile: `make test` runs them last.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from stoker.app.tuned_settings import load_tuned
from stoker.app.tuning import tuning
from stoker.cli.main import invoke
from stoker.cluster.devices import find_devices, hardware
from stoker.measure.device_trace import STAND_IN
from stoker.tune import client, search
from stoker.tune.client import TrialLimits
from stoker.tune.ledger import replay
from stoker.tune.levers import levers
from stoker.tune.lock import FILE, read_lock

pytestmark = [pytest.mark.alone, pytest.mark.slow]

PLANTED = Path(__file__).parent / "planted"

CACHE = "keep the dataset's first pass in memory"


@pytest.fixture(scope="module", autouse=True)
def brief_windows() -> Iterator[None]:
    """What is planted shows in windows of 0.2 s; `make soak` measures as users do."""
    defaults = TrialLimits.__init__.__kwdefaults__
    assert defaults is not None
    with pytest.MonkeyPatch.context() as patch:
        if "STOKER_ALL_LEVERS" not in os.environ:
            patch.setitem(defaults, "window_s", 0.2)
            patch.setattr(client, "PEAK_S", 0.2)
        yield


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PLANTED, tmp_path / "planted"))


def result_of(*arguments: str) -> dict[str, Any]:
    """What a command answers with --json."""
    with redirect_stdout(io.StringIO()) as said, redirect_stderr(io.StringIO()) as errors:
        code = invoke([*arguments, "--json"], debug=False)
    assert code == 0, errors.getvalue()
    found: dict[str, Any] = json.loads(said.getvalue())
    return found


def slow_input(folder: Path) -> Path:
    """Plant an input that takes longer than the step."""
    # Of small batches a window has many, and takes less time before it begins.
    cost = "data: {dataset: 'model:dataset', options: {cost: 6, batch: 8}}"
    file = folder / "stoker.yaml"
    lines = [cost if line.startswith("data:") else line for line in file.read_text().splitlines()]
    file.write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder with the slow input after its tuning, and what the tuning found."""
    folder = tmp_path_factory.mktemp("tuned") / "planted"
    slow_input(Path(shutil.copytree(PLANTED, folder)))
    with pytest.MonkeyPatch.context() as patch:
        try_only(patch, CACHE)
        found = result_of("tune", str(folder), "--parity-steps", "30")
    return folder, found


def try_only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Try only the levers that the planted problem is about: each of the others takes half a minute.

    `make soak` tries all of them, everywhere.
    """
    if "STOKER_ALL_LEVERS" in os.environ:
        return
    monkeypatch.setattr(
        search, "levers", lambda situation: [x for x in levers(situation) if x.name in names]
    )


def decisions(found: dict[str, Any]) -> dict[str, str]:
    return {outcome["lever"]: outcome["decision"] for outcome in found["outcomes"]}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_an_input_bottleneck_is_found(planted: Path) -> None:
    slow_input(planted)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STAND_IN, "1")
        profiled = result_of("profile", str(planted), "--set", "model=model:build_biased")

    assert profiled["diagnosis"]["bottleneck"] == "input"
    assert profiled["busy_fraction"] < 0.6
    (finding,) = profiled["findings"]
    assert finding["kind"] == "useless_bias"
    assert "1 layer has a bias" in finding["message"]
    assert "cancels: biased (8 of" in finding["message"]
    dearest = max(profiled["stages"], key=lambda stage: stage["share"])
    assert dearest["name"].startswith("Generator")
    assert profiled["shares"]["input_wait"] + profiled["shares"]["rest"] > 0.4
    assert sum(profiled["shares"].values()) == pytest.approx(1.0)
    page = Path(profiled["page"]).read_text()
    assert "stage by stage" in page
    assert finding["fix"] in page
    assert "parts of a step, a waterfall" in page
    assert 0.0 < profiled["machine"]["mfu"] < 1.0
    assert profiled["machine"]["peak_memory_bytes"] > 50 << 20
    # The device waits for its input: here the CPU's operations stand for a GPU's kernels.
    shares = profiled["device_time"]["shares"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert profiled["device_finding"]["kind"] == "idle"
    assert "the device&#x27;s time by class of kernel" in page


@pytest.mark.timeout(1800)
def test_an_input_bottleneck_is_fixed_and_locked(tuned: tuple[Path, dict[str, Any]]) -> None:
    folder, found = tuned

    assert found["diagnosis_before"]["bottleneck"] == "input"
    assert found["before"]["busy_fraction"] < 0.6
    shares = found["before"]["shares"]
    assert shares["input_wait"] + shares["rest"] > 0.4
    assert sum(shares.values()) == pytest.approx(1.0)
    assert decisions(found)[CACHE] == "kept"
    assert found["settings"]["data.pipeline.cache"] == "memory"
    assert found["after"]["busy_fraction"] > found["before"]["busy_fraction"] + 0.2
    assert found["after"]["samples_per_s"] > 1.5 * found["before"]["samples_per_s"]
    assert replay(Path(found["ledger"])) == []

    lock = read_lock(folder / FILE)
    assert lock is not None
    assert lock.settings == found["settings"]
    assert lock.hardware == hardware(find_devices())
    (gain,) = lock.gains
    assert gain["lever"] == CACHE
    assert 1.0 < gain["low"] <= gain["ratio"] <= gain["high"]
    figures = {"busy_fraction", "input_wait", "samples_per_s", "step_s", "epoch_s", "usd_per_epoch"}
    for promised, when in ((lock.before, "before"), (lock.after, "after")):
        assert figures < promised.keys()
        assert promised["samples_per_s"] == found[when]["samples_per_s"]
    assert lock.after["input_wait"] < lock.before["input_wait"]
    read = load_tuned(folder)
    loaded, said = read.used, read.lock_note
    assert loaded.own_dataset is not None
    assert loaded.own_dataset.pipeline.cache == "memory"
    assert "data.pipeline.cache=memory" in said


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_lock_file_of_a_tuning_holds(
    tuned: tuple[Path, dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that is broken, `test_tune_check` has."""
    # A minute is one measurement where the machine is slow, which says nothing if others took its cores.
    monkeypatch.setattr(tuning, "CHECK_S", 300.0)
    assert invoke(["tune", "--check", str(tuned[0])], debug=False) == 0
    assert "The figures of the lock file are still reached." in capsys.readouterr().out


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_python_between_steps_is_found_and_fixed(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = ["--set", "model=model:build_small", "--set", "train.steps_per_call=1"]
    try_only(monkeypatch, "10 steps per call", "32 steps per call")

    found = result_of("tune", str(planted), *small)

    assert found["diagnosis_before"]["bottleneck"] == "python"
    assert found["settings"]["train.steps_per_call"] > 1
    assert found["after"]["samples_per_s"] > 1.2 * found["before"]["samples_per_s"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_slow_precision_is_found_and_fixed(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = ["--set", "train.precision=mixed_float16"]

    profiled = result_of("profile", str(planted), *half)

    assert profiled["findings"] == []
    assert profiled["diagnosis"]["bottleneck"] == "precision"
    assert profiled["other_precision"]["precision"] == "float32"
    assert "train.precision: float32" in profiled["diagnosis"]["text"]
    try_only(monkeypatch, "precision float32")
    found = result_of("tune", str(planted), *half, "--parity-steps", "50")
    assert decisions(found)["precision float32"] == "kept"
    assert found["after"]["samples_per_s"] > 1.3 * found["before"]["samples_per_s"]


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_healthy_experiment_is_called_so_and_left_alone(
    planted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (planted / "stoker.yaml").read_bytes()
    large = ["--set", "model=model:build_large"]
    if (cores := len(os.sched_getaffinity(0))) > 2:
        # Half of the threads may be as fast where two of them share a core.
        large += ["--set", f"train.intra_op_threads={cores}"]

    try_only(monkeypatch, "precision mixed_bfloat16")
    found = result_of("tune", str(planted), *large, "--parity-steps", "30")

    assert (
        found["diagnosis_before"]["bottleneck"] == found["diagnosis_after"]["bottleneck"] == "none"
    )
    # A lever that changes nothing at all was measured: noise is not kept.
    assert decisions(found)["precision mixed_bfloat16"] == "reverted"
    kept = [name for name, decision in decisions(found).items() if decision == "kept"]
    assert kept == []
    assert (planted / "stoker.yaml").read_bytes() == before
    lock = read_lock(planted / FILE)
    assert lock is not None
    assert lock.settings == {}
