"""Answers are counted many at a time, with the same counts as one at a time."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from stoker.rollout.counts.counted_keys import StageKeys
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.routing.answers import (
    MAX_BYTES,
    MAX_WAITING,
    WaitingAnswers,
    first_of_numbers,
    one_request,
    predictions_of,
)
from stoker.rollout.statistics.histogram import buckets_of
from stoker.serve.routing import Outputs, Route, RunRequests

Run = tuple[RunRequests, Outputs, float]
"""Requests, the outputs of all of them, and when their run ended."""


def counted(*answers: Run, together: bool, slow_s: float = 1.0) -> dict[int, VersionCounts]:
    """The counts after all answers, counted at once or one after the other."""
    counts: dict[int, VersionCounts] = {}
    keys, waiting = StageKeys(), WaitingAnswers(lambda: None)
    for each in answers:
        waiting.add(*each)
        if not together:
            waiting.count(counts, keys, slow_s=slow_s)
    waiting.count(counts, keys, slow_s=slow_s)
    return counts


def route(version: int, key: int | None = None, *, counts: bool = True) -> Route:
    return Route(version=version, otherwise=1, key=key, counts=counts)


def random_runs(seed: int, *, keyed: bool) -> list[Run]:
    """Runs of one to four requests of one to three rows each; some are late, slow, or not finite."""
    random = np.random.default_rng(seed)
    found: list[Run] = []
    for _ in range(300):
        number, version = int(random.integers(1, 5)), int(random.integers(1, 3))
        sizes = random.integers(1, 4, number).tolist()
        values = random.normal(size=(sum(sizes), int(random.integers(1, 3)))).astype(np.float32)
        values[random.random(values.shape) < 0.02] = np.nan
        of_version = 2 * random.integers(0, 25, number) + version  # a key has one version
        keys = of_version.tolist() if keyed else [None] * number
        found.append(
            (
                RunRequests(
                    routes=[route(version, key, counts=random.random() > 0.1) for key in keys],
                    came_s=(9.0 - random.exponential(0.5, number)).tolist(),
                    patience_s=np.where(random.random(number) > 0.1, 30.0, 1e-9).tolist(),
                    sizes=sizes if number > 1 or random.random() < 0.5 else (),
                ),
                {} if random.random() < 0.1 else {"y": values},
                9.0,
            )
        )
    return found


def apart(run: Run) -> list[Run]:
    """The answers of a run as those of requests that were alone, without those that do not count."""
    requests, outputs_of_all, ended_s = run
    values = outputs_of_all.get("y")
    sizes = requests.sizes or [0 if values is None else len(values)]
    ends = np.cumsum(sizes).tolist()
    found: list[Run] = []
    for each, came_s, most_s, size, end in zip(
        requests.routes, requests.came_s, requests.patience_s, sizes, ends, strict=True
    ):
        took_s = ended_s - came_s
        outputs = {} if values is None else {"y": values[end - size : end]}
        if each.counts:
            found.append((one_request(each, good=took_s <= most_s), outputs, took_s))
    return found


@pytest.mark.parametrize("keyed", [False, True])
def test_counting_many_at_a_time_changes_no_count(*, keyed: bool) -> None:
    for seed in range(5):
        runs = random_runs(seed, keyed=keyed)
        alone = [answer for run in runs for answer in apart(run)]

        counts = counted(*alone, together=False)

        assert counted(*runs, together=True) == counts
        assert counted(*runs, together=False) == counts
        assert counted(*alone, together=True) == counts
        assert sum(each.bad for each in counts.values()) > 30


def test_a_value_that_is_not_finite_makes_its_request_bad_and_no_other() -> None:
    values = np.array([[1.0], [np.inf], [3.0]], np.float32)
    requests = RunRequests(
        routes=[route(2), route(2)], came_s=[0.0, 0.0], patience_s=[1.0, 1.0], sizes=[1, 2]
    )

    found = counted((requests, {"y": values}, 0.1), together=True)[2]

    assert (found.requests, found.bad, sum(found.predictions.values())) == (2, 1, 1)


def test_an_output_without_a_row_for_each_request_predicts_nothing() -> None:
    pair = RunRequests(
        routes=[route(2), route(2)], came_s=[0.0, 0.0], patience_s=[1.0, 1.0], sizes=[2, 2]
    )
    fitting, other = np.ones((4, 1), np.float32), np.ones((3, 1), np.float32)

    found = counted((pair, {"y": fitting}, 0.1), (pair, {"y": other}, 0.1), together=True)[2]

    assert (found.requests, found.bad, sum(found.predictions.values())) == (4, 0, 4)


def test_signatures_that_share_the_name_of_an_output_are_each_read_by_their_own() -> None:
    outputs = [
        {"y": np.array([[1.0]], np.float32)},
        {"y": np.array([b"text"], object), "z": np.array([2], np.int64)},
        {"y": np.empty((1, 0), np.float32)},
        {"y": np.array(3.0)},
        {},
    ]

    found = counted(
        *((one_request(route(1), good=True), each, 0.1) for each in outputs),
        together=True,
    )[1]

    assert (found.requests, found.bad, sum(found.latency.values())) == (5, 0, 5)
    assert found.predictions == Counter(buckets_of(np.array([1.0, 2.0, 3.0])).tolist())


def test_waiting_answers_are_bounded_in_number_and_in_memory() -> None:
    full: list[bool] = []
    waiting = WaitingAnswers(lambda: full.append(True))
    small = one_request(route(1), good=True)
    for _ in range(MAX_WAITING - 1):
        waiting.add(small, {}, 0.1)
    assert not full
    waiting.add(small, {}, 0.1)
    assert len(full) == 1
    assert waiting.count({}, StageKeys())
    assert not waiting.count({}, StageKeys())

    waiting.add(small, {"scores": np.zeros((1, MAX_BYTES), np.float32)}, 0.1)
    assert len(full) == 2
    waiting.clear()
    assert not waiting.count({}, StageKeys())


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
    outputs = {"labels": np.array([b"a"], object), "scores": output}

    assert first_of_numbers(outputs) == "scores"
    assert predictions_of(np.atleast_1d(output)).tolist() == values
    assert first_of_numbers({"labels": outputs["labels"]}) == ""
    counts = counted((one_request(route(1), good=True), outputs, 0.1), together=True)[1]
    assert sum(counts.predictions.values()) == len(values)
