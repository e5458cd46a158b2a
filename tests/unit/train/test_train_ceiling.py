"""When the ceiling of a step is measured, and what becomes of it."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from stoker.train.context.position import Position
from stoker.train.context.utilization import (
    FIRST_AFTER,
    MIN_GAP,
    WINDOWS,
    Ceiling,
    CeilingWindows,
    RunCeiling,
)


@given(st.integers(1, 500))
def test_windows_stand_in_the_first_epoch_and_leave_most_calls_to_be_timed(calls: int) -> None:
    windows = CeilingWindows()

    behind = [call for call in range(1, calls + 1) if windows.due(calls - call)]

    assert behind[:1] == ([FIRST_AFTER] if calls >= FIRST_AFTER else [])
    assert all(later - one >= MIN_GAP for one, later in itertools.pairwise(behind))
    assert len(behind) <= WINDOWS
    if calls >= FIRST_AFTER + WINDOWS * MIN_GAP:
        assert len(behind) == WINDOWS
        # Spread over the epoch: the last one is not before its half.
        assert behind[-1] >= calls / 2


def run_of(seconds: list[float | None]) -> tuple[Position, RunCeiling, list[float]]:
    """A run whose windows take these seconds for 10 steps; None: they did not fit in memory."""
    position, shares = Position(per_epoch=40, steps=80), []

    def measure(share: float) -> Ceiling | None:
        shares.append(share)
        took_s = seconds.pop(0)
        if took_s is None:
            ceiling.restart()
            return None
        return Ceiling(steps=10, wall_s=took_s)

    ceiling = RunCeiling(position, measure)
    return position, ceiling, shares


def test_the_ceiling_is_the_mean_of_all_windows_and_the_call_behind_one_settles() -> None:
    position, ceiling, _ = run_of([1.0, 3.0])

    assert ceiling.step_s is None
    assert ceiling.take()
    assert ceiling.follows_window()
    assert not ceiling.follows_window()
    assert ceiling.take()

    assert ceiling.step_s == 0.2
    assert (position.timing.ceiling_s, position.timing.ceiling_steps) == (4.0, 20)


def test_what_a_short_run_has_not_measured_it_measures_at_its_end() -> None:
    _, ceiling, shares = run_of([1.0])

    ceiling.complete(trained=True)

    assert shares == [1.0]
    assert ceiling.step_s == 0.1


def test_a_process_that_trained_nothing_takes_what_the_checkpoint_says() -> None:
    position, ceiling, shares = run_of([])
    position.timing.ceiling_s, position.timing.ceiling_steps = 2.0, 10

    ceiling.complete(trained=False)

    assert (shares, ceiling.step_s) == ([], 0.2)


def test_a_step_that_became_another_one_is_measured_again() -> None:
    _, ceiling, shares = run_of([1.0, None, 5.0])
    assert ceiling.take()

    ceiling.complete(trained=True)

    assert shares[-1] == 1.0
    assert ceiling.step_s == 0.5
