"""A step that does not fit: half the batch in twice as many passes, until it does."""

from __future__ import annotations

import pytest
from tests.gpu.pictures import Pictures

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

LIMIT_MB = 1024


def test_a_step_that_does_not_fit_is_cut_until_it_does(pictures: Pictures) -> None:
    # Without XLA, which would never create the tensor that does not fit.
    trained = pictures.train(
        "train.xla=false", f"train.memory.limit_mb={LIMIT_MB}", "train.seed=3", env={"HUNGRY": "1"}
    )

    # 32 rows need the tensor twice and 16 rows once; 8 rows do not need it.
    assert len(trained.result["health"]["reductions"]) == 2
    assert trained.result["steps"] == 4 * 5
    assert trained.result["metrics"]["loss"] < 0.5
