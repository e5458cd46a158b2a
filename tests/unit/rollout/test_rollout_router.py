"""What a server does with a rollout: which version a request gets, and what is counted."""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.rollout.ab.append_log import LogReader, objects_of
from stoker.rollout.ab.assignments import key_text, logs_of
from stoker.rollout.control.controller import Event, change
from stoker.rollout.counts.counts import MEASURED, read_counts, read_failures
from stoker.rollout.routing.decision import MAX_KEY_BYTES
from stoker.rollout.routing.router import MAX_RUN_S, RolloutRouter
from stoker.rollout.state.ab_settings import ABTestSettings
from stoker.rollout.state.changes import (
    advance,
    begin_test,
    end_test,
    promote_fully,
    roll_back,
    start,
)
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import FOLDER, Phase, RolloutState, state_of
from stoker.rollout.statistics.histogram import count_above
from stoker.serve.errors import ServeError
from stoker.serve.routing import (
    CopyResult,
    Headers,
    RequestCopy,
    Route,
    RunningRequest,
    Served,
)
from stoker.serve.runtime.stuck_call_watchdog import StuckCallWatchdog

EVENT = Event(what="test", who="me", why="", at_s=0.0)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for version in (1, 2):
        (tmp_path / "m" / str(version)).mkdir(parents=True)
    return tmp_path / "m"


def served(model: Path) -> dict[str, Served]:
    return {"m": Served(base=model, failed={})}


def put(model: Path, state: RolloutState) -> RolloutRouter:
    files = StateFiles(model / FOLDER)
    change(files, files.latest(), state, EVENT)
    router = RolloutRouter(server="one")
    router.refresh(served(model))
    return router


def begun(stages: str = "10,100", key: str = "") -> RolloutState:
    settings = RolloutSettings(stages=stages, key=key, warm_up_s=0.0)
    return advance(start(None, 2, serving=1, settings=settings, now_s=0.0), now_s=0.0)


def headers(**given: str) -> Headers:
    return lambda name: given[name].encode() if name in given else None


def routed(router: RolloutRouter, found: Headers = headers()) -> Route:  # noqa: B008 - a function
    route = router.route("m", found)
    assert route is not None
    return route


def test_until_the_version_to_go_back_to_is_loaded_the_old_baseline_answers(model: Path) -> None:
    running = replace(begun(), baseline=2, candidate=3)

    back = routed(put(model, roll_back(running, reason="both are bad", now_s=1.0, to=1)))
    assert (back.version, back.otherwise) == (1, 2)

    plain = routed(put(model, roll_back(running, reason="bad", now_s=1.0)))
    assert (plain.version, plain.otherwise) == (2, 2)


def test_a_model_without_a_rollout_is_left_alone(model: Path) -> None:
    router = RolloutRouter(server="one")
    router.refresh(served(model))

    assert router.route("m", headers()) is None
    assert router.wanted("m", model) is None
    router.answered("m", Route(version=1, otherwise=1), good=True, took_s=1.0, outputs=None)
    assert not (model / FOLDER).exists()


def test_traffic_follows_the_state_and_so_do_the_versions_that_stay_loaded(model: Path) -> None:
    def shares(state: RolloutState) -> float:
        router = put(model, state)
        return Counter(routed(router).version for _ in range(2_000))[2] / 2_000

    measuring = replace(begun(), phase=Phase.MEASURING)
    assert shares(measuring) == 0.0
    assert shares(begun()) == pytest.approx(0.1, abs=0.03)
    done = promote_fully(begun(), now_s=0.0)
    assert shares(done) == 1.0
    assert shares(roll_back(begun(), reason="x", now_s=0.0)) == 0.0

    assert put(model, begun()).wanted("m", model) == {1, 2}
    assert put(model, done).wanted("m", model) == {2}
    assert put(model, promote_fully(begun(), now_s=2e9)).wanted("m", model) == {1, 2}
    assert put(model, roll_back(begun(), reason="x", now_s=2e9)).wanted("m", model) == {1}


