"""A trial that answers, crashes, hangs, or is left alone; real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from stoker.tune.process import GRACE_S, TrialFailed, TrialProcess

ANSWERS = """\
import json, os, sys, time
spec, asks, answers = sys.argv[1:]
reply = os.fdopen(int(answers), "w", buffering=1)
print("chatter on stdout")
for line in os.fdopen(int(asks)):
    question = json.loads(line)
    if question["ask"] == "exit":
        print("last words", file=sys.stderr)
        os._exit(3)
    if question["ask"] == "kill":
        os.kill(os.getpid(), 9)
    if question["ask"] == "hang":
        time.sleep(600)
    if question["ask"] == "child":
        import subprocess
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        reply.write(json.dumps({"answer": child.pid}) + "\\n")
        continue
    if question["ask"] == "busy":
        import threading
        def turn():
            while True:
                pass
        for _ in range(4):
            threading.Thread(target=turn, daemon=True).start()
    if question["ask"] == "refuse":
        reply.write(json.dumps({"failed": "refused", "text": "no such setting"}) + "\\n")
        continue
    reply.write(json.dumps({"progress": "on it"}) + "\\n")
    reply.write(json.dumps({"answer": [json.load(open(spec)), question]}) + "\\n")
"""

Start = Callable[[], TrialProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    script = tmp_path / "answers.py"
    script.write_text(ANSWERS)
    begun: list[TrialProcess] = []

    def start() -> TrialProcess:
        trial = TrialProcess(
            {"x": 1},
            folder=tmp_path / "trials",
            name=f"{len(begun)}",
            command=(sys.executable, str(script)),
        )
        begun.append(trial)
        return trial

    yield start
    for trial in begun:
        trial.close()


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_it_reads_its_input_and_answers(start: Start) -> None:
    said: list[str] = []
    with closing(start()) as trial:
        answer = trial.ask("window", timeout_s=20, progress=said.append, kind="real", seconds=0.5)

    assert answer == [{"x": 1}, {"ask": "window", "kind": "real", "seconds": 0.5}]
    assert said == ["on it"]
    assert "chatter" in trial.log.read_text()


def test_one_that_exits_is_a_crash_with_its_last_line(start: Start) -> None:
    with (
        closing(start()) as trial,
        pytest.raises(TrialFailed, match="exit code 3; last words") as failed,
    ):
        trial.ask("exit", timeout_s=20)

    assert failed.value.kind == "crash"


def test_a_process_without_its_log_is_a_crash_too(start: Start) -> None:
    trial = start()
    trial.log.unlink()

    with pytest.raises(TrialFailed, match=r"exit code 3; its log .* cannot be"):
        trial.ask("exit", timeout_s=20)


def test_one_that_is_killed_may_have_run_out_of_memory(start: Start) -> None:
    with closing(start()) as trial, pytest.raises(TrialFailed, match="SIGKILL") as failed:
        trial.ask("kill", timeout_s=20)

    assert failed.value.kind == "memory"


def test_one_that_gives_no_answer_hangs_and_is_ended(start: Start) -> None:
    with (
        closing(start()) as trial,
        pytest.raises(TrialFailed, match="no answer to `hang`") as failed,
    ):
        trial.ask("hang", timeout_s=0.5)

    assert failed.value.kind == "hang"
    assert not is_running(trial.pid)


def test_one_that_refuses_says_why(start: Start) -> None:
    with closing(start()) as trial, pytest.raises(TrialFailed, match="no such setting") as failed:
        trial.ask("refuse", timeout_s=20)

    assert failed.value.kind == "refused"


def test_its_children_end_with_it(start: Start) -> None:
    with closing(start()) as trial:
        child = trial.ask("child", timeout_s=20)
        assert is_running(child)

    deadline_s = time.monotonic() + 20
    while is_running(child) and time.monotonic() < deadline_s:
        time.sleep(0.05)  # the kernel's time to end it
    assert not is_running(child)


def test_a_question_after_its_end_is_a_crash(start: Start) -> None:
    with closing(start()) as trial:
        os.kill(trial.pid, signal.SIGTERM)
        with pytest.raises(TrialFailed, match="SIGTERM"):
            trial.ask("window", timeout_s=20)


@pytest.mark.parametrize("then", ["", "trial.pause()"])
def test_a_trial_ends_when_its_parent_is_killed(tmp_path: Path, then: str) -> None:
    script = f"""\
import sys, time
from pathlib import Path
from stoker.tune.process import TrialProcess
trial = TrialProcess({{}}, folder=Path({str(tmp_path)!r}), name="t",
              command=(sys.executable, "-c", {WATCHED!r}))
trial.ask("anything", timeout_s=60)
{then}
print(trial.pid, flush=True)
time.sleep(600)
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid = int(owner.stdout.readline())
    assert is_running(pid)
    owner.kill()
    owner.wait()
    owner.stdout.close()

    deadline_s = time.monotonic() + 30
    while is_running(pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)  # the kernel's time to end it
    assert not is_running(pid)


WATCHED = """\
import os, sys, time
os.write(int(sys.argv[3]), b'{"answer": null}\\n')
time.sleep(600)
"""


def states_of(pid: int) -> set[str]:
    paths = Path(f"/proc/{pid}/task").glob("*/stat")
    return {path.read_text().rpartition(")")[2].split()[0] for path in paths}


def test_it_is_stopped_while_paused_and_answers_again(start: Start) -> None:
    trial = start()
    trial.ask("window", timeout_s=20)

    trial.pause()
    assert states_of(trial.pid) == {"T"}
    assert trial.ask("window", timeout_s=20) == [{"x": 1}, {"ask": "window"}]

    trial.pause()
    began_s = time.monotonic()
    trial.close()
    assert time.monotonic() - began_s < GRACE_S, (
        "it ends when its client is gone, even during a pause"
    )
    assert not is_running(trial.pid)


def test_all_its_threads_are_stopped_after_pause_returns(start: Start) -> None:
    # Threads that compute are stopped later than one that waits, and by chance: hence many times.
    trial = start()
    trial.ask("busy", timeout_s=20)
    for _ in range(30):
        trial.pause()
        assert states_of(trial.pid) == {"T"}
        trial.ask("window", timeout_s=20)


def test_a_pause_of_one_that_has_ended_ends_at_once(start: Start) -> None:
    trial = start()
    trial.ask("window", timeout_s=20)
    os.kill(trial.pid, signal.SIGKILL)

    trial.pause()
    with pytest.raises(TrialFailed, match="SIGKILL"):
        trial.ask("window", timeout_s=20)
