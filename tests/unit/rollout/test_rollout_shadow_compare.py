"""Which answers of a version in shadow are bad, and which are only different."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from stoker.rollout.shadow.compare import Comparison, compare, comparison_of, failed

Array = NDArray[Any]
SCORES = {"scores": (None, 2)}


def compared(baseline: Array, candidate: Array, *, tolerance: float = 1e-3) -> Comparison:
    return compare({"y": baseline}, {"y": candidate}, tolerance=tolerance, declared={})


@pytest.mark.parametrize(
    ("baseline", "candidate", "is_different"),
    [
        ([1.0, 2.0], [1.0009, 2.0], False),
        ([1.0, 2.0], [1.002, 2.0], True),
        ([1_000.0], [1_000.9], False),
        ([1_000.0], [1_002.0], True),
        ([0.0], [0.0009], False),
        ([5.0, 6.0], [5.0], True),
    ],
)
def test_numbers_are_equal_within_a_tolerance_and_lengths_are_not(
    baseline: list[float], candidate: list[float], is_different: bool
) -> None:
    found = compared(np.array(baseline, np.float32), np.array(candidate, np.float32))

    assert (found.is_different, found.bad, found.baseline_bad) == (is_different, "", False)


def test_whole_numbers_and_texts_must_be_the_same() -> None:
    texts = [np.array(text, object) for text in ([b"a"], [b"b"])]

    assert not compared(texts[0], texts[0]).is_different
    assert compared(*texts).is_different
    assert compared(np.array([1_000_000]), np.array([1_000_001])).is_different


def test_a_class_is_the_largest_number_of_a_row_or_a_label() -> None:
    before = np.array([[0.9, 0.1], [0.4, 0.6], [0.7, 0.3]])
    now = np.array([[0.1, 0.9], [0.4, 0.6], [0.8, 0.2]])
    found = compared(before, now)

    assert (found.class_changes, found.rows) == (1, 3)
    assert sum(found.baseline.values()) == sum(found.candidate.values()) == 3
    labels = compared(np.array([3, 4, 5]), np.array([3, 9, 5]))
    assert (labels.class_changes, labels.rows) == (1, 3)
    number = compared(np.array([[0.5]]), np.array([[9.0]]))
    assert (number.class_changes, number.rows) == (0, 0)


@pytest.mark.parametrize(
    ("candidate", "bad"),
    [
        ({"scores": np.array([[0.5, np.nan]])}, "a value is not finite"),
        ({"scores": np.array([[0.5, np.inf]])}, "a value is not finite"),
        ({"other": np.array([[0.5, 0.5]])}, "no output 'scores'"),
        ({"scores": np.zeros((1, 3))}, "output 'scores' has the shape [1, 3], not [?, 2]"),
        ({"scores": np.zeros(2)}, "output 'scores' has the shape [2], not [?, 2]"),
        ({"scores": np.zeros((1, 2), np.float32)}, "output 'scores' is float32, not float64"),
    ],
)
def test_an_answer_that_clients_cannot_read_is_bad(candidate: dict[str, Array], bad: str) -> None:
    baseline = {"scores": np.array([[0.5, 0.5]])}

    found = compare(baseline, candidate, tolerance=1e-3, declared=SCORES)

    assert (found.bad, found.baseline_bad) == (bad, False)
    assert found.candidate == {}


def test_what_the_baseline_does_wrong_counts_for_the_baseline() -> None:
    good, bad = {"scores": np.array([[0.5, 0.5]])}, {"scores": np.array([[0.5, np.nan]])}

    for baseline in (None, bad):
        found = compare(baseline, good, tolerance=1e-3, declared=SCORES)
        assert (found.baseline_bad, found.bad) == (True, "")
    assert failed(bad, "it hangs") == Comparison(baseline_bad=True, bad="it hangs")
    assert failed(None, "it hangs") == Comparison(baseline_bad=True, bad="it hangs")
    assert failed(good, "it hangs") == Comparison(bad="it hangs")


def test_a_comparison_passes_through_json() -> None:
    found = compared(np.array([[0.5, 2.0]]), np.array([[3.0, 2.0]]))

    assert comparison_of(json.loads(json.dumps(found.to_json()))) == found
