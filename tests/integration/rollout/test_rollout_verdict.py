"""The verdict on a candidate on a real server's REST port, as other controllers ask for it."""

from __future__ import annotations

import re
import time
from typing import Any

import yaml
from tests.integration.rollout.rest_site import PREDICT, Site

from stoker.rollout.ab_tests import ABTests
from stoker.rollout.counts.counts import write_counts
from stoker.rollout.export.formats import Format
from stoker.rollout.export.split import ExportedSplit
from stoker.rollout.export.write import ExportOptions, export_text
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.state.ab_settings import ABTestSettings
from stoker.rollout.state.changes import advance
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import FOLDER, Phase


def test_the_verdict_with_its_evidence_for_other_controllers(open_site: Site) -> None:
    path, rollouts = "/v1/rollouts/taxi/verdict", open_site.rollouts("taxi")
    folder = open_site.root / "taxi" / ".rollout"
    rollouts.start(2, RolloutSettings(stages="50,100", min_requests=100, dry_run=()), why="")
    assert open_site.send(path)[1]["verdict"] == "inconclusive"
    open_site.send("/v1/rollouts/taxi/promote", {})

    def counted(requests: int, bad: int = 0) -> dict[str, Any]:
        counts = {
            0: {
                1: VersionCounts(requests=requests),
                2: VersionCounts(requests=requests, bad=bad),
            }
        }
        write_counts(folder, counts, {}, rollout=1, server="one")
        status, found = open_site.send(path)
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
    assert open_site.send(path, {"name": "taxi", "phase": "Progressing"})[0] == 200
    assert open_site.send(f"{path}?expect=fail", {})[0] == 412

    bad = counted(1_000, bad=100)
    assert bad["verdict"] == "fail"
    assert bad["reason"].startswith("bad_answers: candidate 100, baseline 0")
    assert bad["gates"][0]["gate"] == "bad_answers"
    assert open_site.send(path, {})[0] == 412
    assert open_site.send(f"{path}?expect=fail", {})[0] == 200
    assert open_site.send(f"{path}?version=1")[1]["verdict"] == "pass"
    assert open_site.send(f"{path}?version=5")[1]["verdict"] == "inconclusive"
    assert open_site.send(f"{path}?expect=maybe")[0] == 400

    rollouts.roll_back(to=None, why="page 17")
    assert open_site.send(path)[1]["reason"] == "rolled back: page 17"
    assert open_site.send(f"{path}?version=2")[1]["verdict"] == "fail"
    assert rollouts.status().state.phase is Phase.ROLLED_BACK


def web_measurement(site: Site, metric: Any, args: list[Any], *, key: str = "") -> str:
    """What Argo Rollouts makes of one measurement of the provider `web`.

    Source: argoproj/argo-rollouts, docs/analysis/web.md and `evaluateResult` in utils/evaluate.
    """
    web = metric["provider"]["web"]
    url = str(web["url"])
    for each in args:
        url = url.replace(f"{{{{args.{each['name']}}}}}", each["value"])
    address, _, path = url.removeprefix("http://").partition("/")
    assert address == f"127.0.0.1:{site.port}"
    status, content = site.send(f"/{path}", key=key)
    if status != 200:
        return "Error"
    (field,) = re.fullmatch(r"\{\$\.(\w+)\}", web["jsonPath"]).groups()  # type: ignore[union-attr]  # it matches, or the test fails

    def holds(condition: str) -> bool:
        found = re.fullmatch(r'result (==|!=) "(\w+)"', condition)
        assert found is not None
        return (content[field] == found[2]) is (found[1] == "==")

    if holds(metric["failureCondition"]):
        return "Failed"
    return "Successful" if holds(metric["successCondition"]) else "Inconclusive"


def hook_status(site: Site, hook: Any) -> int:
    """The status of the POST that Flagger sends to a webhook.

    Source: fluxcd/flagger, docs/gitbook/usage/webhooks.md.
    """
    address, _, path = hook["url"].removeprefix("http://").partition("/")
    assert address == f"127.0.0.1:{site.port}"
    payload = {
        "name": "taxi",
        "namespace": "test",
        "phase": "Progressing",
        "checksum": "85d557f47b",
    }
    return site.send(f"/{path}", payload, key="")[0]


