"""A Python gate runs in a process of its own: whatever it does, the controller lives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.rollout.gates.callback import call_in_process
from stoker.rollout.http_call import NoAnswerError

MODULE = """
import os, signal, sys, time
import numpy as np
def claims(rollout): return rollout["candidate"] == 7
def numpy_claims(rollout): return np.bool_(True)
def number(rollout): return np.float32(0.25)
def nothing(rollout): return None
def nan(rollout): return float("nan")
def prints(rollout):
    print("to the log")
    return 1
def raises(rollout): return 1 / 0
def text(rollout): return "yes"
def exits(rollout): sys.exit(0)
def ends(rollout): os._exit(3)
def kills_itself(rollout): os.kill(os.getpid(), signal.SIGKILL)
def hangs(rollout):
    if os.fork() == 0:
        time.sleep(60)
    time.sleep(60)
def closes(rollout):
    os.closerange(3, os.sysconf('SC_OPEN_MAX'))
    return True
"""

Call = Callable[..., Any]


@pytest.fixture
def call(tmp_path: Path) -> Call:
    (tmp_path / "checks.py").write_text(MODULE)

    def by(function: str, *, timeout_s: float = 30.0) -> bool | float | None:
        rollout = {"candidate": 7}
        return call_in_process(tmp_path, f"checks:{function}", rollout, timeout_s=timeout_s)

    return by


def test_claims_and_numbers_come_back(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    assert call("claims") is True
    assert call("numpy_claims") is True
    assert call("number") == 0.25
    assert call("nothing") is None
    assert str(call("nan")) == "nan"
    assert call("prints") == 1.0
    # Standard output is the server's own.
    out, err = capfd.readouterr()
    assert (out, err.count("to the log")) == ("", 1)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("raises", "ZeroDivisionError: division by zero"),
        ("text", "returned str, not true, false, a number or None"),
        ("exits", "SystemExit"),
        ("ends", "ended with exit code 3 without an answer"),
        ("kills_itself", "was killed by SIGKILL without an answer"),
        ("closes", "without an answer"),
        ("missing", "names a function of checks.py"),
    ],
)
def test_a_function_that_fails_gives_no_answer(call: Call, function: str, why: str) -> None:
    with pytest.raises(NoAnswerError, match=why):
        call(function)


def test_a_function_that_hangs_is_killed_with_all_that_it_started(
    call: Call, tmp_path: Path
) -> None:
    began_s = time.monotonic()
    with pytest.raises(NoAnswerError, match="no answer within 2 s"):
        call("hangs", timeout_s=2.0)

    assert time.monotonic() - began_s < 10.0
    assert str(tmp_path) not in "".join(command_lines())


def command_lines() -> Iterator[str]:
    """Of all processes that run."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes().decode(errors="replace")
