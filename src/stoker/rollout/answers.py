"""Answers that wait to be counted: many at a time, since numpy takes as long for one as for hundreds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stoker.rollout.gates import VersionCounts
from stoker.rollout.histogram import buckets_of
from stoker.serve.routing import AnsweredRun, Route

MOST_WAITING = 128
"""Runs that wait at most; counting so many takes less than 1 ms."""

MOST_BYTES = 64 << 10
"""Output above which a run does not wait, so that little memory is held."""

MOST_KEYS = 1_000_000
"""Keys of a stage that are remembered, so that each counts once; further ones are not counted."""

Values = NDArray[Any]
"""[rows, ...] an output that holds numbers."""


@dataclass(slots=True)
class StageKeys:
    """The keys that have counted in a stage; each counts once for each gate."""

    bad: set[int] = field(default_factory=set)
    slow: set[int] = field(default_factory=set)
    predicted: set[int] = field(default_factory=set)


class Answer(NamedTuple):
    """The answer to one request."""

    route: Route
    """Where the request went."""

    good: bool
    """Whether it was answered in time, with a status of success."""

    took_s: float
    """Its duration, seconds."""

    outputs: Mapping[str, Values]
    """Output name -> array; empty if there are none."""


class _Answers(NamedTuple):
    """Answers of one run of one version that count."""

    routes: Sequence[Route]
    good: Sequence[bool]
    took_s: Sequence[float]
    values: Values | None
    """The first output that holds numbers, all rows of all requests; None if there is none."""

    sizes: Sequence[int]
    """How many rows each request has; empty if all are of one request."""


class WaitingAnswers:
    """Answers in the order in which they came; may be used by many threads.

    To let one wait is one call and one tuple: next to a run of a model, whose memory has replaced the processor's
    caches, each line of Python takes four times as long as in a loop of its own.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._waiting: deque[Answer | AnsweredRun] = deque()
        self.clear = self._waiting.clear
        """Forget all that wait."""

    def add(self, answer: Answer | AnsweredRun) -> bool:
        """Let answers wait.

        Returns:
            Whether all that wait must be counted now.
        """
        waiting = self._waiting
        waiting.append(answer)
        if len(waiting) >= MOST_WAITING:
            return True
        return any(values.nbytes > MOST_BYTES for values in answer.outputs.values())

    def count(
        self, counts: dict[int, VersionCounts], keys: StageKeys, *, slow_s: float = math.inf
    ) -> bool:
        """Count all that wait; by one thread at a time.

        Args:
            counts: version -> counts of the stage.
            keys: the keys that have counted in the stage.
            slow_s: time above which an answer is slow in the sense of at least one gate, seconds.

        Returns:
            Whether there were any.
        """
        by_version: dict[int, list[_Answers]] = {}
        for each in self._taken():
            for answers in _counting(each):
                by_version.setdefault(answers.routes[0].version, []).append(answers)
        for version, found in by_version.items():
            _count(found, counts.setdefault(version, VersionCounts()), keys, slow_s)
        return bool(by_version)

    def _taken(self) -> Iterator[Answer | AnsweredRun]:
        try:
            while True:  # others may add meanwhile
                yield self._waiting.popleft()
        except IndexError:
            return


def _counting(answer: Answer | AnsweredRun) -> list[_Answers]:
    """Those of some answers that count."""
    if isinstance(answer, Answer):
        values = numbers_of(answer.outputs)
        return [_Answers((answer.route,), (answer.good,), (answer.took_s,), values, ())]
    routes, sizes = answer.routes, answer.sizes
    values = numbers_of(answer.outputs)
    if sizes and values is not None and len(values) != sum(sizes):
        values = None
    took_s = [answer.ended_s - came_s for came_s in answer.came_s]
    good = [one <= most for one, most in zip(took_s, answer.patience_s, strict=True)]
    if all(route.counts for route in routes):
        return [_Answers(routes, good, took_s, values, sizes)]
    ends = np.cumsum(sizes or [0 if values is None else len(values)]).tolist()
    starts = [0, *ends]
    return [
        _Answers(
            (route,),
            (good[at],),
            (took_s[at],),
            None if values is None else values[starts[at] : ends[at]],
            (),
        )
        for at, route in enumerate(routes)
        if route.counts
    ]


def _count(
    waiting: Sequence[_Answers], counts: VersionCounts, keys: StageKeys, slow_s: float
) -> None:
    """Add answers of one version to its counts."""
    routes = [route for each in waiting for route in each.routes]
    took_s = np.array([one for each in waiting for one in each.took_s])
    values, rows = _predictions(waiting)
    owners = np.repeat(np.arange(len(routes)), rows)
    finite = np.isfinite(values)
    good = np.array([one for each in waiting for one in each.good], np.bool_)
    good[owners[~finite]] = False
    bad, timed, predicted = ~good, good.copy(), good.copy()
    if any(route.key is not None for route in routes):
        for at, route in enumerate(routes):
            if bad[at]:
                bad[at] = _is_first(route.key, keys.bad)
            else:
                # A client that is slow each time is one slow client.
                timed[at] = took_s[at] <= slow_s or _is_first(route.key, keys.slow)
                predicted[at] = bool(rows[at]) and _is_first(route.key, keys.predicted)
    counts.requests += len(routes)
    counts.bad += int(bad.sum())
    counts.latency.update(buckets_of(took_s[timed]).tolist())
    counts.predictions.update(buckets_of(values[predicted[owners] & finite]).tolist())


def _predictions(waiting: Sequence[_Answers]) -> tuple[NDArray[np.float64], list[int]]:
    """[rows] the predictions of all requests, one after the other; and how many each request has."""
    rows: list[int] = []
    found: list[Values] = []
    for each in waiting:
        if each.values is None:
            rows += [0] * len(each.routes)
            continue
        rows += each.sizes or [len(each.values)]
        found.append(each.values)
    if not found:
        return np.empty(0), rows
    if len({(values.dtype, values.shape[1:]) for values in found}) == 1:
        return predictions_of(np.concatenate(found)), rows
    return np.concatenate([predictions_of(values) for values in found]), rows


def _is_first(key: int | None, seen: set[int]) -> bool:
    if key is None:
        return True
    if key in seen or len(seen) >= MOST_KEYS:
        return False
    seen.add(key)
    return True


def numbers_of(outputs: Mapping[str, Values]) -> Values | None:
    """[rows, ...] the first output by name that holds numbers; None if no output does."""
    for name in sorted(outputs):
        values = outputs[name]
        if values.dtype.kind in "fiub" and values.size:
            return values if values.ndim else values.reshape(1)
    return None


def predictions_of(values: Values) -> NDArray[np.float64]:
    """[rows] the predicted number or class of each row.

    Args:
        values: [rows, ...] numbers.

    Returns:
        The number where there is one a row, else the index of the largest; NaN where one is not finite.
    """
    table = values.reshape(len(values), -1).astype(np.float64)
    if table.shape[1] == 1:
        return table[:, 0]
    classes = table.argmax(1).astype(np.float64)
    classes[~np.isfinite(table).all(1)] = math.nan
    return classes
