"""OpenMetrics of a server: valid, and with the names and numbers of the text for Prometheus."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as strict_parser

from stoker.rollout.metrics import RolloutMetrics
from stoker.serve.observability.metrics import ServeMetrics
from stoker.telemetry.catalogue.all import METRICS
from stoker.telemetry.catalogue.metric import Kind
from stoker.telemetry.exposition import family, header
from stoker.telemetry.openmetrics import END, as_openmetrics

HOSTILE = ['quote"', "back\\slash", "line\nbreak", 'le="5"', "ü" * 50, "x" * 1_000]


@pytest.fixture
def lines() -> list[str]:
    """The metrics of a server that got requests for models with such names."""
    metrics = ServeMetrics()
    for name in HOSTILE:
        metrics.request_count.add(3, model_name=name, status="OK")
        for took_us in (5.0, 20.0, 1e9, 1e15):
            metrics.request_latency.observe(
                took_us, model_name=name, API="Predict", entrypoint="REST"
            )
        metrics.prediction_skew.set(0.25, model_name=name, column=name)
    metrics.wrapped_run_count.add()
    metrics.processed_batch_size.of().observe(3.0)
    return [line for block in metrics.blocks() for line in block]


def parsed(text: str) -> Iterator[Any]:
    """The families of a text in OpenMetrics, by a parser that refuses what is not valid."""
    parse: Any = strict_parser.text_string_to_metric_families  # the library has no types for it
    yield from parse(text)


def numbers(families: Iterable[Any]) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Name and labels -> number; bounds as numbers, and without the `_total` that the text parser adds."""
    found = {}
    for one in families:
        for sample in one.samples:
            labels = dict(sample.labels)
            if "le" in labels:
                labels["le"] = str(float(labels["le"]))
            name = sample.name.removesuffix("_total")
            found[name, frozenset(labels.items())] = sample.value
    return found


def test_prometheus_clients_parser_reads_the_same_numbers_in_both_formats(lines: list[str]) -> None:
    plain = "\n".join(lines) + "\n"
    strict = "\n".join([*as_openmetrics(lines), END]) + "\n"

    there = numbers(parser.text_string_to_metric_families(plain))
    here = numbers(parsed(strict))

    assert here == there
    models = {dict(labels).get("model_name") for _, labels in here}
    assert models >= set(HOSTILE)
    assert all(math.isfinite(value) for value in here.values())


def test_no_name_of_tensorflow_serving_changes_and_its_counters_are_unknown(
    lines: list[str],
) -> None:
    strict = list(as_openmetrics(lines))

    types = dict(line[7:].rsplit(" ", 1) for line in strict if line.startswith("# TYPE "))
    assert types[":tensorflow:serving:request_count"] == "unknown"
    assert types[":tensorflow:serving:request_example_count_total"] == "unknown"
    assert types["stoker_request_count"] == "unknown"
    assert types[":tensorflow:serving:request_latency"] == "histogram"
    assert {line.split("{")[0] for line in strict if line[0] != "#"} == {
        line.split("{")[0] for line in lines if line[0] != "#"
    }


def test_a_counter_that_ends_in_total_is_a_counter_of_the_name_without_it() -> None:
    strict = list(
        as_openmetrics(
            [
                '# HELP stoker_rollout_events_total Changes, "all" of them.',
                "# TYPE stoker_rollout_events_total counter",
                'stoker_rollout_events_total{model_name="m",event="start"} 2',
            ]
        )
    )

    assert strict == [
        '# HELP stoker_rollout_events Changes, \\"all\\" of them.',
        "# TYPE stoker_rollout_events counter",
        'stoker_rollout_events_total{model_name="m",event="start"} 2',
    ]


def test_every_listed_metric_is_valid_in_both_formats() -> None:
    lines = []
    for metric in METRICS:
        labels = tuple("x" for _ in metric.labels)
        if metric.kind is Kind.HISTOGRAM:
            lines += header(metric.name, metric.kind, metric.help)
        else:
            lines += family(metric, {labels: 1.0})

    plain = list(parser.text_string_to_metric_families("\n".join(lines) + "\n"))
    strict = "\n".join([*as_openmetrics(lines), END]) + "\n"
    read = list(parsed(strict))

    assert len(plain) == len(read) == len(METRICS)
    assert [line for one in RolloutMetrics().families({}) for line in one] == []