def test_a_user_stays_with_a_version_and_requests_without_the_key_do_not_count(model: Path) -> None:
    router = put(model, begun(key="X-User"))
    users = [f"user-{number}" for number in range(500)]

    first = [routed(router, headers(**{"x-user": user})) for user in users]

    assert first == [routed(router, headers(**{"x-user": user})) for user in users]
    assert {route.version for route in first} == {1, 2}
    assert routed(router) == Route(version=1, otherwise=1, counts=False, compared=(1, 2))
    by_cookie = put(model, begun(key="cookie:uid"))
    one = routed(by_cookie, headers(cookie="a=1; uid=user-7 ;b=2"))
    assert one.key == first[7].key
    assert routed(by_cookie, headers(cookie="a=1")).counts is False


def test_under_an_ab_test_keys_have_arms_and_each_is_recorded_when_it_is_answered(
    model: Path,
) -> None:
    test = ABTestSettings(arms=((1, 0.5), (2, 0.3), (3, 0.2)), baseline=1, salt="00" * 16)
    settings = RolloutSettings(key="x-user")
    router = put(model, begin_test(None, test, settings=settings, now_s=0.0))
    assert router.wanted("m", model) == {1, 2, 3}
    routes = [routed(router, headers(**{"x-user": f"user-{number}"})) for number in range(2_000)]
    shares = Counter(route.version for route in routes)
    assert {version: shares[version] / 2_000 for version in shares} == pytest.approx(
        test.shares, abs=0.04
    )
    for without_user in (headers(), headers(**{"x-user": ""})):
        route = routed(router, without_user)
        assert route is not None
        assert (route.version, route.counts, route.test) == (1, False, 0)

    with pytest.raises(ServeError, match="'user-0'"):
        router.add_outcomes("m", [("user-0", 1.0)])
    for route in [*routes, routed(router), routes[0]]:
        router.answered("m", route, good=True, took_s=0.01, outputs={"y": np.array([1.0])})
    router.add_outcomes("m", [("user-0", 1.0)])
    later = RolloutRouter(server="two")
    later.refresh(served(model))
    later.answered("m", routes[0], good=True, took_s=0.01, outputs=None)

    reader = LogReader(logs_of(model / FOLDER, 1), "assignments-*")
    lines = [line for block in reader.blocks() for line in objects_of(block)]
    assert [line["arm"] for line in lines] == [route.version for route in routes]
    assert {line["key"] for line in lines} == {key_text(route.key or 0) for route in routes}

    over = end_test(begin_test(None, test, settings=settings, now_s=0.0), 2, now_s=2e9)
    ended = put(model, over)
    later.refresh(served(model))
    assert ended.wanted("m", model) == {1, 2}
    for each in (ended, later):
        assert routed(each, headers(**{"x-user": "user-0"})).version == 2
        with pytest.raises(ServeError, match="no A/B test under way"):
            each.add_outcomes("m", [("user-0", 1.0)])


def test_an_answer_counts_only_for_the_rollout_or_test_that_chose_its_version(model: Path) -> None:
    user = headers(**{"x-user": "ann"})
    router = put(model, begun("50,100", key="x-user"))
    of_canary = routed(router, user)
    files = StateFiles(model / FOLDER)

    def follow(state: RolloutState) -> Route:
        change(files, files.latest(), state, EVENT)
        router.refresh(served(model))
        return routed(router, user)

    def answer(route: Route) -> None:
        router.answered("m", route, good=False, took_s=0.01, outputs=None)
        router.refresh(served(model))

    test = ABTestSettings(arms=((1, 0.5), (2, 0.5)), baseline=1, salt="00" * 16)
    done = promote_fully(begun(), now_s=0)
    testing = begin_test(done, test, settings=RolloutSettings(key="x-user"), now_s=0)
    of_test = follow(testing)
    answer(of_canary)
    assert [*LogReader(logs_of(model / FOLDER, 2), "*").blocks()] == []
    third = start(end_test(testing, 1, now_s=0), 2, serving=1, settings=RolloutSettings(), now_s=0)
    of_third = follow(replace(third, phase=Phase.RUNNING))
    answer(of_test)
    assert read_counts(model / FOLDER, rollout=3) == {}
    answer(of_third)
    assert read_counts(model / FOLDER, rollout=3)[0][of_third.version].bad == 1


