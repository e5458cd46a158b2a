"""A step of the GPU suite ends in time with everything that it started, and its output is kept."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest
from steps import GRACE_S, Step, marked, run_step, run_steps

DAEMON = """\
import os, signal, sys, time
from pathlib import Path
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        Path(sys.argv[1]).write_text(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
print("started", flush=True)
time.sleep(float(sys.argv[2]))
"""


def step(tmp_path: Path, *, sleep_s: float, timeout_s: float) -> Step:
    script = tmp_path / "daemon.py"
    script.write_text(DAEMON)
    argv = (sys.executable, str(script), str(tmp_path / "pid"), str(sleep_s))
    return Step(name="daemon", argv=argv, timeout_s=timeout_s)


@pytest.mark.parametrize(("sleep_s", "status"), [(600.0, "timed out"), (0.0, "passed")])
def test_all_processes_of_a_step_end_with_it(tmp_path: Path, sleep_s: float, status: str) -> None:
    command = step(tmp_path, sleep_s=sleep_s, timeout_s=5.0)
    began_s = time.monotonic()

    result = run_step(command, tmp_path / "log")

    assert result.status == status
    assert time.monotonic() - began_s < 5.0 + GRACE_S + 5.0
    assert marked(command.mark) == []
    assert (tmp_path / "log").read_text() == "started\n"
    # The one that left its session and its parent, and that ignores SIGTERM.
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text()


def test_a_step_that_fails_is_reported_with_its_exit_code(tmp_path: Path) -> None:
    code = "import os; print(os.environ['COLOR']); raise SystemExit(7)"
    argv = (sys.executable, "-c", code)

    result = run_step(
        Step(name="x", argv=argv, timeout_s=60.0, env={"COLOR": "red"}), tmp_path / "log"
    )

    assert (result.status, result.exit_code) == ("failed", 7)
    assert (tmp_path / "log").read_text() == "red\n"
    assert "COLOR" not in os.environ


def test_steps_run_at_once_and_each_is_reported_when_it_ends(tmp_path: Path) -> None:
    # Each waits for the other: run one after the other, they would not end.
    code = (
        "import sys, time\nfrom pathlib import Path\nfolder, mine, other = map(Path, sys.argv[1:])\n"
        "(folder / mine).touch()\nwhile not (folder / other).exists(): time.sleep(0.01)\n"
    )
    steps = [
        Step(
            name=mine,
            argv=(sys.executable, "-c", code, str(tmp_path), mine, other),
            timeout_s=60.0,
        )
        for mine, other in (("a", "b"), ("b", "a"))
    ]
    ended: list[str] = []

    run_steps(steps, tmp_path / "logs", at_once=2, on_end=lambda r: ended.append(r.line()))

    assert [line.split()[:2] for line in ended] == [["passed", "a"], ["passed", "b"]]
