"""The paths of rollouts on a real server's REST port: who may use them, and what they do."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.unit.rollout.test_rollout_operations import saved_model

from stoker.registry.repository import Repository
from stoker.rollout.counts.counts import write_counts
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.rest import RolloutRoutes
from stoker.rollout.state.state import Phase, RolloutSettings
from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server
from stoker.serve.rest.extra import check_sender
from stoker.serve.rest.messages import HttpError
from stoker.serve.security.auth import Role

ADMIN, PREDICT = "admin-key-of-anna-0123456789", "predict-key-of-argo-0123456789"
KEYS = f"""
- {{name: anna, role: admin, key: {ADMIN}}}
- {{name: argo, role: predict, key: {PREDICT}}}
"""


@dataclass
class Site:
    """A server, and a client of it."""

    port: int
    root: Path

    def ask(
        self, path: str, body: Any = None, *, method: str = "", key: str = ADMIN, **headers: str
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method or ("GET" if raw is None else "POST"), path, raw, headers)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        return response.status, json.loads(text) if text.startswith("{") else text

    def rollouts(self, model: str) -> ModelRollouts:
        return ModelRollouts(self.root, model)


def site(folder: Path, *, keys: bool) -> Iterator[Site]:
    repository = Repository(folder / "models")
    for model in ("taxi", "other"):
        for noise in "ab":
            repository.push(saved_model(folder / model / noise, noise=noise), model)
    (folder / "keys.yaml").write_text(KEYS)
    config = ServeConfig(
        root=repository.root,
        rest_port=0,
        grpc_port=0,
        poll_s=0.1,
        lame_duck_s=0.0,
        drain_s=1.0,
        keys_file=folder / "keys.yaml" if keys else None,
    )
    server = Server(config, extra=RolloutRoutes())
    server.start()
    try:
        end_s = time.monotonic() + 30.0
        while set(server.models.names()) != {"taxi", "other"}:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        yield Site(port=server.rest_port, root=repository.root)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from site(tmp_path_factory.mktemp("guarded"), keys=True)


@pytest.fixture(scope="module")
def open_site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from site(tmp_path_factory.mktemp("open"), keys=False)


def test_an_admin_takes_a_version_from_start_to_rollback(guarded: Site) -> None:
    settings = {"stages": "10,pause,100", "min_requests": 5, "notify": ["env:SLACK"]}
    body = {"version": 2, "settings": settings, "why": "retrained"}
    status, state = guarded.ask("/v1/rollouts/taxi/start", body)
    assert (status, state["candidate"], state["baseline"]) == (200, 2, 1)
    assert state["settings"]["min_requests"] == 5
    # Of two at once the second sees who was first.
    status, refused = guarded.ask("/v1/rollouts/taxi/start", body)
    assert status == 400
    assert "version 2, started by anna over REST" in refused["error"]

    assert guarded.ask("/v1/rollouts/taxi/promote", {})[1]["phase"] == "running"
    assert guarded.ask("/v1/rollouts/taxi/pause", {"why": "a look"})[1]["phase"] == "paused"
    status, shown = guarded.ask("/v1/rollouts/taxi")
    assert (status, shown["phase"], shown["share"], shown["stage"]) == (200, "paused", 0.1, "10 %")
    assert guarded.ask("/v1/rollouts/taxi/resume", b"")[1]["phase"] == "running"
    assert guarded.ask("/v1/rollouts/taxi/promote", {"full": True})[1]["phase"] == "completed"
    status, back = guarded.ask("/v1/rollouts/taxi/rollback", {"why": "page 17"})
    assert (status, back["phase"], back["rejected"]) == (200, "rolled back", [2])

    history = guarded.ask("/v1/rollouts/taxi")[1]["history"]
    assert [(each["what"], each["who"], each["why"]) for each in history] == [
        ("start", "anna over REST", "retrained"),
        ("promote", "anna over REST", ""),
        ("pause", "anna over REST", "a look"),
        ("resume", "anna over REST", ""),
        ("promote", "anna over REST", ""),
        ("rollback", "anna over REST", "page 17"),
    ]
    assert time.time() - history[0]["at_s"] < 600.0
    listed = guarded.ask("/v1/rollouts")[1]["rollouts"]
    assert [(each["model"], each["phase"]) for each in listed] == [("taxi", "rolled back")]

    text = guarded.ask("/monitoring/prometheus/metrics", key=PREDICT)[1]
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

    assert guarded.ask(path, body, key=PREDICT)[0] == 403
    assert guarded.ask(path, body, key="")[0] == 401
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
    found, content = guarded.ask(path, body)

    assert (found, said in content["error"]) == (status, True), content
    assert not (guarded.root / "other" / ".rollout").exists()


def test_the_verdict_with_its_evidence_for_other_controllers(open_site: Site) -> None:
    path, rollouts = "/v1/rollouts/taxi/verdict", open_site.rollouts("taxi")
    folder = open_site.root / "taxi" / ".rollout"
    rollouts.start(2, RolloutSettings(stages="50,100", min_requests=100, dry_run=()), why="")
    assert open_site.ask(path)[1]["verdict"] == "inconclusive"
    open_site.ask("/v1/rollouts/taxi/promote", {})

    def counted(requests: int, bad: int = 0) -> dict[str, Any]:
        counts = {
            0: {
                1: VersionCounts(requests=requests),
                2: VersionCounts(requests=requests, bad=bad),
            }
        }
        write_counts(folder, counts, {}, rollout=1, server="one")
        status, found = open_site.ask(path)
        assert status == 200
        return dict(found)

    few = counted(99)
    assert (few["verdict"], few["reason"]) == (
        "inconclusive",
        "99 of 100 requests of the candidate",
    )
    good = counted(1_000)
    assert (good["verdict"], good["requests"], good["version"]) == ("pass", 1_000, 2)
    # Flagger reads the status only, and sends a POST.
    assert open_site.ask(path, {"name": "taxi", "phase": "Progressing"})[0] == 200
    assert open_site.ask(f"{path}?expect=fail", {})[0] == 412

    bad = counted(1_000, bad=100)
    assert bad["verdict"] == "fail"
    assert bad["reason"].startswith("bad_answers: candidate 100, baseline 0")
    assert bad["gates"][0]["gate"] == "bad_answers"
    assert open_site.ask(path, {})[0] == 412
    assert open_site.ask(f"{path}?expect=fail", {})[0] == 200
    assert open_site.ask(f"{path}?version=1")[1]["verdict"] == "pass"
    assert open_site.ask(f"{path}?version=5")[1]["verdict"] == "inconclusive"
    assert open_site.ask(f"{path}?expect=maybe")[0] == 400

    rollouts.roll_back(to=None, why="page 17")
    assert open_site.ask(path)[1]["reason"] == "rolled back: page 17"
    assert open_site.ask(f"{path}?version=2")[1]["verdict"] == "fail"
    assert rollouts.status().state.phase is Phase.ROLLED_BACK


def test_without_keys_only_programs_on_this_machine_are_admins(open_site: Site) -> None:
    assert open_site.ask("/v1/rollouts", key="")[0] == 200
    # A page in the operator's browser.
    status, refused = open_site.ask("/v1/rollouts", key="", Origin="http://evil.example")
    assert (status, refused["error"]) == (
        403,
        "without --keys-file only programs on this machine have the role admin",
    )


def test_a_key_of_predict_gets_the_verdict_and_a_server_without_rollouts_has_no_such_path(
    guarded: Site,
) -> None:
    status, found = guarded.ask("/v1/rollouts/other/verdict", key=PREDICT)
    assert (status, "has no rollout" in found["error"]) == (400, True)
    assert guarded.ask("/v1/rollouts/other/verdict", key="")[0] == 401


@pytest.mark.parametrize(("peer", "refused"), [("10.0.0.7", True), ("127.0.0.1", False)])
def test_without_keys_another_machine_is_no_admin(peer: str, refused: bool) -> None:
    scope = {"client": (peer, 5), "headers": []}
    expected = pytest.raises(HttpError) if refused else contextlib.nullcontext()
    with expected:
        check_sender(scope, Role.ADMIN)
    check_sender(scope, Role.PREDICT)