def test_versions_are_compared_from_the_measurement_of_the_baseline_to_the_end(model: Path) -> None:
    measuring, done = replace(begun(), phase=Phase.MEASURING), promote_fully(begun(), now_s=0.0)

    assert routed(put(model, measuring)).compared == (1, 2)
    assert routed(put(model, begun())).compared == (1, 2)
    assert routed(put(model, replace(done, phase=Phase.BAKING))).compared == (2,)
    assert routed(put(model, done)).compared == ()


def test_routes_of_many_keys_are_not_all_kept(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.rollout.routing.decision.MAX_ROUTES", 3)
    router = put(model, begun(key="x-user"))

    first = [routed(router, headers(**{"x-user": f"{user}"})) for user in range(10)]
    again = [routed(router, headers(**{"x-user": f"{user}"})) for user in range(10)]

    assert first == again
    assert len({route.key for route in first}) == 10
    assert sum(one is other for one, other in zip(first, again, strict=True)) < 4


def test_routes_of_long_keys_are_not_kept(model: Path) -> None:
    router = put(model, begun(key="x-user"))

    for length, kept in ((MAX_KEY_BYTES, True), (MAX_KEY_BYTES + 1, False)):
        one, other = (routed(router, headers(**{"x-user": "u" * length})) for _ in range(2))
        assert (one == other, one is other) == (True, kept)


def test_a_stage_by_header_sends_only_requests_with_it_to_the_candidate(model: Path) -> None:
    router = put(model, begun("header=X-Canary,100"))

    assert routed(router, headers(**{"x-canary": ""})).version == 2
    assert routed(router).version == 1


def test_a_shadow_stage_leaves_the_traffic_and_copies_a_share_of_it(model: Path) -> None:
    router = put(model, begun("shadow=20,100"))

    routes = [routed(router) for _ in range(2_000)]

    assert {(route.version, route.counts) for route in routes} == {(1, False)}
    assert sum(route.copied for route in routes) / 2_000 == pytest.approx(0.2, abs=0.04)
    # The candidate runs in a process of its own, so a server does not load it before the next stage.
    assert router.wanted("m", model) == {1}
    assert put(model, advance(begun("shadow=20,100"), now_s=2e9)).wanted("m", model) == {1, 2}
    assert put(model, replace(begun("shadow,100"), phase=Phase.MEASURING)).wanted("m", model) == {1}


def test_a_user_without_the_key_is_not_copied(model: Path) -> None:
    router = put(model, begun("shadow,100", key="x-user"))

    assert not routed(router).copied
    keyed = routed(router, headers(**{"x-user": "me"}))
    assert keyed.copied
    assert keyed.key is not None


def test_a_copy_without_a_shadow_stage_is_dropped(model: Path) -> None:
    results: list[CopyResult] = []
    request = RequestCopy(
        signature="serving_default",
        inputs={},
        outputs={},
        took_s=0.001,
        primary_waits=lambda: False,
        on_result=results.append,
    )
    route = Route(version=1, otherwise=1, copied=True, counts=False)
    RolloutRouter(server="one").copy("m", route, request)
    put(model, begun("10,100")).copy("m", route, request)
    assert [result.is_compared for result in results] == [False, False]


def test_requests_that_come_while_the_candidate_is_at_work_are_dropped_copies(model: Path) -> None:
    router = put(model, begun("shadow,100"))
    results: list[CopyResult] = []
    request = RequestCopy(
        signature="serving_default",
        inputs={},
        outputs={},
        took_s=0.001,
        primary_waits=lambda: False,
        on_result=results.append,
    )

    router.copy("m", routed(router), request)  # starts the process, which has nothing loaded yet
    assert not any(routed(router).copied for _ in range(10))
    router.refresh(served(model))

    shadow = read_counts(model / FOLDER, rollout=1)[0][2].shadow
    assert shadow == {"copied": 11, "dropped": 11}
    assert [(each.is_compared, each.copies) for each in results] == [(False, 1), (False, 10)]
    files = StateFiles(model / FOLDER)
    change(files, files.latest(), promote_fully(begun(), now_s=0.0), EVENT)
    router.refresh(served(model))
    assert not routed(router).copied


def test_answers_are_counted_by_stage_and_version_and_a_key_once(model: Path) -> None:
    router = put(model, begun(key="x-user"))
    good, keyed = Route(version=1, otherwise=1), Route(version=2, otherwise=1, key=5)
    score = {"scores": np.array([[0.25]], np.float32)}

    router.answered("m", good, good=True, took_s=0.01, outputs=score)
    for _ in range(3):
        router.answered("m", keyed, good=False, took_s=0.01, outputs=None)
        router.answered("m", keyed, good=True, took_s=0.01, outputs=score)
    router.answered(
        "m",
        Route(version=2, otherwise=1),
        good=True,
        took_s=0.01,
        outputs={"y": np.array([np.nan])},
    )
    router.answered(
        "m", Route(version=1, otherwise=1, counts=False), good=False, took_s=9.0, outputs=None
    )
    router.refresh(served(model))

    counts = read_counts(model / FOLDER, rollout=1)[0]
    assert (counts[1].requests, counts[1].bad, sum(counts[1].predictions.values())) == (1, 0, 1)
    assert (counts[2].requests, counts[2].bad, sum(counts[2].predictions.values())) == (7, 2, 1)
    assert sum(counts[2].latency.values()) == 3


def test_a_key_counts_once_whichever_worker_answers_and_again_in_the_next_stage(
    model: Path, tmp_path: Path
) -> None:
    put(model, begun("10,50,100", key="x-user"))
    keyed = Route(version=2, otherwise=1, key=5)
    workers = [RolloutRouter(server=name, folder=tmp_path / "workers") for name in ("w1", "w2")]

    def fail() -> None:
        for each in workers:
            each.refresh(served(model))
            for _ in range(3):
                each.answered("m", keyed, good=False, took_s=0.01, outputs=None)
            each.refresh(served(model))

    fail()
    files = StateFiles(model / FOLDER)
    following = advance(begun("10,50,100", key="x-user"), now_s=0.0)
    change(files, files.latest(), following, EVENT)
    fail()

    counts = read_counts(model / FOLDER, rollout=1)
    assert [(counts[stage][2].requests, counts[stage][2].bad) for stage in (0, 1)] == [(6, 1)] * 2


def test_a_new_stage_counts_for_itself_and_a_new_rollout_begins_at_nothing(model: Path) -> None:
    router = put(model, replace(begun(), phase=Phase.MEASURING))
    router.answered("m", Route(version=1, otherwise=1), good=True, took_s=0.01, outputs=None)
    files = StateFiles(model / FOLDER)
    change(files, files.latest(), begun(), EVENT)
    router.refresh(served(model))
    router.answered("m", Route(version=2, otherwise=1), good=True, took_s=0.01, outputs=None)
    router.refresh(served(model))

    assert {
        stage: {version: each.requests for version, each in versions.items()}
        for stage, versions in read_counts(model / FOLDER, rollout=1).items()
    } == {MEASURED: {1: 1}, 0: {2: 1}}
    second = start(
        promote_fully(begun(), now_s=0), 3, serving=1, settings=RolloutSettings(), now_s=0
    )
    change(files, files.latest(), second, EVENT)
    router.refresh(served(model))
    assert read_counts(model / FOLDER, rollout=2) == {}


def test_a_stage_warms_up_from_the_first_look_at_it_whatever_the_operators_clock_says(
    model: Path,
) -> None:
    state = replace(begun(), began_s=time.time() - 3_600.0, slow_s={"slow_p99": 0.1})
    router = put(model, replace(state, settings=replace(state.settings, warm_up_s=0.1)))
    route = Route(version=2, otherwise=1)
    router.answered("m", route, good=True, took_s=5.0, outputs=None)
    router.answered("m", route, good=False, took_s=5.0, outputs=None)
    router.refresh(served(model))
    warming = read_counts(model / FOLDER, rollout=1)[0][2]
    assert (warming.requests, warming.bad, warming.latency) == (2, 1, {})

    time.sleep(0.1)  # the warm-up
    files = StateFiles(model / FOLDER)
    stored = files.latest()
    assert stored is not None
    taken_over = replace(state_of(stored.content["state"]), lease=7)
    change(files, stored, taken_over, EVENT)  # the same stage: it has warmed up
    router.refresh(served(model))
    router.answered("m", route, good=True, took_s=5.0, outputs=None)
    router.refresh(served(model))
    assert read_counts(model / FOLDER, rollout=1)[0][2].latency.total() == 1


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=300))
def test_any_header_value_has_one_version_and_an_empty_one_is_not_a_key(value: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "m"
        (model / "2").mkdir(parents=True)
        for key, given_as in (("x-user", value), ("cookie:uid", b"a=1; uid=" + value)):
            router = put(model, begun("50,100", key=key))
            name = key.partition(":")[0]
            found = {routed(router, {name: given_as}.get) for _ in range(3)}
            assert len(found) == 1
            assert found.pop().counts or not value.partition(b";")[0].strip()


def test_a_damaged_state_keeps_the_last_weights(model: Path) -> None:
    router = put(model, roll_back(begun(), reason="x", now_s=2e9))
    (model / FOLDER / "00000002.json").write_text("{")
    before = router.refresh({})

    assert router.refresh(served(model)) == before

    assert routed(router).version == 1
    # A server that starts now takes up the last state that is whole.
    later = RolloutRouter(server="two")
    assert later.wanted("m", model) == {1}


def test_a_state_that_replaces_one_of_the_same_number_is_followed(model: Path) -> None:
    router = put(model, begun())
    (model / FOLDER / "00000001.json").unlink()
    put(model, promote_fully(begun(), now_s=0.0))

    router.refresh(served(model))

    assert {routed(router).version for _ in range(50)} == {2}


def test_a_request_that_still_runs_is_slow_as_soon_as_it_has_taken_too_long(model: Path) -> None:
    router = put(model, replace(begun(key="x-user"), slow_s={"slow_p99": 0.2, "slow_p50": 0.1}))
    keyed, other = Route(version=2, otherwise=1, key=5), Route(version=1, otherwise=1)

    def running(*took_s: float) -> list[RunningRequest]:
        slow = [RunningRequest(model="m", route=keyed, took_s=each) for each in took_s]
        elsewhere = RunningRequest(model="n", route=other, took_s=9.0)
        return [*slow, RunningRequest(model="m", route=other, took_s=0.05), elsewhere]

    def slow() -> dict[int, int]:
        counts = read_counts(model / FOLDER, rollout=1).get(0, {})
        return {version: count_above(each.latency, 0.2) for version, each in counts.items()}

    router.refresh(served(model), lambda: running(0.05))
    assert slow() == {}
    # Two requests of one key are one slow client.
    router.refresh(served(model), lambda: running(0.5, 0.6))
    assert slow() == {2: 1}
    router.refresh(served(model), lambda: running(1.5))
    assert slow() == {2: 1}
    # It ends, as an error: it stays slow, and is counted once.
    router.answered("m", keyed, good=False, took_s=1.6, outputs=None)
    router.refresh(served(model), lambda: running(0.5))
    assert slow() == {2: 1}
    assert read_counts(model / FOLDER, rollout=1)[0][2].bad == 1


def test_while_a_stage_warms_up_no_request_is_slow_and_errors_count(model: Path) -> None:
    slow_s = {"slow_p99": 0.2, "slow_p50": 0.1}
    warming = replace(begun().settings, warm_up_s=30.0)
    router = put(model, replace(begun(), slow_s=slow_s, settings=warming))
    of_candidate = Route(version=2, otherwise=1)

    router.answered("m", of_candidate, good=True, took_s=9.0, outputs=None)
    router.answered("m", of_candidate, good=False, took_s=9.0, outputs=None)
    running = RunningRequest(model="m", route=of_candidate, took_s=9.0)
    router.refresh(served(model), lambda: [running])

    counts = read_counts(model / FOLDER, rollout=1)[0][2]
    assert (counts.requests, counts.bad, counts.latency) == (2, 1, Counter())


def test_only_a_version_under_rollout_has_a_longest_run_of_its_own(model: Path) -> None:
    router = put(model, begun())
    assert router.max_run_s("m", 2) == MAX_RUN_S == 10.0
    assert router.max_run_s("m", 2, loading=True) == 600.0
    for loading in (False, True):
        assert router.max_run_s("m", 1, loading=loading) == math.inf
        assert router.max_run_s("other", 2, loading=loading) == math.inf
    done = put(model, promote_fully(begun(), now_s=0.0))
    assert done.max_run_s("m", 2) == math.inf


def test_a_version_that_hangs_is_reported_to_the_controller(model: Path) -> None:
    router = put(model, begun())

    router.hung("m", 1)
    router.hung("m", 2)
    router.refresh({"m": Served(base=model, failed={3: "damaged"})})

    assert read_failures(model / FOLDER, rollout=1) == {
        2: "a run of it does not end",
        3: "it cannot be loaded: damaged",
    }


def test_a_state_that_cannot_be_read_is_reported_once_and_the_weights_stay(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    router = put(model, begun())
    away = model.with_name("unmounted")
    read_s = [router.refresh(served(model))["m"]]
    model.rename(away)
    read_s += [router.refresh(served(model))["m"] for _ in range(3)]
    assert caplog.records == []

    monkeypatch.setattr("stoker.rollout.routing.model_rollout.UNREADABLE_S", 0.0)
    read_s += [router.refresh(served(model))["m"] for _ in range(3)]

    assert len(set(read_s)) == 1
    assert Counter(routed(router).version for _ in range(500)).keys() == {1, 2}
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert "rollout of m: its state has been unreadable for" in record.getMessage()
    away.rename(model)
    assert router.refresh(served(model))["m"] > read_s[0]
    model.rename(away)
    router.refresh(served(model))
    assert len(caplog.records) == 2


def test_a_run_of_a_version_under_rollout_may_not_last_as_long_as_others(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.rollout.routing.router.MAX_RUN_S", 0.1)
    router = put(model, begun())
    overdue: list[int] = []
    stuck = threading.Event()
    watchdog = StuckCallWatchdog(max_run_s=60.0, on_stuck=stuck.set, router=router)

    with (
        watchdog.of_version("m", 1).watched(lambda: overdue.append(1)),
        watchdog.of_version("m", 2).watched(lambda: overdue.append(2)),
        watchdog.watched(lambda: overdue.append(0)),
    ):
        assert stuck.wait(30)

    watchdog.close()
    assert overdue == [2]
    router.refresh(served(model))
    assert read_failures(model / FOLDER, rollout=1) == {2: "a run of it does not end"}


def test_counts_that_cannot_be_written_are_an_error_once_and_written_later(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = put(model, begun())
    in_the_way = model / FOLDER / "counts"
    in_the_way.write_text("")
    for _ in range(3):
        router.answered("m", Route(version=1, otherwise=1), good=True, took_s=0.1, outputs=None)
        router.refresh(served(model))

    (record,) = caplog.records
    assert "rollout of m: its counts cannot be written" in record.getMessage()
    in_the_way.unlink()
    router.refresh(served(model))
    assert read_counts(model / FOLDER, rollout=1)[0][1].requests == 3
