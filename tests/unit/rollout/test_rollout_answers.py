"""Answers are counted many at a time, with the same counts as one at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from stoker.rollout.answers import (
    MOST_BYTES,
    MOST_WAITING,
    Answers,
    StageKeys,
    WaitingAnswers,
    numbers_of,
    predictions_of,
)
from stoker.rollout.gates import VersionCounts
from stoker.serve.routing import Route


def counted(*answers: Answers, together: bool, slow_s: float = 1.0) -> dict[int, VersionCounts]:
    """The counts after all answers, counted at once or one after the other."""
    counts: dict[int, VersionCounts] = {}
    keys, waiting = StageKeys(), WaitingAnswers()
    for each in answers:
        waiting.add(each)
        if not together:
            waiting.count(counts, keys, slow_s=slow_s)
    waiting.count(counts, keys, slow_s=slow_s)
    return counts


def route(version: int, key: int | None = None) -> Route:
    return Route(version=version, otherwise=1, key=key)


def random_answers(seed: int, *, keyed: bool) -> list[Answers]:
    """Runs of one to four requests of one to three rows each; some fail, are slow, or have no finite value."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(300):
        number, version = int(random.integers(1, 5)), int(random.integers(1, 3))
        sizes = random.integers(1, 4, number).tolist()
        values = random.normal(size=(sum(sizes), int(random.integers(1, 3)))).astype(np.float32)
        values[random.random(values.shape) < 0.02] = np.nan
        of_version = 2 * random.integers(0, 25, number) + version  # a key has one version
        keys = of_version.tolist() if keyed else [None] * number
        found.append(
            Answers(
                [route(version, key) for key in keys],
                (random.random(number) > 0.1).tolist(),
                random.exponential(0.5, number).tolist(),
                None if random.random() < 0.1 else values,
                sizes if number > 1 else (),
            )
        )
    return found


@pytest.mark.parametrize("keyed", [False, True])
def test_counting_many_at_a_time_changes_no_count(*, keyed: bool) -> None:
    for seed in range(5):
        answers = random_answers(seed, keyed=keyed)
        # A run of several requests counts as each of them alone would.
        apart = [
            Answers((one,), (good,), (took_s,), values, ())
            for each in answers
            for one, good, took_s, values in zip(
                each.routes, each.good, each.took_s, rows_of(each), strict=True
            )
        ]

        alone = counted(*apart, together=False)

        assert counted(*answers, together=True) == counted(*answers, together=False) == alone
        assert sum(each.bad for each in alone.values()) > 30


def rows_of(answers: Answers) -> Sequence[np.ndarray | None]:
    """The rows of each request."""
    if answers.values is None:
        return [None] * len(answers.routes)
    ends = np.cumsum(answers.sizes or [len(answers.values)])
    return np.split(answers.values, ends[:-1])


def test_a_value_that_is_not_finite_makes_its_request_bad_and_no_other() -> None:
    values = np.array([[1.0], [np.inf], [3.0]], np.float32)
    run = Answers([route(2), route(2)], [True, True], [0.1, 0.1], values, [1, 2])

    found = counted(run, together=True)[2]

    assert (found.requests, found.bad, sum(found.predictions.values())) == (2, 1, 1)


def test_waiting_answers_are_bounded() -> None:
    waiting = WaitingAnswers()
    for _ in range(MOST_WAITING - 1):
        waiting.add(Answers((route(1),), (True,), (0.1,), None, ()))
    assert not waiting.are_many
    waiting.add(Answers((route(1),), (True,), (0.1,), None, ()))
    assert waiting.are_many
    assert waiting.count({}, StageKeys())
    assert not waiting.count({}, StageKeys())

    large = np.zeros((1, MOST_BYTES), np.float32)
    large[0, 7] = 1.0
    kept = numbers_of({"scores": large})
    assert kept is not None
    assert kept.tolist() == [7.0]


@pytest.mark.parametrize(
    ("output", "values"),
    [
        (np.array([[0.5], [2.0]], np.float32), [0.5, 2.0]),
        (np.array([[0.1, 0.9], [0.6, 0.4]], np.float32), [1.0, 0.0]),
        (np.array([3, 4]), [3.0, 4.0]),
        (np.array(7.0), [7.0]),
    ],
)
def test_what_is_predicted_is_a_number_or_a_class(output: np.ndarray, values: list[float]) -> None:
    found = numbers_of({"labels": np.array([b"a"], object), "scores": output})

    assert found is not None
    assert predictions_of(found).tolist() == values
    assert numbers_of({"labels": np.array([b"a"], object)}) is None
