"""Rules and dashboards read only metrics of the catalogue, and the tests' expositions are of these metrics."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from stoker.monitor.dashboards import dashboard_texts
from stoker.monitor.rules.groups import all_groups
from stoker.monitor.settings import RuleSettings
from stoker.telemetry.catalogue.all import METRICS

WRITTEN = Path(__file__).resolve().parents[2] / "data" / "monitor"

_NAME = re.compile(r"(?<![\w:\"$.])(?:stoker_|:tensorflow:|process_)[\w:]+")
_SUFFIX = re.compile(r"_(bucket|sum|count)$")


def expressions() -> Iterator[str]:
    for group in all_groups(RuleSettings()):
        yield from (rule.expr for rule in group.recordings)
        yield from (rule.expr for rule in group.alerts)
    for text in dashboard_texts().values():
        board = json.loads(text)
        for panel in board["panels"]:
            yield from (target["expr"] for target in panel.get("targets", ()))
        yield from (found["query"]["query"] for found in board["templating"]["list"][1:])


def read_names() -> set[str]:
    """Names of the metrics that rules and dashboards read, without those that rules record."""
    return {name for expr in expressions() for name in _NAME.findall(expr)}


def test_only_metrics_of_the_catalogue_are_read() -> None:
    known = {metric.name for metric in METRICS}

    assert {name for name in read_names() if not {name, _SUFFIX.sub("", name)} & known} == set()


def test_every_metric_that_is_read_is_in_an_exposition_of_the_tests() -> None:
    written = {
        line.partition("{")[0]
        for path in WRITTEN.glob("*.txt")
        for line in path.read_text("utf-8").splitlines()
        if not line.startswith("#")
    }

    assert read_names() - written == {":tensorflow:serving:batching_session:padding_size_sum"}
