"""The dashboards: as generated, valid for Grafana's own types, their links and variables."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from stoker.monitor.dashboards import dashboard_texts
from stoker.monitor.rules.groups import all_alerts
from stoker.monitor.settings import RuleSettings

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ROOT / ".tools" / "grafana"

OPTIONS = ("--noEmit", "--strict", "--skipLibCheck", "--module", "esnext", "--target", "esnext")

TYPES = """\
import type { Dashboard } from '@grafana/schema';
// JSON has the values of enumerations, not their names.
type Json<T> = T extends string ? `${T}` : T extends readonly (infer U)[] ? Json<U>[]
  : T extends object ? { [K in keyof T]: Json<T[K]> } : T;
export const board: Json<Dashboard> = """


def compiler() -> Path:
    """TypeScript, which `make test` installs where there is npm."""
    found = PACKAGES / "node_modules" / ".bin" / "tsc"
    if not found.exists() or shutil.which("node") is None:
        outcome = ROOT / ".tools" / "grafana.txt"
        why = outcome.read_text().strip() if outcome.is_file() else "`make test` installs it"
        if os.environ.get("CI") == "true" and why == "installed":
            pytest.fail("`make test` installed Grafana's schema, but it is not there")
        pytest.skip(f"no schema of Grafana: {why}")
    return found


def errors(boards: dict[str, str], folder: Path) -> list[str]:
    """What TypeScript says of dashboards by Grafana's types; name -> JSON."""
    tsc = compiler()
    (folder / "node_modules").symlink_to(PACKAGES / "node_modules")
    files = []
    for name, text in boards.items():
        files.append(f"{name.removesuffix('.json')}.ts")
        (folder / files[-1]).write_text(TYPES + text)
    options = [*OPTIONS, "--moduleResolution", "bundler"]
    done = subprocess.run([tsc, *options, *files], cwd=folder, capture_output=True, text=True)
    return [line for line in done.stdout.splitlines() if "error" in line]


def with_changed_panel(text: str, **changed: Any) -> str:
    board = json.loads(text)
    board["panels"][1] |= changed
    return json.dumps(board)


def test_grafanas_types_accept_the_dashboards_and_refuse_faults(tmp_path: Path) -> None:
    boards = dashboard_texts()
    assert len(boards) == 4
    good = boards["stoker-rollout.json"]
    faults = {
        "unknown-key.json": with_changed_panel(good, titel="x"),
        "wrong-type.json": with_changed_panel(good, title=7),
        "no-mode.json": with_changed_panel(
            good,
            fieldConfig={
                "defaults": {"thresholds": {"mode": "absolut", "steps": []}},
                "overrides": [],
            },
        ),
    }

    found = errors(boards | faults, tmp_path)

    named = {line.partition(".ts")[0] for line in found}
    assert named == {name.removesuffix(".json") for name in faults}, found


def test_the_dashboards_are_as_their_generator_writes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="needs the extra `grafana`")
    monkeypatch.syspath_prepend(ROOT / "packaging" / "dashboards")
    from make_dashboards import DASHBOARDS, text_of

    assert dashboard_texts() == {f"{each.uid}.json": text_of(each) for each in DASHBOARDS}


def test_links_lead_to_runbooks_of_alerts_and_to_the_other_dashboards() -> None:
    alerts = {alert.runbook for alert in all_alerts(RuleSettings())}
    for text in dashboard_texts().values():
        board = json.loads(text)
        linked = {link["url"] for panel in board["panels"] for link in panel.get("links", ())}
        assert linked
        assert linked <= alerts
        assert "stoker" in board["tags"]
        assert board["links"][0]["type"] == "dashboards"
        assert board["links"][0]["tags"] == ["stoker"]


def test_each_variable_is_used_and_each_used_variable_is_there() -> None:
    for text in dashboard_texts().values():
        names = {found["name"] for found in json.loads(text)["templating"]["list"]}
        used = set(re.findall(r"\$\{?(\w+)", text)) - {"__rate_interval"}
        assert used == names
