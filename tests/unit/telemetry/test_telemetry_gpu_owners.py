"""What a process on a GPU belongs to, found among real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stoker.telemetry.gpu.owners import owner_of

WAIT = "import sys; print('ready', flush=True); sys.stdin.read()"
TRAINING = f"""\
import subprocess, sys
held = open(sys.argv[1], "a")
child = subprocess.Popen([sys.executable, "-c", {WAIT!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
sys.stdin.read()
child.communicate()
"""


def test_a_worker_belongs_to_the_run_whose_lock_its_parent_holds(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "flowers" / "2026-11-27T10-00-00-ab12"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    other = tmp_path / "lock"
    with (
        subprocess.Popen(
            [sys.executable, "-c", TRAINING, str(run / "lock")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as training,
        subprocess.Popen(
            [sys.executable, "-c", TRAINING, str(other)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as stranger,
    ):
        assert training.stdout is not None
        assert stranger.stdout is not None
        worker, of_stranger = int(training.stdout.readline()), int(stranger.stdout.readline())
        found = [owner_of(pid, 7) for pid in (training.pid, worker, of_stranger)]
        training.communicate()
        stranger.communicate()

    assert [each.run for each in found] == ["flowers/2026-11-27T10-00-00-ab12"] * 2 + [""]
    assert {(each.memory_bytes, each.model) for each in found} == {(7, "")}


@pytest.mark.parametrize(
    ("arguments", "model"),
    [
        (["stoker", "serve", "repository/flowers", "--workers", "2"], "flowers"),
        (["/venv/bin/stoker", "serve", "--model_name=taxi", "--model_base_path", "/m/x"], "taxi"),
        (["stoker", "serve", "--model-base-path", "/models/mnist/", "--port=0"], "mnist"),
        (["stoker", "train", "serve"], ""),
        (["jupyter", "serve", "flowers"], ""),
        (["stoker", "serve"], ""),
    ],
)
def test_a_server_is_recognized_by_its_command(arguments: list[str], model: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAIT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        found = owner_of(server.pid, None)
        server.communicate()

    assert (found.model, found.run, found.memory_bytes) == (model, "", None)


def test_a_process_that_is_not_here_belongs_to_nothing() -> None:
    found = owner_of(2**22 + 5, 1)  # larger than any process number of Linux

    assert (found.run, found.model) == ("", "")
