"""The rows of each worker, where the workers of an elastic training fill up one after the other."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.data.feed.calls import Calls


def steps_of(worker: int, workers: int, *, rows: int, slice_rows: int = 5) -> list[list[int]]:
    """The rows of a worker in each step; four virtual workers have `slice_rows` each."""
    batch = 4 * slice_rows
    calls = Calls(
        rows=rows,
        batch_size=batch,
        steps_per_call=1,
        seed=0,
        first=0,
        last=-(-rows // batch),
        worker=worker,
        workers=workers,
        share_rows=batch // workers,
    )
    found = calls.steps(lambda epoch, first, last: np.arange(first, last, dtype=np.int64))
    return [part.numpy().tolist() for part, _ in found]


@pytest.mark.parametrize("rows", [40, 48, 51, 59, 41, 3])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_slice_has_the_same_rows_for_every_number_of_workers(workers: int, rows: int) -> None:
    """And a worker without rows gets one more than its share, which is how it knows that none is its own."""
    share = 20 // workers
    per_worker = [steps_of(worker, workers, rows=rows) for worker in range(workers)]

    for step, parts in enumerate(zip(*per_worker, strict=True)):
        whole = list(range(step * 20, min((step + 1) * 20, rows)))
        own = [part for part in parts if len(part) <= share]
        assert [row for part in own for row in part] == whole
        assert all(len(part) == share for part in own[:-1]), "one after the other"
        assert all(part == [whole[-1]] * (share + 1) for part in parts[len(own) :])
