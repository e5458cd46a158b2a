"""What a split becomes for other programs, against their own schemas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.custom_resources import definition, validate

from stoker.core.errors import ConfigError, UserError
from stoker.rollout.export.backends import Backend, parse_backends, parse_place
from stoker.rollout.export.formats import Format, KserveMode, check_applies
from stoker.rollout.export.split import ExportedSplit, whole_weights
from stoker.rollout.export.tf_serving import labels_of, model_server_config
from stoker.rollout.export.write import ExportOptions, export_text
from stoker.rollout.state.ab_settings import ABTestSettings
from stoker.rollout.state.changes import begin_test
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import Phase, RolloutState

NOW_S = 1_000_000.0
STORAGE = ExportOptions(storage="gs://models/{model}-v{version}")


def split(
    stages: str = "10,50,100",
    *,
    stage: int = 0,
    phase: Phase = Phase.RUNNING,
    key: str = "",
    model: str = "taxi",
) -> ExportedSplit:
    state = RolloutState(
        rollout=2,
        baseline=1,
        candidate=7,
        settings=RolloutSettings(stages=stages, key=key),
        began_s=NOW_S,
        phase=phase,
        stage=stage,
    )
    return ExportedSplit(model=model, state=state)


def exported(what: ExportedSplit, to: Format, options: ExportOptions | None = None) -> Any:
    return yaml.safe_load(export_text(what, to, options or ExportOptions()))


def weights(route: Any) -> list[dict[str, int]]:
    """Of each rule of an HTTPRoute: Service -> weight."""
    return [
        {each["name"]: each["weight"] for each in rule["backendRefs"]}
        for rule in route["spec"]["rules"]
    ]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4).filter(lambda many: sum(many) > 1e-3))
def test_whole_weights_add_up_and_are_the_shares(parts: list[float]) -> None:
    shares = {version: part / sum(parts) for version, part in enumerate(parts)}
    whole = whole_weights(shares)
    total = sum(whole.values())

    assert total in (100, 1_000, 10_000, 100_000, 1_000_000)
    for version, share in shares.items():
        assert abs(whole[version] / total - share) <= 4e-6
        assert (whole[version] > 0) == (share > 0)


def test_weights_are_as_readable_as_the_shares_allow() -> None:
    assert whole_weights({1: 0.9, 7: 0.1}) == {1: 90, 7: 10}
    assert whole_weights({1: 0.999, 7: 0.001}) == {1: 999, 7: 1}
    assert whole_weights({1: 0.99875, 7: 0.00125}) == {1: 99_875, 7: 125}


@pytest.mark.parametrize(
    ("phase", "stage", "expected"),
    [
        (Phase.MEASURING, 0, {"taxi-v1": 100, "taxi-v7": 0}),
        (Phase.RUNNING, 0, {"taxi-v1": 90, "taxi-v7": 10}),
        (Phase.PAUSED, 1, {"taxi-v1": 50, "taxi-v7": 50}),
        (Phase.BAKING, 2, {"taxi-v1": 0, "taxi-v7": 100}),
        # The other version's Service may be gone.
        (Phase.COMPLETED, 2, {"taxi-v7": 100}),
        (Phase.ROLLED_BACK, 1, {"taxi-v1": 100}),
    ],
)
def test_the_weights_are_those_of_the_moment(
    phase: Phase, stage: int, expected: dict[str, int]
) -> None:
    assert weights(exported(split(stage=stage, phase=phase), Format.HTTPROUTE)) == [expected]


def test_an_http_route_is_what_the_gateway_api_takes(shared_data: Path) -> None:
    found = definition(shared_data / "crds", "HTTPRoute")
    options = ExportOptions(gateway="infra/public", hostname="taxi.example.com")
    for what in (
        split(),
        split("header=x-canary,10,100"),
        split(key="x-user"),
        split(key="cookie:uid"),
        split(phase=Phase.COMPLETED),
    ):
        route = exported(what, Format.HTTPROUTE, options)
        validate(route, found)
        assert route["spec"]["parentRefs"] == [{"name": "public", "namespace": "infra"}]

    # The check sees a misspelled field, and a weight that is not a whole number.
    backend = route["spec"]["rules"][0]["backendRefs"][0]
    for wrong in ({"wieght": 1}, {"weight": 0.5}):
        route["spec"]["rules"][0]["backendRefs"][0] = backend | wrong
        with pytest.raises(jsonschema.ValidationError):
            validate(route, found)


def test_a_stage_of_a_header_is_a_match_of_that_header() -> None:
    what = split("header=X-Canary,10,100")
    first, last = exported(what, Format.HTTPROUTE)["spec"]["rules"]

    assert first["matches"][0]["headers"] == [
        {"type": "RegularExpression", "name": "x-canary", "value": ".+"}
    ]
    assert [each["name"] for each in first["backendRefs"]] == ["taxi-v7"]
    assert "headers" not in last["matches"][0]
    assert [each["name"] for each in last["backendRefs"]] == ["taxi-v1"]
    # The same stage, over: the header means nothing any more.
    after = split("header=X-Canary,10,100", phase=Phase.ROLLED_BACK)
    assert weights(exported(after, Format.HTTPROUTE)) == [{"taxi-v1": 100}]


def test_requests_without_the_key_go_to_the_baseline() -> None:
    text = export_text(split(key="cookie:uid"), Format.HTTPROUTE, ExportOptions())
    first, last = weights(yaml.safe_load(text))

    assert first == {"taxi-v1": 90, "taxi-v7": 10}
    assert last == {"taxi-v1": 100}
    assert "may go to different versions" in text


def test_an_ab_test_keeps_a_user_with_a_version_and_all_arms_loaded() -> None:
    test = ABTestSettings(arms=((1, 0.5), (7, 0.3), (9, 0.2)), baseline=1, salt="00" * 16)
    settings = RolloutSettings(key="X-User")
    what = ExportedSplit(model="taxi", state=begin_test(None, test, settings=settings, now_s=NOW_S))

    routes = exported(what, Format.ENVOY_ROUTES)["resources"][0]["virtual_hosts"][0]["routes"]
    with_key, without = [route["route"] for route in routes]
    assert with_key["hash_policy"] == [{"header": {"header_name": "x-user"}}]
    assert [each["weight"] for each in with_key["weighted_clusters"]["clusters"]] == [50, 30, 20]
    assert without["weighted_clusters"]["clusters"] == [{"name": "taxi-v1", "weight": 100}]
    (entry,) = model_server_config(what, base_path="/m", now_s=NOW_S).model_config_list.config
    assert list(entry.model_version_policy.specific.versions) == [1, 7, 9]


def test_an_inference_service_is_what_kserve_takes(shared_data: Path) -> None:
    found = definition(shared_data / "crds", "InferenceService")
    for phase in (Phase.MEASURING, Phase.RUNNING, Phase.COMPLETED, Phase.ROLLED_BACK):
        for mode in KserveMode:
            options = replace(STORAGE, kserve_mode=mode)
            validate(exported(split(phase=phase), Format.KSERVE, options), found)


def test_kserve_in_standard_mode_has_a_canary_and_keeps_its_pods_at_promotion() -> None:
    during = exported(split(), Format.KSERVE, STORAGE)
    after = exported(split(phase=Phase.COMPLETED, stage=2), Format.KSERVE, STORAGE)

    def predictor(version: int, **container: str) -> dict[str, Any]:
        model = {
            **container,
            "modelFormat": {"name": "tensorflow"},
            "storageUri": f"gs://models/taxi-v{version}",
        }
        return {"name": f"v{version}", "model": model}

    mode = during["metadata"]["annotations"]["serving.kserve.io/deploymentMode"]
    assert mode == "Standard"
    assert during["spec"] == {
        "predictor": predictor(1),
        "canary": [{"trafficPercent": 10, "predictor": predictor(7, name="")}],
    }
    assert after["spec"] == {"predictor": predictor(7)}


def test_kserve_with_knative_has_the_percentage_of_its_newest_revision() -> None:
    options = replace(STORAGE, kserve_mode=KserveMode.KNATIVE)

    def predictor(what: ExportedSplit) -> Any:
        return exported(what, Format.KSERVE, options)["spec"]["predictor"]

    during = predictor(split())
    assert during["canaryTrafficPercent"] == 10
    assert during["model"]["storageUri"] == "gs://models/taxi-v7"
    back = predictor(split(phase=Phase.ROLLED_BACK))
    assert "canaryTrafficPercent" not in back
    assert back["model"]["storageUri"] == "gs://models/taxi-v1"
    assert "canaryTrafficPercent" not in predictor(split(phase=Phase.COMPLETED, stage=2))


def test_what_kserve_cannot_split_is_refused() -> None:
    for what, rule in (
        (split("0.5,100"), "whole percentages"),
        (split("header=x-canary,100"), "not by headers"),
    ):
        with pytest.raises(UserError, match=rule):
            export_text(what, Format.KSERVE, STORAGE)
    with pytest.raises(ConfigError, match="--storage must be"):
        export_text(split(), Format.KSERVE, ExportOptions(storage="gs://models/taxi"))


def test_argo_asks_for_the_verdict(shared_data: Path) -> None:
    text = export_text(split(model="taxi tips"), Format.ARGO, ExportOptions())
    background, step = yaml.safe_load_all(text)
    found = definition(shared_data / "crds", "AnalysisTemplate")
    path = "/v1/rollouts/taxi%20tips/verdict?version={{args.version}}"

    for template in (background, step):
        validate(template, found)
        assert template["spec"]["args"] == [
            {"name": "server", "value": "http://taxi-tips:8501"},
            {"name": "version", "value": "7"},
        ]
        (metric,) = template["spec"]["metrics"]
        assert metric["provider"]["web"]["url"] == "{{args.server}}" + path
        assert metric["provider"]["web"]["jsonPath"] == "{$.verdict}"
        assert metric["failureCondition"] == 'result == "fail"'
        assert metric["failureLimit"] == 0

    # Too few answers neither abort the Rollout nor advance it to its next step.
    assert background["spec"]["metrics"][0]["successCondition"] == 'result != "fail"'
    assert step["spec"]["metrics"][0]["successCondition"] == 'result == "pass"'
    assert step["spec"]["metrics"][0]["consecutiveSuccessLimit"] == 1


def test_flagger_goes_on_when_gates_pass_and_back_when_one_fails(shared_data: Path) -> None:
    options = ExportOptions(server="https://taxi.example.com/", gateway="infra/public")
    canary = exported(split("header=x,0.2,10,pause,50,100"), Format.FLAGGER, options)
    hooks = {each["type"]: each["url"] for each in canary["spec"]["analysis"]["webhooks"]}

    validate(canary, definition(shared_data / "crds", "Canary"))
    assert canary["spec"]["analysis"]["stepWeights"] == [1, 10, 50]
    assert canary["spec"]["analysis"]["interval"] == "300s"
    passes = "https://taxi.example.com/v1/rollouts/taxi/verdict?version=7&expect=pass"
    assert hooks == {
        "confirm-traffic-increase": passes,
        "confirm-promotion": passes,
        "rollback": passes.replace("=pass", "=fail"),
    }


@pytest.mark.parametrize("server", ["taxi:8501", 'http://a"b', "http://a\nb", "http://{{x}}"])
def test_the_url_of_a_server_must_be_one(server: str) -> None:
    with pytest.raises(ConfigError, match="--server must be the URL"):
        export_text(split(), Format.ARGO, ExportOptions(server=server))


@pytest.mark.parametrize(
    ("phase", "labels", "versions"),
    [
        (Phase.MEASURING, {"stable": 1, "canary": 7}, [1, 7]),
        (Phase.RUNNING, {"stable": 1, "canary": 7}, [1, 7]),
        (Phase.BAKING, {"stable": 7, "canary": 7}, [1, 7]),
        (Phase.COMPLETED, {"stable": 7, "canary": 7}, [1, 7]),
        (Phase.ROLLED_BACK, {"stable": 1, "canary": 1}, [1]),
    ],
)
def test_both_labels_always_name_a_version_that_is_loaded(
    phase: Phase, labels: dict[str, int], versions: list[int]
) -> None:
    what = split(phase=phase)
    (entry,) = model_server_config(
        what, base_path="/models/taxi", now_s=NOW_S
    ).model_config_list.config

    assert dict(entry.version_labels) == labels == labels_of(what)
    assert list(entry.model_version_policy.specific.versions) == versions


def test_the_version_to_go_back_to_is_unloaded_in_time() -> None:
    what = split(phase=Phase.COMPLETED)
    late_s = NOW_S + what.state.settings.keep_previous_s
    (entry,) = model_server_config(what, base_path="/m", now_s=late_s).model_config_list.config
    assert list(entry.model_version_policy.specific.versions) == [7]


def test_other_models_of_a_server_are_kept_with_all_that_they_have(tmp_path: Path) -> None:
    from stoker.serve.servables.model_config import read_model_config

    before = tmp_path / "models.config"
    before.write_text(
        'model_config_list { config { name: "fares" base_path: "/srv/fares" logging_config '
        '{ log_collector_config { type: "file" filename_prefix: "/tmp/log" } } } '
        'config { name: "taxi" base_path: "/srv/old" version_labels { key: "eu" value: 3 } } }'
    )
    options = ExportOptions(base_path="/srv/taxi", config=before)
    (tmp_path / "after.config").write_text(export_text(split(), Format.TF_SERVING, options))
    fares, taxi = read_model_config(tmp_path / "after.config")

    assert fares.request_log is not None
    assert (taxi.base, dict(taxi.labels)) == (
        Path("/srv/taxi"),
        {"eu": 3, "stable": 1, "canary": 7},
    )
    assert taxi.policy.versions == (1, 7)
    before.write_text("model_config_list { nonsense: 1 }")
    with pytest.raises(ConfigError, match="--config must be a model_config_file"):
        export_text(split(), Format.TF_SERVING, options)


@pytest.mark.parametrize("text", ["taxi:8501", "x=a:1", "7=", "7=a:0", "7=a:70000", "7=a b:1", "7"])
def test_a_backend_must_be_a_version_and_a_place(text: str) -> None:
    with pytest.raises(ConfigError, match="--backend must"):
        parse_backends([text])


def test_backends_are_hosts_with_ports() -> None:
    assert parse_backends(["1=a", "7=[::1]:80"]) == {
        1: Backend(host="a", port=8501),
        7: Backend(host="::1", port=80),
    }
    assert parse_place("[::1]", flag="--listen") == Backend(host="::1", port=8501)
    with pytest.raises(ConfigError, match="once for each version"):
        parse_backends(["1=a", "1=b"])


def test_an_option_without_effect_is_refused() -> None:
    check_applies(Format.ENVOY, ["backend", "listen"])
    with pytest.raises(ConfigError, match="--storage is for --to kserve"):
        check_applies(Format.ENVOY, ["storage"])


@pytest.mark.parametrize("to", list(Format))
def test_no_name_of_a_model_breaks_a_file(to: Format) -> None:
    """Names may hold what YAML, JSON and templates give a meaning to."""
    name = "a: $b{{c}} # 'é"
    text = export_text(split(model=name), to, replace(STORAGE, base_path="/m"))
    if to is Format.TF_SERVING:
        assert json.dumps("a: $b{{c}} # ")[1:-1] in text
        return
    for content in yaml.safe_load_all(text):
        name = content.get("metadata", {}).get("name", "a-b-c-e")
        assert name.startswith("a-b-c-e")
