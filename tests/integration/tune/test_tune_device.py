"""`stoker profile -- python script.py` with a device that is traced: here the CPU is, by its operations."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from stoker.cli.main import invoke
from stoker.measure.device_trace import STAND_IN

SCRIPT = Path(__file__).resolve().parent / "scripts" / "batch_norm.py"


def test_a_script_has_its_devices_time_and_the_line_of_the_layer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(STAND_IN, "1")
    monkeypatch.chdir(tmp_path)
    script = [sys.executable, str(SCRIPT)]

    code = invoke(["profile", "--json", "--out", str(tmp_path / "out"), "--", *script], debug=False)

    printed = capsys.readouterr()
    assert code == 0, printed.err
    result = json.loads(printed.out)
    assert result["watcher_failures"] == []
    (loop,) = result["loops"]
    device = loop["device_time"]
    assert device["of_cpu"]
    assert sum(device["shares"].values()) == pytest.approx(1.0)
    assert device["shares"]["normalization"] > 0.05
    assert {"conv_a", "norm_a"} <= {each["layer"] for each in device["layers"]}
    assert loop["mfu"] > 0
    first = result["findings"][0]
    assert first["kind"] == "device_time"
    # The normalization's, or the idle time's where other processes took the cores.
    lines = SCRIPT.read_text().splitlines()
    assert any(text in lines[first["line"] - 1] for text in ("norm_a", "conv_a", "model.fit"))
    assert "operations of the CPU" in first["seen"]
    page = (tmp_path / "out" / "profile.html").read_text()
    assert "the device&#x27;s time by class of kernel" in page
    assert [path.name for path in (tmp_path / "out").iterdir() if path.is_dir()] == []
