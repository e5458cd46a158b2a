"""Answers that wait to be counted: many at a time, since numpy takes as long for one as for hundreds."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.statistics.histogram import buckets_of
from stoker.serve.routing import AnsweredRun, Route

MOST_WAITING = 256
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


def one_answer(
    route: Route, *, good: bool, took_s: float, outputs: Mapping[str, Values] | None
) -> AnsweredRun:
    """The answer to one request as a run of its own; a bad one as one that nobody waited for.

    Args:
        route: where the request went.
        good: whether it was answered in time, with a status of success.
        took_s: its duration, seconds.
        outputs: output name -> array; None if there are none.
    """
    patience_s = math.inf if good else -math.inf
    return AnsweredRun((route,), (0.0,), (patience_s,), (), outputs or {}, took_s)


class WaitingAnswers:
    """Answers in the order in which they came; may be used by many threads.

    To let one wait is one call and one tuple: next to a run of a model, whose memory has replaced the processor's
    caches, each line of Python takes four times as long as in a loop of its own.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._waiting: deque[AnsweredRun] = deque()
        self.clear = self._waiting.clear
        """Forget all that wait."""

    def add(self, run: AnsweredRun) -> bool:
        """Let answers wait.

        Returns:
            Whether all that wait must be counted now.
        """
        waiting = self._waiting
        waiting.append(run)
        if len(waiting) >= MOST_WAITING:
            return True
        for values in run.outputs.values():  # noqa: SIM110 - `any` takes four times as long for one output
            if values.nbytes > MOST_BYTES:
                return True
        return False

    def count(
        self,
        counts: dict[int, VersionCounts],
        keys: StageKeys,
        *,
        slow_s: float = math.inf,
        times_count: bool = True,
    ) -> bool:
        """Count all that wait; by one thread at a time.

        Args:
            counts: version -> counts of the stage.
            keys: the keys that have counted in the stage.
            slow_s: time above which an answer is slow in the sense of at least one gate, seconds.
            times_count: whether durations count, which they do not while a stage warms up.

        Returns:
            Whether there were any.
        """
        by_version: dict[int, list[AnsweredRun]] = defaultdict(list)
        for run in self._taken():
            by_version[run.routes[0].version].append(run)
        for version, runs in by_version.items():
            took_s = _count(runs, counts.setdefault(version, VersionCounts()), keys, slow_s)
            if times_count:
                counts[version].latency.update(buckets_of(took_s).tolist())
        return bool(by_version)

    def _taken(self) -> Iterator[AnsweredRun]:
        try:
            while True:  # others may add meanwhile
                yield self._waiting.popleft()
        except IndexError:
            return


def _count(
    runs: Sequence[AnsweredRun], counts: VersionCounts, keys: StageKeys, slow_s: float
) -> NDArray[np.float64]:
    """Add answers of one version to its counts; return the durations that count, seconds."""
    by_run, came_s, patience_s, _, _, ended_s = zip(*runs, strict=True)
    routes = list(chain.from_iterable(by_run))
    took_s = np.repeat(ended_s, list(map(len, by_run))) - _array(came_s)
    good = took_s <= _array(patience_s)
    rows, values = _predictions(runs)
    owners = np.repeat(np.arange(len(good)), rows)
    finite = np.isfinite(values)
    good[owners[~finite]] = False
    # A bad answer that was slow stays slow: it may have counted while it ran.
    slow = took_s > slow_s
    bad, timed, predicted = ~good, good | slow, good
    each_counts = all(
        route.counts and route.key is None
        for route in dict(zip(map(id, routes), routes, strict=True)).values()
    )
    if not each_counts:
        timed, predicted = timed.copy(), good.copy()
        for at, route in enumerate(routes):
            if not route.counts:
                bad[at] = timed[at] = predicted[at] = False
                continue
            if slow[at]:  # a client that is slow each time is one slow client
                timed[at] = _is_first(route.key, keys.slow)
            if bad[at]:
                bad[at] = _is_first(route.key, keys.bad)
            else:
                predicted[at] = bool(rows[at]) and _is_first(route.key, keys.predicted)
    counts.requests += len(good) if each_counts else sum(route.counts for route in routes)
    counts.bad += int(bad.sum())
    counts.predictions.update(buckets_of(values[predicted[owners] & finite]).tolist())
    return took_s[timed]


def _array(parts: Iterable[Sequence[float]]) -> NDArray[np.float64]:
    return np.array(list(chain.from_iterable(parts)))


def _predictions(runs: Sequence[AnsweredRun]) -> tuple[list[int], NDArray[np.float64]]:
    """The number of rows of each request, and the prediction of each row."""
    rows: list[int] = []
    parts: list[Values] = []
    name = ""
    for run in runs:
        values = run.outputs.get(name)
        if values is None or not _holds_numbers(values):
            name = first_of_numbers(run.outputs)
            values = run.outputs.get(name)
        if values is not None and not values.ndim:
            values = values.reshape(1)
        sizes = run.sizes or (0 if values is None else len(values),)
        if values is None or len(values) != sum(sizes):
            sizes = (0,) * len(run.routes)
        else:
            parts.append(values)
        rows += sizes
    try:
        return rows, predictions_of(np.concatenate(parts))
    except ValueError:  # none, or rows of several shapes
        return rows, np.concatenate([np.empty(0), *map(predictions_of, parts)])


def _is_first(key: int | None, seen: set[int]) -> bool:
    if key is None:
        return True
    if key in seen or len(seen) >= MOST_KEYS:
        return False
    seen.add(key)
    return True


def first_of_numbers(outputs: Mapping[str, Values]) -> str:
    """The name of the first output by name that holds numbers; empty if no output does."""
    for name in sorted(outputs):
        if _holds_numbers(outputs[name]):
            return name
    return ""


def _holds_numbers(values: Values) -> bool:
    return values.dtype.kind in "fiub" and values.size > 0


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
