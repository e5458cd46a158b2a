"""Tasks of a cluster gather before they train, and hear of the one that cannot."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stoker.app.task.worker_process import report_failure, wait_for_all
from stoker.cluster.resolver import ClusterSpec
from stoker.core.errors import ConfigError, UserError

ADDRESSES = ("10.0.0.1:2222", "10.0.0.2:2222", "10.0.0.3:2222")

WAIT_S = 20.0
"""Longest wait for a thread: it ends one that hangs."""


def task(index: int) -> ClusterSpec:
    return ClusterSpec(workers=ADDRESSES, job="worker", index=index)


def gathering(barrier: Path, index: int, errors: list[UserError]) -> threading.Thread:
    def attend() -> None:
        try:
            wait_for_all(barrier, task(index))
        except UserError as error:
            errors.append(error)

    thread = threading.Thread(target=attend)
    thread.start()
    return thread


def test_no_task_continues_before_all_are_ready_even_if_the_folder_is_cleared(
    tmp_path: Path,
) -> None:
    errors: list[UserError] = []
    early = [gathering(tmp_path, index, errors) for index in (0, 1)]
    early[0].join(0.5)
    assert all(thread.is_alive() for thread in early)
    for said in tmp_path.iterdir():
        said.unlink()

    wait_for_all(tmp_path, task(2))

    for thread in early:
        thread.join(WAIT_S)
    assert not any(thread.is_alive() for thread in early)
    assert errors == []


def test_all_waiting_tasks_learn_which_task_failed_and_why(tmp_path: Path) -> None:
    errors: list[UserError] = []
    waiting = [gathering(tmp_path, index, errors) for index in (0, 2)]

    report_failure(tmp_path, task(1), ConfigError("model must be there", got=3))

    for thread in waiting:
        thread.join(WAIT_S)
    line = "worker 1 failed before training started. Received: model must be there. Received: 3."
    assert [error.line().startswith(line) for error in errors] == [True, True]


def test_a_removed_barrier_holds_no_task_and_is_not_created_again(
    tmp_path: Path,
) -> None:
    closed = tmp_path / "closed"

    with pytest.raises(
        UserError, match=r"worker 0 failed before training .*Received: it has exited"
    ):
        wait_for_all(closed, task(1))
    report_failure(closed, task(1), ConfigError("model must be there"))

    assert not closed.exists()
