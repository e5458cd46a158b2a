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
from stoker.serve.routing import Route

MOST_WAITING = 1_024
"""Answers that wait at most; counting so many takes less than 1 ms."""

MOST_BYTES = 4_096
"""Largest output that is kept until it is counted; a larger one is reduced to its predictions at once."""

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


class Answers(NamedTuple):
    """What one run of one version answered."""

    routes: Sequence[Route]
    """Where each request went."""

    good: Sequence[bool]
    """Whether each was answered in time, with a status of success."""

    took_s: Sequence[float]
    """The duration of each, seconds."""

    values: Values | None
    """The first output that holds numbers, all rows of all requests; None if there is none."""

    sizes: Sequence[int]
    """How many rows each request has; empty if all are of one request."""


class WaitingAnswers:
    """Answers in the order in which they came; may be used by many threads."""

    def __init__(self) -> None:
        """Start without any."""
        self._waiting: deque[Answers] = deque()

    @property
    def are_many(self) -> bool:
        """Whether they have to be counted now."""
        return len(self._waiting) >= MOST_WAITING

    def add(self, answers: Answers) -> None:
        """Let answers wait."""
        self._waiting.append(answers)

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
        by_version: dict[int, list[Answers]] = {}
        for answers in self._taken():
            by_version.setdefault(answers.routes[0].version, []).append(answers)
        for version, each in by_version.items():
            _count(each, counts.setdefault(version, VersionCounts()), keys, slow_s)
        return bool(by_version)

    def _taken(self) -> Iterator[Answers]:
        try:
            while True:  # others may add meanwhile
                yield self._waiting.popleft()
        except IndexError:
            return


def _count(
    waiting: Sequence[Answers], counts: VersionCounts, keys: StageKeys, slow_s: float
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


def _predictions(waiting: Sequence[Answers]) -> tuple[NDArray[np.float64], list[int]]:
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


def numbers_of(outputs: Mapping[str, Values], *, rows: int | None = None) -> Values | None:
    """The first output by name that holds numbers, ready to be kept; None if no output does.

    Args:
        outputs: output name -> array.
        rows: how many rows it must have; any number if None.
    """
    for name in outputs if len(outputs) == 1 else sorted(outputs):
        values = outputs[name]
        if values.dtype.kind in "fiub" and values.size:
            values = values if values.ndim else values.reshape(1)
            if rows is not None and len(values) != rows:
                return None
            return values if values.nbytes <= MOST_BYTES else predictions_of(values)
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
