"""The catalogue of metrics: what is listed is written, and nothing else is."""

from __future__ import annotations

import ast
import functools
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from stoker.telemetry import catalogue
from stoker.telemetry.catalogue.all import METRICS
from stoker.telemetry.catalogue.metric import Kind, Metric

SOURCE = Path(__file__).resolve().parents[3] / "src" / "stoker"
CATALOGUE = SOURCE / "telemetry" / "catalogue"
BASE_UNITS = {"seconds", "bytes", "ratio", "celsius", "watts", "hertz", "joules"}


def modules() -> Iterator[ModuleType]:
    """The files of the catalogue that have metrics of one writer."""
    for found in pkgutil.iter_modules(catalogue.__path__):
        module = importlib.import_module(f"{catalogue.__name__}.{found.name}")
        if found.name != "all" and hasattr(module, "METRICS"):
            yield module


@functools.cache
def source() -> tuple[tuple[Path, ast.Module], ...]:
    """Every file of the product outside the catalogue that has to do with metrics."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py"))}
    return tuple(
        (path, ast.parse(text))
        for path, text in texts.items()
        if CATALOGUE not in path.parents and "telemetry" in text
    )


def called(node: ast.Call) -> str:
    """The name of the function of a call."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def test_every_file_of_the_catalogue_is_part_of_all_and_each_name_is_there_once() -> None:
    parts = [metric for module in modules() for metric in module.METRICS]

    assert {metric.name for metric in parts} == {metric.name for metric in METRICS}
    names = [metric.name for metric in METRICS]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_units_and_labels_are_in_prometheus_form(metric: Metric) -> None:
    assert re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", metric.name)
    assert all(re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", label) for label in metric.labels)
    assert len(set(metric.labels)) == len(metric.labels)
    assert "le" not in metric.labels
    assert metric.help.endswith(".")
    assert "\n" not in metric.help
    if metric.name.startswith("stoker_") and metric.unit in BASE_UNITS:
        end = metric.name.removesuffix("_total").rpartition("_")[2]
        assert end in (metric.unit, "share", "second"), "the unit is the end of the name"
    if metric.name.endswith("_total"):
        assert metric.kind is Kind.COUNTER


def test_every_listed_metric_is_used_by_code_that_writes_it() -> None:
    """By the name of its constant: a metric that needs a GPU cannot be seen in a scrape here."""
    constants = {
        id(value): name
        for module in modules()
        for name, value in vars(module).items()
        if isinstance(value, Metric)
    }
    used = set()
    for _, tree in source():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Name):
                used.add(node.id)

    unwritten = [metric.name for metric in METRICS if constants.get(id(metric)) not in used]

    assert unwritten == []


def test_no_code_outside_the_catalogue_makes_a_metric_or_writes_one_by_a_name_of_its_own() -> None:
    found = []
    for path, tree in source():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            name, first = called(node), node.args[0] if node.args else None
            # f"{metric.name}_bucket" is a metric's own name.
            start = first.values[0] if isinstance(first, ast.JoinedStr) and first.values else first
            is_text = isinstance(start, ast.Constant)
            if name == "Metric" or (name in ("header", "sample", "family") and is_text):
                found.append(f"{path}:{node.lineno}: {name}")

    assert found == []
