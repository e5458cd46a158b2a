from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from stoker.data.feed.order import shuffled_indices
from stoker.data.feed.tables.row_groups import (
    MIN_WINDOW_GROUPS,
    Window,
    deal_groups,
    shuffled_windows,
    stored_windows,
)

GOLDEN = Path(__file__).parent / "golden_table_order.json"

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=120)
numbers = st.integers(0, 2**31 - 1)


def rows_in_order(windows: list[Window], group_rows: NDArray[np.int64]) -> list[int]:
    """Every row that the windows hold, by its place in the split."""
    starts = np.cumsum([0, *group_rows])
    rows: list[int] = []
    for window in windows:
        stored = np.concatenate([np.arange(starts[g], starts[g + 1]) for g in window.groups])
        rows += stored[window.order(0, window.rows)].tolist()
    return rows


@given(sizes=sizes, window=st.integers(1, 60), seed=numbers)
def test_every_row_is_read_once_in_an_epoch(sizes: list[int], window: int, seed: int) -> None:
    group_rows = np.array(sizes)
    windows = shuffled_windows(group_rows, window_groups=window, seed=seed, epoch=2)

    assert sorted(rows_in_order(windows, group_rows)) == list(range(group_rows.sum()))


@given(groups=st.integers(1, 500), window=st.integers(1, 100))
def test_a_window_holds_at_least_sixteen_groups_where_there_are_as_many(
    groups: int, window: int
) -> None:
    windows = shuffled_windows(np.ones(groups, np.int64), window_groups=window, seed=1, epoch=0)

    most = max(window, 2 * MIN_WINDOW_GROUPS)
    for each in windows:
        assert min(MIN_WINDOW_GROUPS, groups) <= len(each.groups) <= most


@given(groups=st.integers(1, 400), windows=st.integers(1, 40), seed=numbers)
def test_a_window_holds_one_group_of_every_stretch_of_neighbors(
    groups: int, windows: int, seed: int
) -> None:
    dealt = deal_groups(groups, windows=windows, seed=seed, epoch=1)

    whole = groups // windows
    assert len(dealt) == windows
    for held in dealt:
        assert (held // windows)[:whole].tolist() == list(range(whole))
        assert len(held) in (whole, whole + 1)


def test_a_table_of_one_window_has_the_order_of_single_rows() -> None:
    (window,) = shuffled_windows(np.array([300, 300, 100]), window_groups=16, seed=4, epoch=3)

    expected = shuffled_indices(np.arange(700), size=700, seed=4, epoch=3)
    assert window.order(0, 700).tolist() == expected.tolist()


def test_every_epoch_and_every_seed_deals_again() -> None:
    drawn = {
        (seed, epoch): [
            each.groups.tolist()
            for each in shuffled_windows(
                np.ones(640, np.int64), window_groups=20, seed=seed, epoch=epoch
            )
        ]
        for seed in (0, 1)
        for epoch in (0, 1, 2)
    }
    assert len({str(groups) for groups in drawn.values()}) == len(drawn)


def test_stored_windows_hold_the_rows_as_they_are_stored() -> None:
    group_rows = np.array([3, 1, 4, 1, 5])

    windows = stored_windows(group_rows, window_groups=2)

    assert rows_in_order(windows, group_rows) == list(range(14))


def test_the_order_of_tables_is_the_one_of_earlier_versions() -> None:
    for case in json.loads(GOLDEN.read_text()):
        group_rows = np.array(case["group_rows"])
        windows = shuffled_windows(
            group_rows,
            window_groups=case["window_groups"],
            seed=case["seed"],
            epoch=case["epoch"],
        )
        assert [window.groups.tolist() for window in windows] == case["groups"]
        assert rows_in_order(windows, group_rows)[:16] == case["first_rows"]
