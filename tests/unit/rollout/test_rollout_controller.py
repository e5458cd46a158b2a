"""The controller: from stage to stage, back on a fault, and one at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.rollout.cluster import SETTINGS, Cluster, run

from stoker.rollout.control.controller import (
    GONE_S,
    MEASURED_REQUESTS,
    TAKEOVER_S,
    Controller,
    Event,
    change,
)
from stoker.rollout.control.next_step import Action
from stoker.rollout.counts.counts import MEASURED, UNLOADED, read_counts, write_counts
from stoker.rollout.state.ab_settings import ABTestSettings
from stoker.rollout.state.changes import advance, begin_test, start
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import FOLDER, Phase


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(folder=tmp_path / FOLDER)


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


def test_an_operator_whose_clock_is_behind_shortens_no_stage(cluster: Cluster) -> None:
    cluster.start()
    controller = cluster.controller()
    run(cluster, controller, 10)
    files = StateFiles(cluster.folder)
    event = Event(what="promote", who="a", why="", at_s=0.0)
    following = advance(cluster.state(), now_s=cluster.now_s - 3_600.0)
    change(files, files.latest(), following, event)

    run(cluster, controller, 20)
    assert cluster.state().stage == 1  # a stage takes 25 s
    run(cluster, controller, 8)
    assert cluster.state().stage == 2


@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0])
def test_a_clock_that_jumps_neither_ends_a_stage_nor_holds_it(
    cluster: Cluster, jump_s: float
) -> None:
    cluster.start()
    jumped_s = 0.0
    controller = Controller(
        cluster.folder, clock=lambda: cluster.now_s, now=lambda: cluster.now_s + jumped_s
    )
    run(cluster, controller, 15)
    assert (cluster.state().phase, cluster.state().stage) == (Phase.RUNNING, 0)

    jumped_s = jump_s
    run(cluster, controller, 12)
    assert cluster.state().stage == 0  # a stage takes 25 s
    run(cluster, controller, 10)
    assert cluster.state().stage == 1


def test_a_version_is_not_slow_for_less_than_a_millisecond(cluster: Cluster) -> None:
    cluster.took_s = 0.0003
    cluster.start()
    run(cluster, cluster.controller(), 7)

    slow_s = cluster.state().slow_s
    assert slow_s["slow_p50"] == pytest.approx(0.0013, rel=0.04)
    assert slow_s["slow_p99"] == pytest.approx(0.0013, rel=0.04)


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


def at_full_traffic(cluster: Cluster, settings: RolloutSettings) -> Controller:
    """A rollout that has just got to 100 %, and its controller."""
    cluster.start(settings)
    controller = cluster.controller()
    while cluster.state().share < 1.0:
        run(cluster, controller, 1)
    return controller


@pytest.mark.parametrize("bake_s", [0.0, 60.0])
def test_an_outage_at_full_traffic_is_compared_with_the_baseline_and_rolls_nothing_back(
    cluster: Cluster, bake_s: float
) -> None:
    controller = at_full_traffic(cluster, replace(SETTINGS, bake_s=bake_s))
    run(cluster, controller, 30 if bake_s else 5)
    assert cluster.state().phase is (Phase.BAKING if bake_s else Phase.RUNNING)

    run(cluster, controller, 2, is_outage=True)
    state = cluster.state()
    assert (state.phase, state.share) == (Phase.RUNNING, 0.5)
    assert "of the baseline before" in state.reason
    run(cluster, controller, 10, is_outage=True)
    assert cluster.state().share == 0.5

    assert run(cluster, controller, 25 + 25 + 70)[-1] is Phase.COMPLETED
    events = [stored.content["event"]["what"] for stored in StateFiles(cluster.folder).history()]
    assert events.count("compare again") == 1


def test_a_version_that_fails_only_at_full_traffic_is_compared_and_rolled_back(
    cluster: Cluster,
) -> None:
    controller = at_full_traffic(cluster, SETTINGS)

    phases = run(cluster, controller, 15, bad=20)

    assert phases[-1] is Phase.ROLLED_BACK
    assert cluster.state().reason.startswith("bad_answers: candidate")
    assert [s.content["event"]["what"] for s in StateFiles(cluster.folder).history()][-2:] == [
        "compare again",
        "roll back",
    ]


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


def test_a_candidate_whose_folder_is_removed_is_rolled_back_unless_it_comes_back(
    cluster: Cluster,
) -> None:
    cluster.start(replace(SETTINGS, step_time_s=3_600))
    controller = cluster.controller()
    run(cluster, controller, 10)
    assert cluster.state().phase is Phase.RUNNING

    for seconds, phase in ((GONE_S - 5, Phase.RUNNING), (GONE_S + 5, Phase.ROLLED_BACK)):
        cluster.candidate.rmdir()
        run(cluster, controller, int(seconds))
        assert cluster.state().phase is phase
        cluster.candidate.mkdir()
        run(cluster, controller, 1)
    assert cluster.state().reason == "its folder is missing for 60 s"


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


def test_an_ab_test_ends_with_the_baseline_when_an_arm_hangs_and_goes_on_without_one_that_is_not_loaded(
    cluster: Cluster,
) -> None:
    arms = ((1, 0.4), (2, 0.3), (3, 0.3))
    test = ABTestSettings(arms=arms, baseline=1, salt="00" * 16)
    state = begin_test(None, test, settings=RolloutSettings(key="k"), now_s=0.0)
    change(StateFiles(cluster.folder), None, state, Event(what="ab", who="", why="", at_s=0.0))
    controller = cluster.controller()

    write_counts(cluster.folder, {}, {3: f"{UNLOADED}: damaged"}, rollout=1, server="one")
    controller.step()
    assert cluster.state() == state
    write_counts(cluster.folder, {}, {3: "a run of it does not end"}, rollout=1, server="two")
    controller.step()

    ended = cluster.state()
    assert (ended.stable, ended.rejected) == (1, (2, 3))
    assert ended.reason == "version 3: a run of it does not end"
