"""How long it still takes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.telemetry.wall_time import WINDOW, TimeLeft, shown_time


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@given(
    first=st.floats(0, 0.9),
    began_s=st.floats(0, 1e6),
    rate=st.floats(1e-6, 0.01),
    looks=st.integers(1, 9),
)
def test_work_of_constant_speed_ends_at_the_estimated_time(
    first: float, began_s: float, rate: float, looks: int
) -> None:
    clock = Clock()
    left = TimeLeft(clock)
    clock.now_s = began_s
    assert left.seconds(first) is None

    for look in range(1, looks + 1):
        clock.now_s = began_s + look
        said = left.seconds(first + rate * look)

    assert said == pytest.approx((1 - first) / rate - looks, rel=1e-3, abs=1e-3)


def test_a_resumed_run_is_judged_by_what_it_does_itself() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.seconds(0.9)
    clock.now_s = 10.0
    assert left.seconds(0.91) == pytest.approx(90.0)


def test_work_that_slows_down_is_judged_by_its_latest_speed() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    share = 0.0
    for step_s in (0.001, 1.0):
        for _ in range(WINDOW):
            clock.now_s += step_s
            share += 0.001
            said = left.seconds(share)
    assert said == pytest.approx((1 - share) / 0.001, rel=0.01)


def test_a_share_that_falls_is_other_work() -> None:
    clock = Clock()
    left = TimeLeft(clock)
    left.seconds(0.5)
    clock.now_s = 1.0
    assert left.seconds(0.1) is None
    clock.now_s = 2.0
    assert left.seconds(0.2) == pytest.approx(8.0)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(-3, "0:00"), (65.4, "1:05"), (7380, "2:03:00"), (3 * 86400 + 4 * 3600, "3 d 4 h")],
)
def test_time_is_shown_short(seconds: float, shown: str) -> None:
    assert shown_time(seconds) == shown
