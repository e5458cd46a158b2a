"""Load's own arithmetic: what a histogram keeps, what a result says, what is refused."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.core.errors import ConfigError
from stoker.loadtest.config import LoadConfig, resolved
from stoker.loadtest.result import Latencies, LoadResult, latency_picture


def latencies(*values_s: float) -> Latencies:
    made = Latencies()
    for value_s in values_s:
        made.add(value_s)
    return made


def result(answered: Latencies, **more: Any) -> LoadResult:
    facts: dict[str, Any] = {
        "mode": "open",
        "asked_rate_per_s": 100.0,
        "connections": 4,
        "took_s": 2.0,
        "sent": 200,
        "latencies": answered,
        "errors": {},
        "lag": latencies(1e-5),
        "waited": latencies(1e-5),
        "cpu_share": 0.1,
    }
    return LoadResult(**(facts | more))


# A histogram that tells two hours from a microsecond takes milliseconds to make and to read.
FEW = settings(max_examples=30)


@FEW
@given(st.lists(st.floats(1e-6, 5000.0), min_size=1, max_size=300), st.sampled_from([50, 90, 99]))
def test_a_percentile_is_that_of_the_values_to_a_thousandth(
    values: list[float], percent: int
) -> None:
    found = latencies(*values).at(percent)

    assert found == pytest.approx(
        float(np.percentile(values, percent, method="inverted_cdf")), rel=2e-3, abs=2e-7
    )


@FEW
@given(st.lists(st.floats(0.0, 5000.0), min_size=1, max_size=50))
def test_the_longest_and_the_mean_are_exact(values: list[float]) -> None:
    found = latencies(*values)

    assert found.max_s == max(values)
    assert found.at(100) <= found.max_s
    assert found.mean_s == pytest.approx(sum(values) / len(values))
    assert found.count == len(values)


def test_a_request_without_an_answer_has_no_latency() -> None:
    found = result(latencies(), errors={"HTTP 503": 200})

    assert found.as_json()["latency_ms"] is None
    assert found.throughput_per_s == 0
    assert "No request was answered with 200" in latency_picture(found, title="x")


def test_a_generator_that_was_late_marks_its_figures() -> None:
    answered = latencies(*[0.002] * 100)
    in_time = result(answered, lag=latencies(*[1e-4] * 100))
    late = result(answered, lag=latencies(*[1e-4] * 90, *[0.005] * 10))
    # Half a second of latency makes five milliseconds of lag nothing.
    slow = result(latencies(0.5), lag=latencies(*[0.005] * 100))

    assert in_time.kept_schedule
    assert in_time.notes == ()
    assert not late.kept_schedule
    assert "did not keep its schedule" in late.notes[0]
    assert late.as_json()["generator"]["kept_schedule"] is False
    assert slow.kept_schedule


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"stopped": True}, "stopped by hand after 2.0 s"),
        ({"cpu_share": 0.97}, "97% of a core"),
        ({"waited": latencies(*[0.3] * 10)}, "for one of 4 connections"),
        ({"errors": {"HTTP 503": 3}}, "only answers with status 200"),
    ],
)
def test_limits_of_the_figures_are_reported(more: dict[str, Any], word: str) -> None:
    (note,) = result(latencies(0.01), **more).notes

    assert word in note


@FEW
@given(st.lists(st.floats(1e-5, 100.0), min_size=1, max_size=60))
def test_the_picture_is_whole_and_its_line_only_rises(values: list[float]) -> None:
    picture = latency_picture(result(latencies(*values), cpu_share=0.95), title="<digits> & co")
    root = ET.fromstring(picture)
    line = next(node for node in root.iter() if node.tag.endswith("polyline"))
    points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]

    assert [y for _, y in points] == sorted((y for _, y in points), reverse=True)
    assert all(0 <= x <= 640 and 0 <= y <= 320 for x, y in points)
    assert "95% of a core" in picture


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"rate_per_s": 0}, "above 0 requests per second"),
        ({"rate_per_s": float("nan")}, "above 0 requests per second"),
        ({"rate_per_s": 1e6, "seconds": 3600}, "at most|to 10,000,000 requests"),
        ({"rate_per_s": 0.01}, "from 1 to"),
        ({"rate_per_s": None, "seconds": 1e9}, "at most 3600 seconds"),
        ({"rate_per_s": None, "connections": 0}, "from 1 to 1000"),
        ({"rate_per_s": None, "timeout_s": -1}, "time-out"),
    ],
)
def test_load_that_would_not_end_is_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        LoadConfig(**settings)


def test_load_goes_only_to_this_machine_by_default() -> None:
    # 192.0.2.0/24 is for documentation: nothing is sent to it here.
    with pytest.raises(ConfigError, match="add --allow-remote"):
        resolved("192.0.2.1", 80, allow_remote=False)

    assert resolved("192.0.2.1", 80, allow_remote=True)[1] == ("192.0.2.1", 80)
    assert resolved("127.0.0.1", 80, allow_remote=False)[1] == ("127.0.0.1", 80)
    assert resolved("::1", 80, allow_remote=False)[1] == ("::1", 80)
    with pytest.raises(ConfigError, match="must be known"):
        resolved("nobody.invalid", 80, allow_remote=True)
