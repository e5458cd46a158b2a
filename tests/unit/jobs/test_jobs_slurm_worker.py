"""The process around a worker on Slurm: exit codes of a command that receives a request to end."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

MODULE = "stoker.jobs.providers.slurm.worker"


@pytest.mark.parametrize(
    ("command", "exits", "noted"),
    [
        ("echo; exec sleep 60", 0, 75),  # it does not listen
        ("trap 'trap - USR1; kill -USR1 $$' USR1; echo; while :; do sleep 0.05; done", 0, 75),
        ("trap 'exit 2' USR1; echo; while :; do sleep 0.05; done", 2, 2),
        ("trap 'kill -KILL $$' USR1; echo; while :; do sleep 0.05; done", 137, 137),
    ],
)
def test_a_worker_that_a_request_ends_counts_as_one_that_saved(
    tmp_path: Path, command: str, exits: int, noted: int
) -> None:
    """Slurm repeats its signal, so one may come while the command's process ends, which does not listen then."""
    arguments = [sys.executable, "-m", MODULE, str(tmp_path), "sh", "-c", command]
    environ = {"SLURM_PROCID": "1", "PATH": "/usr/bin:/bin"}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, env=environ) as worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        worker.send_signal(signal.SIGUSR1)

        assert worker.wait(60.0) == exits
    assert (tmp_path / "1").read_text() == f"{noted}\n"


def test_a_signal_that_no_request_sent_is_a_failure(tmp_path: Path) -> None:
    arguments = [sys.executable, "-m", MODULE, str(tmp_path), "sh", "-c", "kill -USR1 $$"]
    done = subprocess.run(arguments, env={"SLURM_PROCID": "0", "PATH": "/usr/bin:/bin"})

    assert done.returncode == 128 + signal.SIGUSR1
    assert (tmp_path / "0").read_text() == f"{done.returncode}\n"
