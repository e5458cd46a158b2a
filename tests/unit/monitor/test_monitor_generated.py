"""Generated files: edits are never lost silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from stoker.core.errors import ConfigError
from stoker.monitor.generated import is_edited, write_generated
from stoker.monitor.rules.groups import rules_spec, rules_text
from stoker.monitor.rules.rule import scaled, scaled_duration
from stoker.monitor.settings import RuleSettings, Slo


def test_a_file_that_was_not_edited_is_replaced(tmp_path: Path) -> None:
    for text in ("a: 1\n", "a: 2\n"):
        write_generated(tmp_path, {"rules.yml": text, "board.json": text}, fix="")

    assert yaml.safe_load((tmp_path / "rules.yml").read_text()) == {"a": 2}
    assert (tmp_path / "board.json").read_text() == "a: 2\n"
    assert not is_edited(tmp_path / "rules.yml")


@pytest.mark.parametrize("name", ["rules.yml", "board.json"])
def test_an_edited_file_stops_everything_and_is_named(name: str, tmp_path: Path) -> None:
    texts = {"first.yml": "a: 1\n", "rules.yml": "a: 1\n", "board.json": "{}\n"}
    write_generated(tmp_path, texts, fix="")
    edited = tmp_path / name
    edited.write_text(edited.read_text() + "# mine\n")
    before = edited.read_text()

    with pytest.raises(ConfigError, match=rf"edited: \S+/{name}\. Move it\."):
        write_generated(tmp_path, texts | {"first.yml": "a: 2\n"}, fix="Move it.")

    assert edited.read_text() == before
    assert "a: 1" in (tmp_path / "first.yml").read_text()


def test_a_file_that_stoker_did_not_write_counts_as_edited(tmp_path: Path) -> None:
    (tmp_path / "rules.yml").write_text("groups: []\n")
    (tmp_path / "board.json").write_bytes(b"\xff")

    assert is_edited(tmp_path / "rules.yml")
    assert is_edited(tmp_path / "board.json")


@pytest.mark.parametrize(
    ("duration", "scale", "short"),
    [
        ("5m", 60, "5s"),
        ("3d", 60, "1h12m"),
        ("3d", 1, "3d"),
        ("5m", 7, "42s857ms"),
        ("1m", 60, "1s"),
    ],
)
def test_durations_by_a_scale(duration: str, scale: float, short: str) -> None:
    assert scaled_duration(duration, scale) == short


def test_every_window_of_an_expression_is_scaled() -> None:
    expr = "rate(a[5m]) + b offset 1h + max_over_time(c[1h:1m]) > duration(30m)"

    assert scaled(expr, 60.0) == "rate(a[5s]) + b offset 1m + max_over_time(c[1m:1s]) > 30"
    assert scaled(expr, 1.0) == expr.replace("duration(30m)", "1800")


def test_the_same_settings_give_the_same_text_and_others_another() -> None:
    assert rules_text(RuleSettings()) == rules_text(RuleSettings())
    other = RuleSettings(slo=Slo(availability=99.0, p99_ms=200.0))
    assert rules_text(other) != rules_text(RuleSettings())


def test_the_objective_is_in_the_rules() -> None:
    found = rules_spec(RuleSettings(slo=Slo(availability=99.0, p99_ms=200.0)))
    rules = {rule.get("alert", rule.get("record")): rule for rule in found["groups"][3]["rules"]}

    assert "> 0.01 " in rules["StokerErrorBudgetBurnSlow"]["expr"]
    assert 'le=~"121440([.]0)?"' in rules["model:stoker_request_slow:ratio_rate5m"]["expr"]
    assert 'le=~"218591([.]0)?"' in rules["model:stoker_request_slow:ratio_rate5m"]["expr"]


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"availability": 100.0}, "slo.availability must be at least 50 and below 100"),
        ({"availability": 0.999}, "slo.availability must be at least 50 and below 100"),
        ({"p99_ms": 0.0}, "slo.p99_ms must be from 0.1"),
        ({"p99_ms": float("nan")}, "slo.p99_ms must be from 0.1"),
    ],
)
def test_an_objective_that_cannot_be_kept_is_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        Slo(**settings)


@pytest.mark.parametrize("scale", [0.5, 61.0, float("nan")])
def test_a_time_scale_beyond_its_limits_is_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="the time scale must be from 1 to 60"):
        RuleSettings(time_scale=scale)
