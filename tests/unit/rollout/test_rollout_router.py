"""What a server does with a rollout: which version a request gets, and what is counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stoker.rollout.controller import Event, change
from stoker.rollout.counts import MEASURED, read_counts
from stoker.rollout.prediction_shift import predicted
from stoker.rollout.router import FOLDER, RolloutRouter
from stoker.rollout.state import (
    Phase,
    RolloutSettings,
    RolloutState,
    advance,
    promote_fully,
    roll_back,
    start,
)
from stoker.rollout.state_files import StateFiles
from stoker.serve.routing import CopyResult, Headers, RequestCopy, Route, Served

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
    settings = RolloutSettings(stages=stages, key=key)
    return advance(start(None, 2, serving=1, settings=settings, now_s=0.0), now_s=0.0)


def headers(**given: str) -> Headers:
    return lambda name: given[name].encode() if name in given else None


def routed(router: RolloutRouter, found: Headers = headers()) -> Route:  # noqa: B008 - a function
    route = router.route("m", found)
    assert route is not None
    return route


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
    assert routed(router) == Route(version=1, otherwise=1, counts=False)
    by_cookie = put(model, begun(key="cookie:uid"))
    one = routed(by_cookie, headers(cookie="a=1; uid=user-7 ;b=2"))
    assert one.key == first[7].key
    assert routed(by_cookie, headers(cookie="a=1")).counts is False


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


def test_a_damaged_state_keeps_the_last_weights(model: Path) -> None:
    router = put(model, roll_back(begun(), reason="x", now_s=2e9))
    (model / FOLDER / "00000002.json").write_text("{")
    before = router.read_s

    router.refresh(served(model))

    assert routed(router).version == 1
    assert router.read_s == before
    # A server that starts now takes up the last state that is whole.
    later = RolloutRouter(server="two")
    assert later.wanted("m", model) == {1}


@pytest.mark.parametrize(
    ("output", "values"),
    [
        (np.array([[0.5], [2.0]], np.float32), [0.5, 2.0]),
        (np.array([[0.1, 0.9], [0.6, 0.4]], np.float32), [1.0, 0.0]),
        (np.array([3, 4]), [3.0, 4.0]),
        (np.array(7.0), [7.0]),
    ],
)
def test_what_is_predicted_is_a_number_or_a_class(output: np.ndarray, values: list[float]) -> None:
    found = predicted({"labels": np.array([b"a"], object), "scores": output})

    assert found is not None
    assert found.tolist() == values
    assert predicted({"labels": np.array([b"a"], object)}) is None
