"""`stoker tune --check` next to a process that takes a core all the time: nothing else may run meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.tune.test_tune_windows import MODEL, YAML

from stoker.cli.main import invoke
from stoker.cluster.devices import find_devices, hardware
from stoker.tune import check
from stoker.tune.lock import FILE, Lock, write_lock

SPIN = "while True: pass"


@pytest.fixture
def loaded() -> Iterator[None]:
    """Half of the cores, and one at least, have somebody else who wants them."""
    count = max(1, len(os.sched_getaffinity(0)) // 2)
    others = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    yield
    for other in others:
        other.kill()
        other.wait()


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.usefixtures("loaded")
def test_a_promise_that_breaks_on_a_loaded_machine_is_broken_and_the_load_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "stoker.yaml").write_text(YAML)
    # Input and step sleep: no machine reaches this speed.
    after = {"busy_fraction": 0.4, "input_wait": 0.5, "samples_per_s": 1e6, "epoch_s": 1.0}
    here = hardware(find_devices())
    lock = Lock(settings={}, replaced={}, hardware=here, code={}, after=after)
    write_lock(tmp_path / FILE, lock)
    # That it measures again is a test of its own; here one process is enough.
    monkeypatch.setattr(check, "MAX_CHECKS", 1)

    assert invoke(["tune", "--check", str(tmp_path)], debug=False) == 3

    printed = " ".join(capsys.readouterr().out.split())
    assert "samples/s, the lock file has 1,000,000" in printed
    assert "The machine was not quiet: other processes used" in printed
    assert "during 1 of 1 measurements. Run the check again when nothing else runs." in printed
