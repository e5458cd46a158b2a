"""The stages of a rollout as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.errors import ConfigError
from stoker.rollout.state.stages import Stage, parse_stages


def test_each_form_of_a_stage() -> None:
    assert parse_stages("header=x-canary:5m, 1, 10%:20m, pause, 50:1h60m, 100") == (
        Stage(header="x-canary", time_s=300),
        Stage(share=0.01),
        Stage(share=0.1, time_s=1_200),
        Stage(share=0.1, waits=True),
        Stage(share=0.5, time_s=7_200),
        Stage(share=1.0),
    )
    assert [str(stage) for stage in parse_stages("header=x,0.5,pause,100")] == [
        "header=x",
        "0.5 %",
        "pause",
        "100 %",
    ]


def test_a_shadow_stage_copies_all_requests_or_a_share_of_them() -> None:
    assert parse_stages("shadow, shadow=5%:10m, header=x, 1, 100")[:2] == (
        Stage(shadow=1.0),
        Stage(shadow=0.05, time_s=600),
    )
    assert [str(stage) for stage in parse_stages("shadow,shadow=0.5:1h,100")] == [
        "shadow of 100 %",
        "shadow of 0.5 %",
        "100 %",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "shadow",
        "shadow=0,100",
        "shadow=101,100",
        "10,shadow,100",
        "shadow=,100",
        "10",
        "50,10,100",
        "10,10,100",
        "1,101",
        "10,header=x,100",
        "100,pause",
        "a",
        "0,100",
        "0.001,100",
        "nan,100",
        "1e1,100",
        "10:1e3s,100",
        "header=,100",
        "1,,100",
        "1:5,100",
    ],
)
def test_stages_that_do_not_rise_to_100_or_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="Write percentages that rise to 100"):
        parse_stages(text)


@given(st.lists(st.integers(1, 9_999), min_size=1, unique=True).map(sorted))
def test_percentages_that_rise_are_taken_as_they_are(hundredths: list[int]) -> None:
    stages = parse_stages(",".join(f"{each / 100:g}" for each in [*hundredths, 10_000]))

    assert [round(stage.share * 10_000) for stage in stages] == [*hundredths, 10_000]
