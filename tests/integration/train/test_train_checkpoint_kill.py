"""A process is killed, or an fsync fails, at every system call by which a save can be seen."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from stoker.train.checkpoints.store import newest_good, places

CHILD = Path(__file__).parent / "checkpoint_child.py"

MIN_CALLS = {"mkdir": 6, "write": 6, "fsync": 20, "rename": 7, "unlinkat": 3}
"""System call -> how often two saves do it at least. All that a save does to the disk is in it."""


@dataclass(frozen=True)
class StepResult:
    """How a process ended."""

    code: int
    """Its exit code, or the negative number of the signal that ended it."""

    steps: int
    """The last step that it said was on the disk, 0 for none."""

    error: str
    """The error that it said, "" for none."""


@pytest.fixture(scope="module")
def processes() -> Iterator[subprocess.Popen[str]]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    command = [sys.executable, str(CHILD)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        yield server
        assert server.stdin is not None
        server.stdin.close()


def run(server: subprocess.Popen[str], folder: Path, *, fault: str | None) -> StepResult:
    """Write the checkpoints to the end, or until the fault (strace's `inject`) ends it."""
    to_server, from_server = server.stdin, server.stdout
    assert to_server is not None
    assert from_server is not None
    say(to_server, str(folder))
    pid = from_server.readline().split()[1]
    tracer = trace(pid, fault) if fault else None
    say(to_server, "go")
    steps, error = 0, ""
    for line in from_server:
        word, _, rest = line.partition(" ")
        if word == "ended":
            break
        steps = int(rest) if word == "step" else steps
        error = rest if word == "error" else error
    if tracer is not None:
        tracer.communicate(timeout=300)
    return StepResult(code=int(rest), steps=steps, error=error)


def say(stream: IO[str], line: str) -> None:
    stream.write(line + "\n")
    stream.flush()


def trace(pid: str, fault: str) -> subprocess.Popen[str]:
    call = fault.partition(":")[0]
    what = ["-e", f"trace={call}", "-e", f"inject={fault}"]
    tracer = subprocess.Popen(
        ["strace", "-f", "-o", os.devnull, *what, "-p", pid],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert tracer.stderr is not None
    said = tracer.stderr.readline()
    if "attached" not in said:
        pytest.skip(f"strace may not trace here: {said}")
    return tracer


@pytest.mark.parametrize("call", MIN_CALLS)
def test_a_kill_at_any_call_of_a_save_loses_nothing_that_was_published(
    tmp_path: Path, processes: subprocess.Popen[str], call: str
) -> None:
    killed = 0
    while True:
        folder = tmp_path / str(killed)
        fault = f"{call}:signal=SIGKILL:when={killed + 1}"
        first = run(processes, folder, fault=fault)
        if first.code == 0:
            break
        assert first.code == -signal.SIGKILL
        killed += 1
        found = newest_good(folder)
        assert (found.step if found else 0) >= first.steps
        assert found is None or found.refused == ()

        assert run(processes, folder, fault=None).code == 0
        last = newest_good(folder)
        assert last is not None
        assert last.step == 2
        np.testing.assert_array_equal(last.arrays()["b"], np.full(20_000, 2, np.float32))
        # Nothing hidden is left, and nothing half.
        assert sorted(os.listdir(folder)) == [path.name for path in places(folder)]
    assert killed >= MIN_CALLS[call]


def test_what_could_not_be_made_durable_is_not_published(
    tmp_path: Path, processes: subprocess.Popen[str]
) -> None:
    failed = 0
    while True:
        folder = tmp_path / str(failed)
        done = run(processes, folder, fault=f"fsync:error=EIO:when={failed + 1}")
        if done.code == 0:
            break
        failed += 1
        assert done.code == 2
        assert "a checkpoint could not be written" in done.error
        assert "Input/output error" in done.error
        assert sorted(os.listdir(folder)) == [path.name for path in places(folder)]
        found = newest_good(folder)
        # The last fsync of a save is that of the rename, which has then been done.
        assert done.steps <= (found.step if found else 0) <= done.steps + (failed % 10 == 0)
    assert failed == 20
