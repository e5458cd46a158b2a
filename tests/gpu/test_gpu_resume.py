"""A killed training that is resumed ends with the same bits where `train.deterministic` is set."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.gpu.killing import weights_of
from tests.gpu.pictures import Pictures

pytestmark = pytest.mark.gpu


def test_a_killed_deterministic_training_ends_with_the_same_bits(
    pictures: Pictures, tmp_path: Path
) -> None:
    whole, killed = (
        weights_of(pictures, tmp_path / str(kill), "train.deterministic=true", kill=kill)
        for kill in (False, True)
    )

    assert whole.keys() == killed.keys()
    assert len(whole) >= 6
    assert [name for name in whole if not np.array_equal(whole[name], killed[name])] == []
