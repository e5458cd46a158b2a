"""The controller: from stage to stage, back on a fault, and one at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from stoker.rollout.controller import (
    MEASURED_REQUESTS,
    TAKEOVER_S,
    Controller,
    Event,
    change,
)
from stoker.rollout.counts import MEASURED, read_counts, write_counts
from stoker.rollout.gates import Action, GateResult, Verdict, VersionCounts
from stoker.rollout.histogram import count
from stoker.rollout.state import Phase, RolloutSettings, RolloutState, start, state_of
from stoker.rollout.state_files import StateFiles

SETTINGS = RolloutSettings(stages="10,50,100", step_time_s=20, warm_up_s=5, min_requests=100)


@dataclass
class Cluster:
    """A folder, a clock, and what a server has counted."""

    folder: Path
    now_s: float = 1_000.0
    counts: dict[int, dict[int, VersionCounts]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    server: str = "one"

    def controller(self, *gates: GateResult) -> Controller:
        return Controller(
            self.folder,
            gates=[lambda _, gate=gate: gate for gate in gates],  # type: ignore[misc]
            clock=lambda: self.now_s,
            now=lambda: self.now_s,
        )

    def start(self, settings: RolloutSettings = SETTINGS) -> None:
        files = StateFiles(self.folder)
        state = start(None, 2, serving=1, settings=settings, now_s=self.now_s)
        event = Event(what="start", who="me", why="", at_s=self.now_s)
        change(files, files.latest(), state, event)

    def state(self) -> RolloutState:
        latest = StateFiles(self.folder).latest()
        assert latest is not None
        return state_of(latest.content["state"])

    def answer(self, requests: int, *, bad: int = 0) -> None:
        """A second's traffic, in the shares of the state; the candidate's answers may be bad."""
        state = self.state()
        stage = MEASURED if state.phase is Phase.MEASURING else state.stage
        mine = round(requests * state.share)
        for version, number, wrong in ((1, requests - mine, 0), (2, mine, min(bad, mine))):
            added = VersionCounts(requests=number, bad=wrong, latency=count(np.full(number, 0.02)))
            self.counts.setdefault(stage, {}).setdefault(version, VersionCounts()).add(added)
        write_counts(
            self.folder, self.counts, self.failed, rollout=state.rollout, server=self.server
        )


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(folder=tmp_path)


def run(cluster: Cluster, controller: Controller, seconds: int, *, bad: int = 0) -> list[Phase]:
    phases = []
    for _ in range(seconds):
        cluster.now_s += 1.0
        cluster.answer(200, bad=bad)
        controller.step()
        phases.append(cluster.state().phase)
    return phases


def test_a_good_candidate_gets_all_traffic_stage_by_stage(cluster: Cluster) -> None:
    cluster.start()
    phases = run(cluster, cluster.controller(), 100)

    assert phases[:4] == [Phase.MEASURING] * 4
    # 5 s of measuring, then 3 stages of 25 s.
    assert phases.index(Phase.COMPLETED) == pytest.approx(5 + 3 * 25, abs=4)
    state = cluster.state()
    assert state.stable == 2
    assert state.slow_s["slow_p99"] == pytest.approx(0.022, rel=0.04)
    events = [stored.content["event"]["what"] for stored in StateFiles(cluster.folder).history()]
    assert events == ["start", "controller", *["advance"] * 4]


def test_a_candidate_with_bad_answers_is_rolled_back_within_seconds(cluster: Cluster) -> None:
    cluster.start()
    controller = cluster.controller()
    run(cluster, controller, 7)
    assert cluster.state().phase is Phase.RUNNING

    # 20 requests a second, of which 2 are bad.
    phases = run(cluster, controller, 20, bad=2)

    assert Phase.ROLLED_BACK in phases[:15]
    state = cluster.state()
    assert (state.share, state.rejected, state.stable) == (0.0, (2,), 1)
    assert "bad_answers: candidate" in state.reason
    assert run(cluster, controller, 3) == [Phase.ROLLED_BACK] * 3


def test_counts_and_stage_outlive_the_controller_and_another_takes_its_place(
    cluster: Cluster,
) -> None:
    cluster.start()
    first, second = cluster.controller(), cluster.controller()
    run(cluster, first, 20)
    stage, counts = cluster.state(), read_counts(cluster.folder, rollout=1)

    for waited in range(int(TAKEOVER_S)):
        assert second.step() is None, waited
        cluster.now_s += 1.0
    assert second.step() is None
    assert cluster.state().lease == 2
    assert (cluster.state().stage, cluster.state().began_s) == (stage.stage, stage.began_s)
    assert read_counts(cluster.folder, rollout=1) == counts
    assert run(cluster, second, 90)[-1] is Phase.COMPLETED
    # The first one was only stopped: it goes on, and changes nothing.
    cluster.now_s += 1.0
    assert first.step() is None


def test_a_candidate_that_a_server_cannot_load_is_rolled_back(cluster: Cluster) -> None:
    cluster.start()
    cluster.failed = {2: "it cannot be loaded: variables are missing"}

    assert run(cluster, cluster.controller(), 3)[-1] is Phase.ROLLED_BACK
    assert cluster.state().reason == "it cannot be loaded: variables are missing"


def test_of_two_controllers_one_judges(cluster: Cluster) -> None:
    cluster.start()
    both = [cluster.controller(), cluster.controller()]
    judged = []
    for _ in range(30):
        cluster.now_s += 1.0
        cluster.answer(200)
        judged.append([controller.step() is not None for controller in both])

    assert judged[1:] == [[True, False]] * 29
    assert cluster.state().lease == 1


def test_the_controller_of_an_earlier_rollout_does_not_take_the_next_one_for_its_own(
    cluster: Cluster,
) -> None:
    cluster.start()
    first, second = cluster.controller(), cluster.controller()
    run(cluster, first, 100)
    assert cluster.state().phase is Phase.COMPLETED
    files = StateFiles(cluster.folder)
    event = Event(what="start", who="me", why="", at_s=cluster.now_s)
    following = start(cluster.state(), 3, serving=1, settings=SETTINGS, now_s=cluster.now_s)
    change(files, files.latest(), following, event)

    for _ in range(int(TAKEOVER_S) + 2):
        second.step()
        cluster.now_s += 1.0

    assert second.step() is not None
    assert first.step() is None
    assert cluster.state().lease == 2


def test_a_gate_of_the_user_counts_and_one_without_an_answer_pauses(cluster: Cluster) -> None:
    cluster.start()
    silent = GateResult(gate="query", verdict=Verdict.INCONCLUSIVE, detail="refused", silent_s=300)
    run(cluster, cluster.controller(silent), 10)
    assert cluster.state().phase is Phase.PAUSED
    assert "no answer for 300 s: query: refused" in cluster.state().reason

    failing = GateResult(gate="query", verdict=Verdict.FAIL, detail="0.3 of 0.1")
    controller = cluster.controller(failing)
    run(cluster, controller, 13)
    assert cluster.state().phase is Phase.ROLLED_BACK


def test_a_file_of_counts_that_is_cut_counts_nothing_until_it_is_written_again(
    cluster: Cluster,
) -> None:
    cluster.start()
    cluster.answer(10)
    cluster.server = "two"
    cluster.answer(10)
    path = cluster.folder / "counts" / "1" / "two.json"
    whole = path.read_bytes()

    path.write_bytes(whole[: len(whole) // 2])
    assert read_counts(cluster.folder, rollout=1)[MEASURED][1].requests == 10
    for other in (b"[]", b'{"stages": {"0": 1}}', b'{"stages": {}, "failed": {"x": ""}}'):
        path.write_bytes(other)
        assert read_counts(cluster.folder, rollout=1)[MEASURED][1].requests == 10
    path.write_bytes(whole)
    assert read_counts(cluster.folder, rollout=1)[MEASURED][1].requests == 30
    assert MEASURED_REQUESTS > 30
    controller = cluster.controller()
    controller.step()
    decision = controller.step()
    assert decision is not None
    assert (decision.action, decision.reason) == (
        Action.WAIT,
        "30 of 1000 requests of the baseline",
    )
