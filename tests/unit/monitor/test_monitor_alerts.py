"""Every alert fires on its fault and not on a healthy machine, by `promtool test rules`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.prometheus_programs import program
from tests.unit.monitor.alert_cases import (
    ALMOST,
    FAULTS,
    HEALTH,
    QUEUED,
    VERSION,
    Case,
    flat,
    latency,
    requests,
    rising,
)
from tests.unit.monitor.noisy_health import MINUTES, NOISY

from stoker.core.config import build
from stoker.core.errors import ConfigError
from stoker.monitor.rules.groups import all_alerts, rules_text
from stoker.monitor.settings import ModelSlo, RuleSettings, Slo

SETTINGS = RuleSettings()


def checked(folder: Path, tests: list[dict[str, Any]], settings: RuleSettings = SETTINGS) -> str:
    """What promtool says of the tests; empty if they pass."""
    (folder / "rules.yml").write_text(rules_text(settings))
    content = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": tests[0]["interval"],
        "tests": tests,
    }
    file = folder / "test.yml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    done = subprocess.run([program("promtool"), "test", "rules", file], capture_output=True)
    return "" if done.returncode == 0 else (done.stdout + done.stderr).decode()


@pytest.mark.parametrize("case", [*HEALTH, *FAULTS, *ALMOST], ids=lambda case: case.name)
def test_alerts_of_a_case(case: Case, tmp_path: Path) -> None:
    assert checked(tmp_path, [case.as_test()]) == ""


def test_no_alert_fires_in_healthy_hours_with_noise(tmp_path: Path) -> None:
    test = Case(name="noise", changed=NOISY, fires={}, minutes=MINUTES).as_test()
    firing = f'ALERTS{{alertstate="firing",alertname!="Watchdog"}}[{MINUTES}m]'
    test["promql_expr_test"] = [
        {"expr": f"count by (alertname) (count_over_time({firing}))", "eval_time": f"{MINUTES}m"}
    ]

    assert checked(tmp_path, [test]) == ""


def test_a_case_that_expects_something_else_fails(tmp_path: Path) -> None:
    wrong = Case(name="wrong", changed={}, fires={"10m": {"StokerGpuHot"}})

    assert "StokerGpuHot" in checked(tmp_path, [wrong.as_test()])


def test_each_alert_has_a_fault() -> None:
    fired = {name for case in FAULTS for names in case.fires.values() for name in names}

    assert fired == {alert.name for alert in all_alerts(SETTINGS)} - {"Watchdog"}


STRICT, LOOSE = ModelSlo(availability=99.99, p99_ms=60.0), ModelSlo(availability=90.0, p99_ms=120.0)
FAILING = requests(600, INTERNAL=1.2)
"""0.2 %: with two of a thousand no page by the default objective, and 20 times the budget of the strict one."""


@pytest.mark.parametrize(
    ("models", "changed", "fires"),
    [
        ({"taxi": STRICT}, FAILING, {"StokerErrorBudgetBurn"}),
        ({"taxi-2": STRICT, "taxi.": STRICT, "bus": LOOSE}, FAILING, set()),
        ({"taxi": ModelSlo(p99_ms=120.0), "bus": STRICT}, FAILING, set()),
        ({"taxi": LOOSE}, requests(600, INTERNAL=50) | latency(slow_share=0.2), set()),
        ({"bus": LOOSE}, latency(slow_share=0.2), {"StokerLatencyBudgetBurn"}),
        (
            {"taxi": ModelSlo(availability=99.0)},
            latency(slow_share=0.2),
            {"StokerLatencyBudgetBurn"},
        ),
        ({"taxi": LOOSE}, {QUEUED: flat(1.2)}, set()),
        ({"bus": LOOSE}, {QUEUED: flat(1.2)}, {"StokerQueueGrowing"}),
    ],
    ids=[
        *("errors, its own", "errors, others'", "errors, its own is of latency"),
        *("its own allow more", "latency, others'", "latency, its own is of errors"),
        *("queue, its own", "queue, others'"),
    ],
)
def test_a_model_with_objectives_of_its_own_is_held_to_them_and_no_other_is(
    models: dict[str, ModelSlo], changed: dict[str, str], fires: set[str], tmp_path: Path
) -> None:
    case = Case(name="models", changed=changed, fires={"15m": fires})
    settings = RuleSettings(slo=Slo(models=models))

    assert checked(tmp_path, [case.as_test()], settings) == ""


@pytest.mark.parametrize("stored", ["121440", "121440.0"])
def test_buckets_are_found_as_prometheus_2_and_3_store_their_bounds(
    stored: str, tmp_path: Path
) -> None:
    """121440 us is the bound above 100 ms."""
    changed = {
        name.replace('le="121440"', f'le="{stored}"'): values
        for name, values in latency(slow_share=0.0).items()
    }
    slow = {f"stoker_request_latency_count{{{VERSION}}}": rising(800)}
    case = Case(name="bounds", changed=changed | slow, fires={"15m": {"StokerLatencyBudgetBurn"}})
    settings = RuleSettings(slo=Slo(p99_ms=100.0))
    test = case.as_test()
    if stored != "121440":
        test["input_series"] = [
            each for each in test["input_series"] if 'le="121440"' not in each["series"]
        ]

    assert checked(tmp_path, [test], settings) == ""


def test_rules_of_many_models_are_not_duplicates_of_each_other(tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(6)] + ["a.b+c (1)"]
    objectives = [
        LOOSE,
        STRICT,
        ModelSlo(p99_ms=60.0),
        LOOSE,
        ModelSlo(),
        ModelSlo(p99_ms=50.0),
        STRICT,
    ]
    file = tmp_path / "rules.yml"
    file.write_text(
        rules_text(RuleSettings(slo=Slo(models=dict(zip(names, objectives, strict=True)))))
    )
    done = subprocess.run(
        [program("promtool"), "check", "rules", "--lint-fatal", file],
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "duplicate" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"models": {"taxi": {"p99_ms": 0}}}, "slo.models.taxi.p99_ms must be from 0.1 to 600000"),
        (
            {"models": {"taxi": {"availability": 100}}},
            "slo.models.taxi.availability must be at least",
        ),
        ({"models": {"taxi": {"p95_ms": 1}}}, "slo.models.taxi.p95_ms is not a setting"),
        ({"models": {"../taxi": {}}}, "the name of a model in slo.models must be one plain"),
        ({"models": {"taxi": 99.9}}, "slo.models.taxi must be a section"),
    ],
)
def test_objectives_that_cannot_be_are_one_line(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        build(Slo, wrong, where="slo")


def test_the_text_of_an_alert(tmp_path: Path) -> None:
    (case,) = (found for found in FAULTS if found.name == "StokerInputBound")
    (alert,) = (found for found in all_alerts(SETTINGS) if found.name == "StokerInputBound")
    expected = {
        "exp_labels": {"severity": "ticket", "run": "r1"},
        "exp_annotations": {
            "summary": "Run r1 waits for input 50% of the time",
            "description": alert.description,
            "runbook_url": "https://github.com/stoker/stoker/blob/main/docs/how-to/runbooks.md#stokerinputbound",
        },
    }
    test = case.as_test() | {
        "alert_rule_test": [
            {"alertname": alert.name, "eval_time": "40m", "exp_alerts": [expected]},
            {
                "alertname": "Watchdog",
                "eval_time": "0m",
                "exp_alerts": [
                    {
                        "exp_labels": {"severity": "none"},
                        "exp_annotations": all_alerts(SETTINGS)[0].as_dict(1.0)["annotations"],
                    }
                ],
            },
        ]
    }

    assert checked(tmp_path, [test]) == ""


def test_an_alert_fires_on_for_as_long_as_it_says(tmp_path: Path) -> None:
    case = Case(
        name="hot for ten minutes",
        changed={next(name for name in FAULTS[3].changed): "90+0x10 70+0x{n}"},
        fires={"10m": {"StokerGpuHot"}, "14m": {"StokerGpuHot"}, "17m": set()},
    )

    assert checked(tmp_path, [case.as_test()]) == ""


def test_every_rule_file_is_one_for_promtool(tmp_path: Path) -> None:
    for scale in (1.0, 7.0, 60.0):
        file = tmp_path / f"{scale}.yml"
        file.write_text(rules_text(RuleSettings(time_scale=scale)))
        subprocess.run([program("promtool"), "check", "rules", file], check=True)


def test_each_alert_has_a_runbook() -> None:
    page = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "runbooks.md"
    headings = set(re.findall(r"^## (\w+)$", page.read_text("utf-8"), re.MULTILINE))

    assert headings == {alert.name for alert in all_alerts(SETTINGS)}
