"""The shuffled order of a table: a pure function of (seed, epoch).

An epoch is a sequence of windows, which are sets of row groups. Neighboring row groups are in different windows,
so each window is a sample of the whole table, even if the table is sorted. The rows of a window are permuted
together. A table that fits into one window has exactly the order of `order.shuffled_indices`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.data.feed.order import shuffled_indices

MIN_WINDOW_GROUPS = 16
"""Minimum number of row groups in a window, if the split has that many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Row groups that are read together and whose rows are permuted together."""

    epoch: int
    """The epoch, from 0."""

    groups: NDArray[np.int64]
    """[groups] numbers of the row groups in the split, ascending."""

    rows: int
    """Total number of rows of these row groups."""

    seed: int
    """Seed of the order."""

    turn: int | None
    """Number of the window, counted over all epochs, which chooses its permutation; None: stored order."""

    def order(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the rows at positions [first, last), as indices into the window's concatenated row groups."""
        positions = np.arange(first, last, dtype=np.int64)
        if self.turn is None:
            return positions
        return shuffled_indices(positions, size=self.rows, seed=self.seed, epoch=self.turn)


def shuffled_windows(
    group_rows: NDArray[np.int64],
    *,
    window_groups: int,
    seed: int,
    epoch: int,
) -> list[Window]:
    """Return the windows of an epoch in their order.

    Args:
        group_rows: [groups] rows of each row group of the split, in stored order.
        window_groups: Maximum number of row groups in a window; `MIN_WINDOW_GROUPS` takes precedence.
        seed: The run's seed.
        epoch: The epoch, from 0.

    Returns:
        The windows; together they hold each row group exactly once.
    """
    groups = len(group_rows)
    count = max(1, min(-(-groups // window_groups), groups // MIN_WINDOW_GROUPS))
    dealt = deal_groups(groups, windows=count, seed=seed, epoch=epoch)
    return [
        Window(
            epoch=epoch,
            groups=dealt[number],
            rows=int(group_rows[dealt[number]].sum()),
            seed=seed,
            turn=epoch * count + number,
        )
        for number in range(count)
    ]


def stored_windows(group_rows: NDArray[np.int64], *, window_groups: int) -> list[Window]:
    """Return windows in stored order, for evaluation."""
    cuts = range(0, len(group_rows), window_groups)
    runs = [np.arange(cut, min(cut + window_groups, len(group_rows))) for cut in cuts]
    return [
        Window(epoch=0, groups=run, rows=int(group_rows[run].sum()), seed=0, turn=None)
        for run in runs
    ]


def deal_groups(groups: int, *, windows: int, seed: int, epoch: int) -> list[NDArray[np.int64]]:
    """Distribute row groups over windows: of each `windows` neighboring groups, every window gets one.

    In a table that is sorted by the label, with m groups per window, the mean of the label in a window differs
    from the table's mean by up to about 1/m. If groups were chosen at random, it would differ by 1/sqrt(m).

    Args:
        groups: Number of row groups of the split.
        windows: Number of windows of the epoch.
        seed: The run's seed.
        epoch: The epoch.

    Returns:
        [windows] arrays of group numbers, ascending.

    Source: Cochran, "Sampling techniques", 1977, section 5.6 (stratified and simple random sampling).
    """
    stretches = -(-groups // windows)
    size = stretches * windows
    ranks = shuffled_indices(np.arange(size, dtype=np.int64), size=size, seed=seed, epoch=epoch)
    starts = windows * np.arange(stretches, dtype=np.int64)[:, None]
    dealt = starts + ranks.reshape(stretches, windows).argsort(axis=1)
    return [column[column < groups] for column in dealt.T]


def rows_at(
    windows: list[Window], group_rows: NDArray[np.int64], *, first: int, last: int
) -> NDArray[np.int64]:
    """Return the row numbers of the split at positions [first, last) of an epoch.

    Args:
        windows: The epoch's windows, in their order.
        group_rows: [groups] rows of each row group of the split, in stored order.
        first: The first position.
        last: The position after the last position.
    """
    starts = np.cumsum(group_rows) - group_rows
    found, begun = [np.zeros(0, np.int64)], 0
    for window in windows:
        low, high = max(first - begun, 0), min(last - begun, window.rows)
        if low < high:
            places = window.order(low, high)
            ends = np.cumsum(group_rows[window.groups])
            which = np.searchsorted(ends, places, side="right")
            within = places - (ends - group_rows[window.groups])[which]
            found.append(starts[window.groups[which]] + within)
        begun += window.rows
    return np.concatenate(found)
