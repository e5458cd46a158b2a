"""Each worker's share of a step: the same order for one reader and for many."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.feed.order import rows_of_step, shuffled_indices


@given(
    rows=st.integers(1, 500),
    batch_size=st.integers(1, 70),
    workers=st.integers(1, 9),
    seed=st.integers(0, 10**6),
    epoch=st.integers(0, 50),
)
def test_no_sample_is_lost_or_read_twice_by_any_number_of_workers(
    rows: int, batch_size: int, workers: int, seed: int, epoch: int
) -> None:
    steps = -(-rows // batch_size)
    together = [
        np.concatenate(
            [
                rows_of_step(
                    step,
                    rows=rows,
                    batch_size=batch_size,
                    seed=seed,
                    epoch=epoch,
                    worker=worker,
                    workers=workers,
                )
                for worker in range(workers)
            ]
        )
        for step in range(steps)
    ]
    order = shuffled_indices(np.arange(rows), size=rows, seed=seed, epoch=epoch)

    assert np.array_equal(np.concatenate(together), order)
    assert all(len(batch) == batch_size for batch in together[:-1])


@given(rows=st.integers(1, 300), batch_size=st.integers(1, 40), workers=st.integers(1, 8))
def test_workers_shares_differ_by_at_most_one(rows: int, batch_size: int, workers: int) -> None:
    shares = [
        len(
            rows_of_step(
                0,
                rows=rows,
                batch_size=batch_size,
                seed=0,
                epoch=0,
                worker=worker,
                workers=workers,
            )
        )
        for worker in range(workers)
    ]

    assert max(shares) - min(shares) <= 1


def test_behind_the_last_step_there_is_nothing() -> None:
    assert not len(rows_of_step(4, rows=100, batch_size=32, seed=0, epoch=0))
