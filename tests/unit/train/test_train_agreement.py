"""How far two scores may be apart and be the same answer."""

from __future__ import annotations

import numpy as np
import pytest

from stoker.data.feed.agreement import TIE, other_answers
from stoker.train.loop.validation import tolerance_of


@pytest.mark.parametrize(
    ("dtype", "on_gpu", "tf32", "tolerance"),
    [
        ("float32", False, True, TIE),
        ("float32", True, False, 1e-4),
        ("float32", True, True, 2.0**-9),
        ("float16", True, True, 2.0**-9),
        ("bfloat16", True, True, 2.0**-6),
        ("bfloat16", False, True, 2.0**-6),
    ],
)
def test_the_tolerance_is_that_of_the_arithmetic(
    dtype: str, on_gpu: bool, tf32: bool, tolerance: float
) -> None:
    assert tolerance_of(dtype, on_gpu=on_gpu, tensor_float_32=tf32) == tolerance


def test_an_answer_that_changes_by_rounding_counts_in_no_arithmetic_that_rounds_so() -> None:
    scores = np.array([[0.500, 0.499, 0.001], [0.90, 0.05, 0.05]])
    moved = np.array([[0.499, 0.500, 0.001], [0.90, 0.05, 0.05]])

    found = {
        tolerance: int(other_answers(scores, moved, threshold=0.5, tolerance=tolerance).sum())
        for tolerance in (TIE, 2.0**-9)
    }

    assert found == {TIE: 1, 2.0**-9: 0}


def test_an_answer_of_another_picture_counts_in_any_arithmetic() -> None:
    scores, other = np.array([[0.7, 0.3]]), np.array([[0.4, 0.6]])

    assert other_answers(scores, other, threshold=0.5, tolerance=2.0**-6).all()
