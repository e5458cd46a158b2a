"""1,500 checked answers while versions come and go and processes are killed: none wrong, none lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from checked_answers import Fleet, actions, ask_while, prepare


@pytest.mark.soak
def test_no_answer_is_wrong_or_lost_while_a_worker_and_a_server_are_killed(tmp_path: Path) -> None:
    rollouts = prepare(tmp_path / "models", tmp_path / "versions")
    with Fleet(root=tmp_path / "models", scratch=tmp_path) as fleet:
        start, _, promote, _, again, _, back, *_ = actions(rollouts, fleet)
        steps = [
            *(start, promote, lambda: fleet.kill_worker(0), again),
            *(lambda: fleet.kill_server(1, again=False), back),
        ]
        found = asyncio.run(ask_while(fleet, rollouts, steps, answers=1_500))

    assert found.wrong == []
    assert found.lost == []
    assert found.answers >= 1_500
    assert found.kills == 2
    assert set(found.by_version) == {1, 2}
    # What was under way in a killed process, and no more.
    assert found.killed <= 40
