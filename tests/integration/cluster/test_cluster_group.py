"""A group of processes that know nothing of heartbeats, such as the tasks of a job."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path

from stoker.cluster.launch.group import FAILURE_GRACE_S, Group, GroupLimits, stop_requests
from stoker.cluster.launch.member import FD_VARIABLE, Command

SAVES_S = FAILURE_GRACE_S + 1.0
"""Longer than processes get that have said nothing."""

SCRIPT = f"""
test -z "${FD_VARIABLE}" || exit 9
trap 'sleep {SAVES_S}; touch "$0"; exit 75' TERM
echo ready
while :; do sleep 0.05; done
"""


def test_without_heartbeats_a_process_has_its_whole_grace_to_save(tmp_path: Path) -> None:
    saved, lines = tmp_path / "saved", list[str]()

    def log(line: str) -> None:
        lines.append(line)
        if line == "[task] ready":
            os.kill(os.getpid(), signal.SIGTERM)

    command = Command(
        name="task",
        argv=("/bin/sh", "-c", SCRIPT, str(saved)),
        environ=dict(os.environ),
        has_heartbeats=False,
    )
    limits = GroupLimits(watchdog_s=math.inf, grace_s=60, unheard_grace_s=60, alone_restarts=0)
    with stop_requests() as stop:
        group = Group([command], limits, stop=stop, log=log, on_beat=lambda _: None)
        outcome = group.run()

    assert saved.exists(), lines
    assert (outcome.signaled, outcome.preempted, outcome.failure) == (True, True, None)
