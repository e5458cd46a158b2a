"""Windows -> a step's parts, and the messages about them."""

from __future__ import annotations

import itertools
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.pages.bars import Bar, Span, timeline, waterfall
from stoker.pages.html import page, paragraph
from stoker.pages.table import table
from stoker.tune.client import Turns, enough_turns
from stoker.tune.compare import MAX_PAIRS, MIN_PAIRS, SAME, Gain
from stoker.tune.profile import Profile, TrialFacts, Windows, diagnose, profile_of
from stoker.tune.report import parts_of_a_step

ms = st.floats(0.01, 1e3)
share = st.floats(0.0, 1.0)


def window(step_ms: float, *, wait: float = 0.0, rows: float = 32.0) -> dict[str, Any]:
    wall_s = step_ms / 1e3 * 50
    return {
        "steps": 50,
        "rows": 50 * rows,
        "wall_s": wall_s,
        "wait_s": wait * wall_s,
        "cpu_s": wall_s,
    }


def profiled(
    ceiling_ms: float, real_ms: float, *, called_ms: float, wait: float, **more: Any
) -> Profile:
    return profile_of(
        TrialFacts(rows_a_step=32.0, per_epoch=100, steps_per_call=5, **more),
        Windows(
            turns=[[window(ceiling_ms), window(real_ms, wait=wait)]] * 3,
            called=[window(called_ms)] * 3,
            taken=[window(1.0)] * 3,
        ),
    )


@given(ms, ms, ms, share)
def test_parts_add_up_and_none_is_negative(
    ceiling: float, real: float, called: float, wait: float
) -> None:
    found = profiled(ceiling, real, called_ms=called, wait=wait)

    shares = found.split.shares()
    assert sum(shares.values()) == pytest.approx(1.0)
    assert min(shares.values()) >= 0.0
    assert found.busy_fraction == pytest.approx(ceiling / real)
    if real >= ceiling:
        assert found.split.step_s == pytest.approx(real / 1e3)


def test_each_part_is_what_was_measured() -> None:
    found = profiled(2.0, 10.0, called_ms=3.0, wait=0.5)

    split_ms = {name: 10 * part for name, part in found.split.shares().items()}
    assert split_ms == pytest.approx(
        {
            "input_wait": 5.0,
            "transfer": 0.0,
            "compute": 2.0,
            "communication": 0.0,
            "python": 1.0,
            "checkpoint": 0.0,
            "rest": 2.0,
        }
    )
    assert found.samples_per_s == pytest.approx(3200)
    assert found.epoch_s == pytest.approx(1.0)


def test_communication_does_not_count_as_compute() -> None:
    found = profiled(4.0, 4.0, called_ms=4.0, wait=0.0, communication_s=0.003)

    assert found.split.compute_s == pytest.approx(0.001)
    assert diagnose(found, own_dataset=False).bottleneck == "communication"


def test_a_short_last_step_of_an_epoch_does_not_count_as_gain() -> None:
    short = window(1.0, rows=16.0)
    found = profile_of(
        TrialFacts(rows_a_step=32.0, per_epoch=100, steps_per_call=5),
        Windows(turns=[[window(2.0), short]] * 3, called=[window(2.0)], taken=[window(1.0)]),
    )

    assert found.busy_fraction == pytest.approx(1.0)
    assert found.split.step_s == pytest.approx(0.002)


@pytest.mark.parametrize(
    ("ceiling", "real", "called", "wait", "bottleneck"),
    [
        (2.0, 10.0, 2.1, 0.7, "input"),
        # No wait at all: the input's work takes the cores of the step.
        (5.0, 10.0, 5.1, 0.0, "input"),
        (1.0, 10.0, 9.5, 0.01, "python"),
        (9.5, 10.0, 9.6, 0.02, "none"),
        (9.1, 10.0, 9.9, 0.0, "none"),
    ],
)
def test_the_bottleneck_is_named(
    ceiling: float, real: float, called: float, wait: float, bottleneck: str
) -> None:
    found = diagnose(profiled(ceiling, real, called_ms=called, wait=wait), own_dataset=False)

    assert found.bottleneck == bottleneck


