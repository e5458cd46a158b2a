"""What a controller asks outside of the counts: it waits for an answer without waiting itself."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.loopback import service
from tests.unit.rollout.cluster import SETTINGS, Cluster, run

from stoker.rollout.control import announcer, webhooks
from stoker.rollout.control.controller import TAKEOVER_S, Controller, Event, change
from stoker.rollout.control.hooks import read_user_results
from stoker.rollout.gates.gates import Verdict, compared_with_limits
from stoker.rollout.state.changes import roll_back
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import Phase
from stoker.rollout.state.user_gates import UserGate, with_code
from stoker.rollout.state.webhook import Webhook

FAST = replace(
    SETTINGS,
    dry_run=("slow_p99", "slow_p50"),  # so the baseline need not be measured
    step_time_s=2.0,
    warm_up_s=0.0,
    min_requests=10,
    inconclusive_limit_s=120.0,
)

CHECKS = """
def good(rollout): return rollout["candidate"] == 2 and rollout["model"] == "m"
def share(rollout): return rollout["share"]
def breaks(rollout): raise RuntimeError("no data")
"""


def settings(**changes: object) -> RolloutSettings:
    return replace(FAST, **changes)  # type: ignore[arg-type]  # mypy cannot check **


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    folder = tmp_path / "m" / ".rollout"
    folder.mkdir(parents=True)
    return Cluster(folder=folder)


@pytest.fixture
def checks(tmp_path: Path) -> Path:
    (tmp_path / "checks.py").write_text(CHECKS)
    return tmp_path


def python_gate(checks: Path, function: str, **limits: float) -> tuple[UserGate, ...]:
    gate = UserGate(name="mine", python=f"checks:{function}", every_s=1.0, **limits)  # type: ignore[arg-type]  # mypy cannot check **
    return with_code([gate], checks)


def step_until(controller: Controller, claim: Callable[[], bool]) -> None:
    """Let a controller work, by a clock that stands, until a service was heard."""
    end_s = time.monotonic() + 30.0
    while not claim():
        assert time.monotonic() < end_s, "it took too long"
        controller.step()
        time.sleep(0.02)


def detail(cluster: Cluster) -> str:
    return read_user_results(cluster.folder, cluster.state())[0].detail


def run_until(cluster: Cluster, controller: Controller, phase: Phase) -> None:
    """Let the clock of the rollout run until it is in a phase; services answer by the real one."""

    end_s = time.monotonic() + 30.0
    while cluster.state().phase is not phase:
        assert time.monotonic() < end_s, "it took too long"
        cluster.now_s += 0.5
        cluster.answer(200)
        controller.step()
        time.sleep(0.02)


def test_a_rollout_goes_on_after_a_python_gate_passes(cluster: Cluster, checks: Path) -> None:
    cluster.start(settings(user_gates=python_gate(checks, "good")))
    run_until(cluster, cluster.controller(gate_folder=checks), Phase.COMPLETED)


def test_a_number_above_its_limit_rolls_back(cluster: Cluster, checks: Path) -> None:
    cluster.start(settings(user_gates=python_gate(checks, "share", max=0.2)))
    run_until(cluster, cluster.controller(gate_folder=checks), Phase.ROLLED_BACK)

    # 10 % passed, 50 % did not.
    assert cluster.state().stage == 1
    assert "mine: it gave 0.5, accepted are -inf to 0.2" in cluster.state().reason


def test_a_gate_in_dry_run_fails_without_effect(cluster: Cluster, checks: Path) -> None:
    gates = python_gate(checks, "share", max=0.0)
    cluster.start(settings(user_gates=gates, dry_run=(*FAST.dry_run, "mine")))
    run_until(cluster, cluster.controller(gate_folder=checks), Phase.COMPLETED)


@pytest.mark.parametrize(("strict", "phase"), [(False, Phase.PAUSED), (True, Phase.ROLLED_BACK)])
def test_a_gate_that_raises_pauses_after_the_limit_and_rolls_back_if_strict(
    cluster: Cluster, checks: Path, strict: bool, phase: Phase
) -> None:
    gates = python_gate(checks, "breaks")
    cluster.start(settings(user_gates=gates, strict=strict, inconclusive_limit_s=10.0))
    controller = cluster.controller(gate_folder=checks)
    run(cluster, controller, 2)
    step_until(controller, lambda: "no data" in detail(cluster))
    run(cluster, controller, 7)
    assert cluster.state().phase is Phase.RUNNING  # past the time of the stage: it waits

    run(cluster, controller, 5)
    assert cluster.state().phase is phase
    assert "no answer for 10 s: mine: checks:breaks failed" in cluster.state().reason


@pytest.mark.parametrize(
    ("with_folder", "changed", "why"),
    [
        (False, False, "the server needs --gate-folder"),
        (True, True, "checks:good is not what it was when the rollout began"),
    ],
)
def test_a_server_without_the_gates_code_says_so(
    cluster: Cluster, checks: Path, with_folder: bool, changed: bool, why: str
) -> None:
    cluster.start(settings(user_gates=python_gate(checks, "good")))
    if changed:
        (checks / "checks.py").write_text(CHECKS.replace("== 2", "== 3"))
    controller = cluster.controller(gate_folder=checks if with_folder else None)

    run(cluster, controller, 2)
    step_until(controller, lambda: why in detail(cluster))
    assert read_user_results(cluster.folder, cluster.state())[0].verdict is Verdict.INCONCLUSIVE


def test_a_silent_prometheus_never_delays_a_step(cluster: Cluster) -> None:
    with service(is_silent=True) as silent:
        gate = UserGate(name="errors", prometheus=silent.url, query="up", max=1.0)
        cluster.start(settings(user_gates=(gate,)))
        controller = cluster.controller()
        began_s = time.monotonic()
        run(cluster, controller, 5)
        assert time.monotonic() - began_s < 5.0
        # Built-in gates are judged all the same.
        run(cluster, controller, 20, bad=5)

    assert cluster.state().phase is Phase.ROLLED_BACK
    assert cluster.state().reason.startswith("bad_answers")


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        ([0.1], Verdict.PASS),
        ([0.1, 0.3], Verdict.FAIL),
        ([float("nan")], Verdict.INCONCLUSIVE),
        ([float("inf")], Verdict.INCONCLUSIVE),
        ([0.1, float("nan")], Verdict.INCONCLUSIVE),
        ([], Verdict.INCONCLUSIVE),
        ([None], Verdict.INCONCLUSIVE),
        ([True], Verdict.PASS),
        ([False], Verdict.FAIL),
    ],
)
def test_only_finite_numbers_and_claims_decide(
    found: list[bool | float | None], verdict: Verdict
) -> None:
    assert compared_with_limits("g", found, least=0.0, most=0.2).verdict is verdict
    assert compared_with_limits("g", [0.1], least=None, most=None).verdict is Verdict.INCONCLUSIVE


def test_a_webhook_holds_the_rollout_until_it_answers_with_success(cluster: Cluster) -> None:
    with service(status=503) as running:
        cluster.start(settings(webhooks=(Webhook(url=running.url),)))
        controller = cluster.controller()
        run(cluster, controller, 5)
        step_until(controller, lambda: bool(running.got))
        assert cluster.state().phase is Phase.MEASURING
        step_until(controller, lambda: detail(cluster) == "status 503")

        running.status = 204
        run_until(cluster, controller, Phase.COMPLETED)

    called = running.contents()
    events = list(dict.fromkeys((each["event"], each["stage"]) for each in called))
    assert events == [
        ("stage", "10 %"),
        ("stage", "50 %"),
        ("promotion", "100 %"),
        ("end", "100 %"),
    ]
    assert len({each["id"] for each in called}) == 4
    assert called[0]["id"] == called[1]["id"]  # called again after 503, with the same id
    assert {(each["model"], each["baseline"], each["candidate"]) for each in called} == {
        ("m", 1, 2)
    }


def test_a_silent_webhook_pauses_after_the_limit(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "TIMEOUT_S", 0.3)
    with service(is_silent=True) as silent:
        hook = Webhook(url=silent.url, at=("promotion",))
        cluster.start(settings(webhooks=(hook,), stages="50,100", inconclusive_limit_s=10.0))
        controller = cluster.controller()
        run(cluster, controller, 6)
        step_until(controller, lambda: bool(silent.got))
        assert cluster.state().phase is Phase.RUNNING
        run(cluster, controller, 12)

    assert cluster.state().phase is Phase.PAUSED
    assert cluster.state().share == 0.5
    assert "no answer for 10 s: webhook 1" in cluster.state().reason


def test_a_rollback_waits_for_no_webhook_and_tells_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "PAUSES_S", (0.1,))
    with service() as heard, service(status=500) as refusing, service(is_silent=True) as silent:
        urls = [heard.url, refusing.url]
        hooks = [Webhook(url=url, at=("rollback",)) for url in urls]
        before = Webhook(url=silent.url, at=("end",))
        cluster.start(settings(webhooks=(*hooks, before), notify=(refusing.url, heard.url)))
        controller = cluster.controller()
        run(cluster, controller, 3)
        run(cluster, controller, 15, bad=10)
        assert cluster.state().phase is Phase.ROLLED_BACK

        step_until(controller, lambda: _announced(cluster) == _newest(cluster))

    texts = [each["text"] for each in heard.contents() if "text" in each]
    assert [text.partition(",")[0] for text in texts] == ["Rollout of m"] * len(texts)
    assert "version 2: start by me. Now measuring the baseline, 0 % of the traffic." in texts[0]
    assert "Now rolled back, 0 % of the traffic. [m/1/" in texts[-1]
    rollbacks = [each for each in heard.contents() if each.get("event") == "rollback"]
    assert [each["id"] for each in rollbacks] == [f"m/1/{_newest(cluster)}/rollback"]
    # Each message to the service that refuses was tried twice, and dropped.
    assert len(refusing.got) == 2 * (len(texts) + 1)


def test_another_controller_tells_what_the_first_one_could_not(cluster: Cluster) -> None:
    with service() as heard:
        cluster.start(settings(notify=(heard.url,)))
        controller = cluster.controller()
        run(cluster, controller, 2)
        step_until(controller, lambda: _announced(cluster) == _newest(cluster))
        # An operator rolls back while no controller is at work.
        files = StateFiles(cluster.folder)
        state = roll_back(cluster.state(), reason="<b> & more", now_s=cluster.now_s)
        event = Event(what="rollback", who="me", why="<b> & more", at_s=cluster.now_s)
        change(files, files.latest(), state, event)
        before = len(heard.got)

        second = cluster.controller()
        for _ in range(int(TAKEOVER_S) + 2):
            second.step()
            cluster.now_s += 1.0
        step_until(second, lambda: _announced(cluster) == _newest(cluster))

    assert "rollback by me: &lt;b&gt; &amp; more." in heard.contents()[-1]["text"]
    assert len(heard.got) == before + 1


def _announced(cluster: Cluster) -> int:
    path = cluster.folder / "announced.json"
    return int(json.loads(path.read_bytes())["number"]) if path.is_file() else 0


def _newest(cluster: Cluster) -> int:
    latest = StateFiles(cluster.folder).latest()
    assert latest is not None
    return latest.number
