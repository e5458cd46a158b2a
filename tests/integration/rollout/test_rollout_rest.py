"""The paths of rollouts on a real server's REST port: who may use them, and what they do."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
from tests.integration.rollout.rest_site import PREDICT, Site

from stoker.serve.rest.extra_routes import check_sender
from stoker.serve.rest.messages import HttpError
from stoker.serve.security.auth import Role


def test_an_admin_takes_a_version_from_start_to_rollback(guarded: Site) -> None:
    settings = {"stages": "10,pause,100", "min_requests": 5, "notify": ["env:SLACK"]}
    body = {"version": 2, "settings": settings, "why": "retrained"}
    status, state = guarded.send("/v1/rollouts/taxi/start", body)
    assert (status, state["candidate"], state["baseline"]) == (200, 2, 1)
    assert state["settings"]["min_requests"] == 5
    # Of two at once the second sees who was first.
    status, refused = guarded.send("/v1/rollouts/taxi/start", body)
    assert status == 400
    assert "version 2, started by anna over REST" in refused["error"]

    assert guarded.send("/v1/rollouts/taxi/promote", {})[1]["phase"] == "running"
    assert guarded.send("/v1/rollouts/taxi/pause", {"why": "a look"})[1]["phase"] == "paused"
    status, shown = guarded.send("/v1/rollouts/taxi")
    assert (status, shown["phase"], shown["share"], shown["stage"]) == (200, "paused", 0.1, "10 %")
    assert guarded.send("/v1/rollouts/taxi/resume", b"")[1]["phase"] == "running"
    assert guarded.send("/v1/rollouts/taxi/promote", {"full": True})[1]["phase"] == "completed"
    status, back = guarded.send("/v1/rollouts/taxi/rollback", {"why": "page 17"})
    assert (status, back["phase"], back["rejected"]) == (200, "rolled back", [2])

    history = guarded.send("/v1/rollouts/taxi")[1]["history"]
    assert [(each["what"], each["who"], each["why"]) for each in history] == [
        ("start", "anna over REST", "retrained"),
        ("promote", "anna over REST", ""),
        ("pause", "anna over REST", "a look"),
        ("resume", "anna over REST", ""),
        ("promote", "anna over REST", ""),
        ("rollback", "anna over REST", "page 17"),
    ]
    assert time.time() - history[0]["at_s"] < 600.0
    listed = guarded.send("/v1/rollouts")[1]["rollouts"]
    assert [(each["model"], each["phase"]) for each in listed] == [("taxi", "rolled back")]

    text = guarded.send("/monitoring/prometheus/metrics", key=PREDICT)[1]
    lines = text.splitlines()
    assert 'stoker_rollout_phase{model_name="taxi",phase="rolled back"} 1' in lines
    assert 'stoker_rollout_phase{model_name="taxi",phase="running"} 0' in lines
    assert 'stoker_rollout_traffic_share{model_name="taxi",version="1"} 1' in lines
    assert 'stoker_rollout_events_total{model_name="taxi",event="promote"} 2' in lines
    assert lines.count("# TYPE stoker_rollout_events_total counter") == 1
    assert text.endswith("\n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rollouts", None),
        ("/v1/rollouts/taxi", None),
        ("/v1/rollouts/nobody/nothing", None),
        ("/v1/rollouts/taxi/start", {"version": 2}),
        ("/v1/rollouts/taxi/rollback", {}),
    ],
)
def test_other_keys_see_and_change_nothing(guarded: Site, path: str, body: Any) -> None:
    before = guarded.rollouts("taxi").history()

    assert guarded.send(path, body, key=PREDICT)[0] == 403
    assert guarded.send(path, body, key="")[0] == 401
    assert guarded.rollouts("taxi").history() == before


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/v1/rollouts/nobody/start", {"version": 2}, 404, "Servable not found"),
        ("/v1/rollouts/other/start", {}, 400, "The body must name a version"),
        ("/v1/rollouts/other/start", {"version": 9}, 400, "must have a version 9"),
        ("/v1/rollouts/other/start", {"version": "2"}, 400, "version must be"),
        ("/v1/rollouts/other/start", b"[", 400, "The body must be JSON"),
        ("/v1/rollouts/other/start", [], 400, "section"),
        ("/v1/rollouts/other/start", {"version": 2, "stages": "1"}, 400, "stages is not a setting"),
        (
            "/v1/rollouts/other/start",
            {"version": 2, "settings": {"stages": "50,10"}},
            400,
            "must rise to 100",
        ),
        (
            "/v1/rollouts/other/start",
            {"version": 2, "settings": {"user_gates": [{"name": "a", "python": "os:system"}]}},
            400,
            "gate a needs the folder of its Python module",
        ),
        ("/v1/rollouts/other/pause", {}, 400, "has no rollout"),
        ("/v1/rollouts/other/result", None, 400, "has no A/B test"),
        ("/v1/rollouts/other/jump", {}, 404, "is not a path of rollouts"),
        ("/v1/rollouts", {}, 404, "is not a path of rollouts"),
        ("/v1/rollouts/other/verdict?version=x", None, 400, "version must be a number"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_changes_nothing(
    guarded: Site, path: str, body: Any, status: int, said: str
) -> None:
    found, content = guarded.send(path, body)

    assert (found, said in content["error"]) == (status, True), content
    assert not (guarded.root / "other" / ".rollout").exists()


def test_without_keys_only_programs_on_this_machine_are_admins(open_site: Site) -> None:
    assert open_site.send("/v1/rollouts", key="")[0] == 200
    # A page in the operator's browser.
    status, refused = open_site.send("/v1/rollouts", key="", Origin="http://evil.example")
    assert (status, refused["error"]) == (
        403,
        "without --keys-file, only programs on this machine have the role admin",
    )


def test_a_key_of_predict_gets_the_verdict_and_a_server_without_rollouts_has_no_such_path(
    guarded: Site,
) -> None:
    status, found = guarded.send("/v1/rollouts/other/verdict", key=PREDICT)
    assert (status, "has no rollout" in found["error"]) == (400, True)
    assert guarded.send("/v1/rollouts/other/verdict", key="")[0] == 401


@pytest.mark.parametrize(("peer", "refused"), [("10.0.0.7", True), ("127.0.0.1", False)])
def test_without_keys_another_machine_is_not_an_admin(peer: str, refused: bool) -> None:
    scope = {"client": (peer, 5), "headers": []}
    expected = pytest.raises(HttpError) if refused else contextlib.nullcontext()
    with expected:
        check_sender(scope, Role.ADMIN)
    check_sender(scope, Role.PREDICT)
