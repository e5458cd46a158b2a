"""The process that starts the workers: which version a worker died of, and what follows."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.rollout.control.controller import Event, change
from stoker.rollout.control.supervisor import RolloutSupervisor
from stoker.rollout.counts.counts import MEASURED, read_counts, read_failures
from stoker.rollout.routing.router import MAX_RUN_S, RolloutRouter
from stoker.rollout.state.ab_settings import ABTestSettings
from stoker.rollout.state.changes import advance, begin_test, start
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import FOLDER, Phase, RolloutState, state_of
from stoker.serve.routing import Served, VersionInUse, no_headers

EVENT = Event(what="test", who="me", why="", at_s=0.0)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The folder of a model whose version 2 takes half of the traffic."""
    found = tmp_path / "models" / "m"
    for version in (1, 2):
        (found / str(version)).mkdir(parents=True)
    put(found, running())
    return found


@pytest.fixture
def supervisor(tmp_path: Path) -> RolloutSupervisor:
    found = RolloutSupervisor(server="me")
    (tmp_path / "workers").mkdir()
    found.begin(tmp_path / "workers")
    return found


def running() -> RolloutState:
    settings = RolloutSettings(stages="50,100")
    return advance(start(None, 2, serving=1, settings=settings, now_s=0.0), now_s=0.0)


def put(base: Path, state: RolloutState) -> None:
    files = StateFiles(base / FOLDER)
    change(files, files.latest_whole(), state, EVENT)


def state(base: Path) -> RolloutState:
    stored = StateFiles(base / FOLDER).latest_whole()
    assert stored is not None
    return state_of(stored.content["state"])


def in_use(base: Path, version: int, *, requests: int = 0, loading: bool = False) -> VersionInUse:
    return VersionInUse(model="m", base=base, version=version, requests=requests, loading=loading)


def test_a_candidate_that_a_worker_died_of_is_rolled_back_and_what_it_lost_counts(
    base: Path, supervisor: RolloutSupervisor
) -> None:
    uses = [in_use(base, 1, requests=2), in_use(base, 2, requests=3)]

    assert supervisor.worker_ended(uses, how="signal 11")

    assert state(base).phase is Phase.ROLLED_BACK
    assert state(base).rejected == (2,)
    why = "it killed a worker (signal 11), and 5 requests with it"
    assert state(base).reason == why
    assert read_failures(base / FOLDER, rollout=1) == {2: why}
    lost = read_counts(base / FOLDER, rollout=1)[0]
    assert {version: (each.requests, each.bad) for version, each in lost.items()} == {2: (5, 5)}
    assert not supervisor.worker_ended(uses, how="signal 11")


def test_each_arm_of_an_ab_test_but_the_baseline_answers_for_a_worker_that_died(
    base: Path, supervisor: RolloutSupervisor
) -> None:
    arms = ((1, 0.4), (2, 0.3), (3, 0.3))
    test = ABTestSettings(arms=arms, baseline=1, salt="00" * 16)
    put(base, begin_test(None, test, settings=RolloutSettings(key="k"), now_s=0.0))
    router = RolloutRouter(server="me")
    router.refresh({"m": Served(base=base, failed={})})
    assert [router.max_run_s("m", each) for each in (1, 2, 3)] == [math.inf, MAX_RUN_S, MAX_RUN_S]

    assert not supervisor.worker_ended([in_use(base, 1, requests=1)], how="signal 11")
    assert supervisor.worker_ended([in_use(base, 3, requests=1)], how="signal 11")

    assert (state(base).stable, state(base).rejected) == (1, (2, 3))
    assert set(read_failures(base / FOLDER, rollout=1)) == {3}


def test_a_candidate_that_a_worker_died_of_while_it_loaded_is_rolled_back(
    base: Path, supervisor: RolloutSupervisor
) -> None:
    put(base, replace(running(), phase=Phase.MEASURING))

    assert supervisor.worker_ended([in_use(base, 2, loading=True)], how="signal 9")

    assert state(base).reason == "a worker ended (signal 9) while it loaded this version"
    assert read_counts(base / FOLDER, rollout=1)[MEASURED][2].bad == 0


def test_a_worker_that_died_of_something_else_changes_nothing(
    base: Path, supervisor: RolloutSupervisor
) -> None:
    before = len(list(StateFiles(base / FOLDER).history()))

    assert not supervisor.worker_ended(
        [in_use(base, 1, requests=2), in_use(base, 2)], how="signal 9"
    )
    other = base.parent / "other"
    assert not supervisor.worker_ended([in_use(other, 2, requests=1)], how="signal 9")
    assert not supervisor.worker_ended([], how="signal 9")

    assert len(list(StateFiles(base / FOLDER).history())) == before


def test_where_the_state_cannot_be_changed_a_veto_keeps_the_version_off_until_it_is_started_again(
    base: Path, supervisor: RolloutSupervisor, tmp_path: Path
) -> None:
    (base / FOLDER / "00000002.json").write_text("{")  # no further state can follow

    assert supervisor.worker_ended([in_use(base, 2, requests=1)], how="signal 6")

    assert state(base).phase is Phase.RUNNING
    served = {"m": Served(base=base, failed={})}
    router = RolloutRouter(server="next", folder=tmp_path / "workers")
    router.refresh(served)
    assert versions(router) == {1}
    assert router.wanted("m", base) == {1}
    elsewhere = RolloutRouter(server="elsewhere")
    elsewhere.refresh(served)
    assert versions(elsewhere) == {1, 2}

    (base / FOLDER / "00000002.json").unlink()
    put(base, replace(running(), rollout=2))
    router.refresh(served)
    assert versions(router) == {1, 2}


def versions(router: RolloutRouter) -> set[int]:
    routes = [router.route("m", no_headers) for _ in range(200)]
    return {route.version for route in routes if route is not None}


def test_rollouts_are_judged_also_while_no_worker_lives(
    base: Path, supervisor: RolloutSupervisor
) -> None:
    supervisor.look([in_use(base, 1)])
    supervisor.look([])

    assert state(base).lease == 1
    assert (base / FOLDER / "beat.json").read_text().count('"count": 2')


def test_the_parent_needs_no_tensorflow() -> None:
    code = "import sys, stoker.rollout.control.supervisor, stoker.serve.process.workers; "
    code += "sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_state_that_cannot_be_judged_is_an_error_once(
    base: Path, supervisor: RolloutSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    (base / FOLDER / "00000002.json").write_text("{")

    for _ in range(3):
        supervisor.look([in_use(base, 1)])

    (record,) = caplog.records
    assert "00000002.json is damaged" in record.getMessage()