@pytest.mark.parametrize(
    ("busy", "high", "wait", "bottleneck"),
    [
        (0.85, 0.94, 0.0, "input"),
        (0.85, 0.96, 0.0, "none"),
        (0.85, 0.96, 0.12, "input"),
        (0.7, 0.96, 0.0, "input"),
    ],
)
def test_idle_time_within_the_noise_is_not_a_bottleneck(
    busy: float, high: float, wait: float, bottleneck: str
) -> None:
    measured = profiled(10 * busy, 10.0, called_ms=10 * busy, wait=wait)
    found = replace(measured, busy_low=0.6, busy_high=high)

    said = diagnose(found, own_dataset=False)

    assert said.bottleneck == bottleneck
    assert (", between 60% and 96%: " in said.text) is (bottleneck == "none")


@pytest.mark.parametrize(
    ("fractions", "count"),
    [
        ([0.5, 0.6], MIN_PAIRS),
        ([0.95, 1.4], MIN_PAIRS),
        # One side only from so many pairs on.
        ([0.7] + [0.95] * 15, 10),
        ([0.7, 1.4], MAX_PAIRS),
    ],
)
def test_pairs_are_measured_until_they_decide(fractions: list[float], count: int) -> None:
    left = itertools.cycle(fractions)

    def take(number: int) -> Turns:
        pairs = [[window(10.0 * next(left)), window(10.0)] for _ in range(number)]
        return pairs, [1e9] * number

    turns, paces = enough_turns(take, left_s=lambda: 60.0)

    assert len(turns) == len(paces) == count
    assert len(enough_turns(take, left_s=lambda: 0.0)[0]) == MIN_PAIRS


def test_a_precision_is_named_only_where_it_is_clear() -> None:
    healthy = profiled(9.8, 10.0, called_ms=9.8, wait=0.0)
    clear = Gain(ratio=3.0, low=2.5, high=3.5, pairs=6)
    unclear = Gain(ratio=3.0, low=0.9, high=3.5, pairs=6)

    assert (
        diagnose(healthy, own_dataset=False, other_precision=("float32", clear)).bottleneck
        == "precision"
    )
    assert (
        diagnose(healthy, own_dataset=False, other_precision=("float32", unclear)).bottleneck
        == "none"
    )
    assert (
        diagnose(healthy, own_dataset=False, other_precision=("float32", SAME)).bottleneck == "none"
    )


def test_a_busy_fraction_above_one_is_shown_as_100_percent() -> None:
    found = diagnose(profiled(11.0, 10.0, called_ms=11.0, wait=0.0), own_dataset=False)

    assert "computes 100% of the time" in found.text


class Tags(HTMLParser):
    """Every tag that begins is ended, but for those that have no end."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        if tag not in ("meta", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag


HOSTILE = "<script>alert(1)</script>&\"'"


def test_pages_are_whole_and_names_are_escaped() -> None:
    bars = [Bar(label=HOSTILE, value=value, shown=HOSTILE) for value in (1.0, 3.0, 2.0, 4.0)]
    step = profiled(2.0, 10.0, called_ms=3.0, wait=0.5).split
    text = page(
        HOSTILE,
        [
            paragraph(HOSTILE),
            table([HOSTILE, "n"], [[HOSTILE, "1"]]),
            waterfall(bars, title=HOSTILE),
            parts_of_a_step(step, title="parts"),
            timeline([Span(lane=0, begin_s=0.0, length_s=1.0)], lanes=[HOSTILE], title="calls"),
        ],
    )

    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "script" not in tags.seen
    assert tags.seen.count("svg") == 3
    assert "default-src 'none'" in text
