"""`stoker run` with a device that is traced: here the CPU is, by its operations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.app.conftest import Folder

from stoker.cli.main import invoke
from stoker.measure.device_trace import STAND_IN
from stoker.train.checkpoints.store import newest_good

LONGER = ("train.epochs=6", "train.steps_per_call=2")


@pytest.mark.soak
def test_a_run_says_what_its_device_does_and_no_weight_differs(
    make_folder: Callable[[], Folder],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = make_folder()
    plain, _ = folder.run(*LONGER, f"runs={tmp_path}/plain", until="train")
    assert plain.results["train"]["mfu"] is None
    assert plain.results["train"]["device_time"] is None
    capsys.readouterr()

    monkeypatch.setenv(STAND_IN, "1")
    settings = [part for text in (*LONGER, f"runs={tmp_path}/traced") for part in ("--set", text)]
    assert invoke(["run", str(folder.path), *settings], debug=False) == 0

    printed = " ".join(capsys.readouterr().out.split())
    assert "of the measured peak" in printed
    assert "device time" in printed
    assert "(operations of the CPU)" in printed
    (record,) = tmp_path.glob("traced/*/*/stages/train.json")
    facts = json.loads(record.read_text())["result"]
    assert facts["mfu"] > 0
    assert sum(facts["device_time"]["shares"].values()) == pytest.approx(1.0)
    assert {"dense", "embedding"} & {each["layer"] for each in facts["device_time"]["layers"]}
    train = record.parent.parent / "train"
    lines = [json.loads(line) for line in (train / "metrics.jsonl").read_text().splitlines()]
    assert any(line.get("mfu", 0) > 0 for line in lines)
    kept = [newest_good(each / "checkpoints") for each in (plain.output("train"), train)]
    weights = [
        {name: value.tobytes() for name, value in found.arrays().items()}
        for found in kept
        if found is not None
    ]
    assert weights[0] == weights[1]