def test_argo_and_flagger_get_each_verdict_by_the_requests_of_the_exported_objects(
    open_site: Site, guarded: Site
) -> None:
    rollouts = open_site.rollouts("other")
    options = ExportOptions(server=f"http://127.0.0.1:{open_site.port}")
    settings = RolloutSettings(stages="50,100", min_requests=100)

    def exported(to: Format, where: ExportOptions = options) -> list[Any]:
        split = ExportedSplit(model="other", state=rollouts.status().state)
        return list(yaml.safe_load_all(export_text(split, to, where)))

    def seen(*templates: Any) -> list[str]:
        return [
            web_measurement(open_site, each["spec"]["metrics"][0], each["spec"]["args"])
            for each in templates
        ]

    rollouts.start(2, settings, why="")
    background, step = exported(Format.ARGO)
    (canary,) = exported(Format.FLAGGER)
    hooks = {each["type"]: each for each in canary["spec"]["analysis"]["webhooks"]}

    def statuses() -> list[int]:
        return [hook_status(open_site, hook) for hook in hooks.values()]

    assert list(hooks) == ["confirm-traffic-increase", "confirm-promotion", "rollback"]
    assert seen(background, step) == ["Successful", "Inconclusive"]
    assert statuses() == [412, 412, 412]

    rollouts.apply(lambda now: advance(now, now_s=time.time()), what="promote", why="")
    for bad, measured, answered in (
        (0, ["Successful", "Successful"], [200, 200, 412]),
        (200, ["Failed", "Failed"], [412, 412, 200]),
    ):
        counts = {0: {1: VersionCounts(requests=1_000), 2: VersionCounts(requests=1_000, bad=bad)}}
        write_counts(open_site.root / "other" / FOLDER, counts, {}, rollout=1, server="one")
        assert seen(background, step) == measured
        assert statuses() == answered

    # A rollback of this version does not fail the analysis of a later one, nor roll it back.
    rollouts.roll_back(to=None, why="")
    assert seen(background, step) == ["Failed", "Failed"]
    later = [
        {**arg, "value": "3"} if arg["name"] == "version" else arg for arg in step["spec"]["args"]
    ]
    assert web_measurement(open_site, step["spec"]["metrics"][0], later) == "Inconclusive"

    # A server with keys: Argo sends one, Flagger cannot.
    locked = ExportOptions(server=f"http://127.0.0.1:{guarded.port}")
    (keyed, _), (canary,) = exported(Format.ARGO, locked), exported(Format.FLAGGER, locked)
    metric, args = keyed["spec"]["metrics"][0], keyed["spec"]["args"]
    guarded.rollouts("other").start(2, settings, why="")
    assert web_measurement(guarded, metric, args) == "Error"
    assert web_measurement(guarded, metric, args, key=PREDICT) == "Successful"
    assert hook_status(guarded, canary["spec"]["analysis"]["webhooks"][0]) == 401


def test_no_verdict_passes_an_arm_of_an_ab_test_and_a_damaged_state_hides_no_other_model(
    open_site: Site,
) -> None:
    test = ABTestSettings(arms=((1, 0.6), (2, 0.4)), baseline=1, salt="00" * 16)
    rollouts = open_site.rollouts("taxi")
    ABTests(rollouts).start(test, RolloutSettings(key="x-user"), why="")

    for version in ("", "?version=1", "?version=2"):
        status, found = open_site.send(f"/v1/rollouts/taxi/verdict{version}")
        assert (status, found["verdict"], found["stage"]) == (200, "inconclusive", "")
        assert "an A/B test is under way" in found["reason"]
    lines = open_site.send("/monitoring/prometheus/metrics")[1].splitlines()
    share = 'stoker_rollout_traffic_share{model_name="taxi",version='
    assert [line for line in lines if line.startswith(share)] == [
        f'{share}"1"}} 0.6',
        f'{share}"2"}} 0.4',
    ]

    folder = open_site.root / "other" / FOLDER
    folder.mkdir(exist_ok=True)
    (folder / "00000099.json").write_text("{")
    other, taxi = open_site.send("/v1/rollouts")[1]["rollouts"]
    (folder / "00000099.json").unlink()
    ended = open_site.send("/v1/rollouts/taxi/promote", {"version": 2, "why": "higher"})[1]
    assert (ended["phase"], ended["candidate"]) == ("completed", 2)
    assert (other["model"], "00000099.json is damaged" in other["error"]) == ("other", True)
    assert taxi["phase"] == "A/B test"
