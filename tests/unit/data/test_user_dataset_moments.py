"""Moments of tensors, batch by batch, are those of all values together."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.data.user_dataset.analysis import Moments
from stoker.data.user_dataset.description import TensorColumn

COLUMN = TensorColumn(name="x", dtype="float64", shape=(2,))
VALUES = st.floats(-1e6, 1e6) | st.sampled_from([float("nan"), float("inf"), 0.0])


@given(st.lists(st.lists(VALUES, min_size=1, max_size=6), min_size=1, max_size=5))
def test_batches_add_up_to_the_whole(batches: list[list[float]]) -> None:
    moments = Moments()
    for batch in batches:
        moments.add(np.array(batch))

    column = moments.statistics(COLUMN)

    values = np.concatenate([np.array(batch) for batch in batches])
    finite = values[np.isfinite(values)]
    assert column.count + column.missing == values.size
    assert column.missing == np.isnan(values).sum()
    assert column.numbers is not None
    assert column.numbers.infinite == np.isinf(values).sum()
    if not finite.size:
        assert column.numbers.mean is None
        return
    assert column.numbers.zeros == (finite == 0).sum()
    assert (column.numbers.min, column.numbers.max) == (finite.min(), finite.max())
    assert column.numbers.mean == pytest.approx(finite.mean(), rel=1e-9, abs=1e-6)
    assert column.numbers.std == pytest.approx(finite.std(), rel=1e-6, abs=1e-3)
