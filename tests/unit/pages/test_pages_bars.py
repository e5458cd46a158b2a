from __future__ import annotations

import re
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.pages.bars import (
    Bar,
    Span,
    stacked_bar,
    timeline,
    waterfall,
    waterfall_of_parts,
)
from stoker.pages.numbers import number, percent, seconds

values = st.floats(min_value=0, max_value=1e9)
labels = st.text(st.characters(min_codepoint=32, max_codepoint=0x2FFF, exclude_categories=["Cs"]))
bars = st.lists(st.builds(Bar, label=labels, value=values), max_size=8)


def boxes(picture: str) -> list[dict[str, float]]:
    """Every rectangle but the tracks below the bars, in percent; the picture is well-formed."""
    root = ET.fromstring(picture)
    return [
        {name: float(box.attrib[name].rstrip("%")) for name in ("x", "y", "width")}
        for box in root.iter("rect")
        if box.attrib["class"] != "track"
    ]


@given(bars)
def test_every_bar_is_drawn_within_the_picture(given_bars: list[Bar]) -> None:
    for draw in (waterfall_of_parts, waterfall):
        drawn = boxes(draw(given_bars, title="t"))

        assert len(drawn) == len(given_bars)
        assert all(box["width"] >= 0 and box["x"] + box["width"] <= 100.02 for box in drawn)


@given(bars)
def test_a_stacked_bar_is_the_whole_in_parts(given_bars: list[Bar]) -> None:
    drawn = boxes(stacked_bar(given_bars, title="t"))

    # A part has a box in the bar, and one next to its name.
    parts = [box for box in drawn if box["y"] == 0]
    seen = [bar for bar in given_bars if bar.value > 1e-200]
    assert len(drawn) == 2 * len(parts) == 2 * len(seen)
    if parts:
        assert sum(box["width"] for box in parts) == pytest.approx(100, abs=0.1)
        assert all(box["x"] + box["width"] <= 100.02 for box in parts)


def test_a_bar_is_as_long_as_its_value() -> None:
    picture = waterfall_of_parts(
        [Bar(label="a", value=1.0), Bar(label="b", value=4.0), Bar(label="c", value=0.0)], title="t"
    )

    short, long, none = boxes(picture)
    assert long["width"] == pytest.approx(4 * short["width"], rel=0.01)
    assert none["width"] == 0
    assert long["x"] == pytest.approx(short["x"] + short["width"], abs=0.2)
    assert none["x"] == pytest.approx(long["x"] + long["width"], abs=0.2)


def test_a_waterfall_goes_from_level_to_level() -> None:
    levels = [
        Bar(label="first", value=100.0),
        Bar(label="more", value=150.0),
        Bar(label="less", value=120.0),
        Bar(label="last", value=120.0),
    ]

    first, more, less, last = boxes(waterfall(levels, title="t"))

    assert first["x"] == last["x"] == 0
    assert more["x"] == pytest.approx(first["x"] + first["width"], abs=0.2)
    assert less["x"] == pytest.approx(last["x"] + last["width"], abs=0.2)
    assert less["x"] + less["width"] == pytest.approx(more["x"] + more["width"], abs=0.2)


def test_a_timeline_puts_spans_in_their_lanes_and_order() -> None:
    spans = [
        Span(lane=0, begin_s=5.0, length_s=1.0),
        Span(lane=1, begin_s=6.0, length_s=3.0),
        Span(lane=7, begin_s=6.0, length_s=3.0),
    ]

    wait, call = boxes(timeline(spans, lanes=["wait", "call"], title="t"))

    assert wait["y"] < call["y"]
    assert call["x"] == pytest.approx(wait["x"] + wait["width"], abs=0.2)
    assert call["width"] == pytest.approx(3 * wait["width"], rel=0.01)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_drawn_as_nothing(odd: float) -> None:
    picture = waterfall_of_parts(
        [Bar(label="odd", value=odd), Bar(label="b", value=2.0)], title="t"
    )
    line = timeline([Span(lane=0, begin_s=odd, length_s=1.0)], lanes=["a"], title="t")

    assert boxes(picture)[0]["width"] == 0
    assert boxes(line) == []
    assert "nan" not in re.sub(r">[^<]*<", "><", picture)


def test_text_is_escaped_everywhere() -> None:
    bad = '<script>alert("1")</script>&'
    pictures = [
        waterfall_of_parts([Bar(label=bad, value=1.0, shown=bad)], title=bad),
        waterfall([Bar(label=bad, value=1.0, shown=bad)], title=bad),
        timeline([Span(lane=0, begin_s=0.0, length_s=1.0)], lanes=[bad], title=bad),
    ]

    for picture in pictures:
        assert "<script" not in picture
        texts = "".join(ET.fromstring(picture).itertext())
        assert bad in texts


def test_nothing_is_a_picture_too() -> None:
    for picture in (
        waterfall_of_parts([], title="t"),
        waterfall([], title="t"),
        timeline([], lanes=[], title="t"),
    ):
        assert boxes(picture) == []


@pytest.mark.parametrize(
    ("value_s", "shown"),
    [
        (0.0, "0 s"),
        (2.5, "2.5 s"),
        (0.0123, "12.3 ms"),
        (4.5e-6, "4.5 us"),
        (9.999e-4, "1 ms"),
        (1234, "20 min 34 s"),
        (9000, "2 h 30 min"),
    ],
)
def test_seconds_have_a_unit_that_suits_them(value_s: float, shown: str) -> None:
    assert seconds(value_s) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.951624, "0.95162"),
        (8.0, "8"),
        (1357020000.0, "1,357,020,000"),
        (1.2e-7, "1.2e-07"),
        (41.900001525878906, "41.9"),
        (-0.5, "-0.5"),
        (1234.5678, "1,234.6"),
        (0.99999999, "1"),
    ],
)
def test_numbers_have_the_digits_that_people_read(value: float, shown: str) -> None:
    assert number(value) == shown


def test_a_small_share_is_not_written_as_none() -> None:
    assert [percent(share) for share in (0.0, 0.0001, 0.1234)] == ["0.0%", "<0.1%", "12.3%"]
