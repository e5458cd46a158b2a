"""A queue of answers to be counted: many at a time, since numpy takes as long for one as for hundreds."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.rollout.counts.counted_keys import Once, StageKeys
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.statistics.histogram import buckets_of
from stoker.serve.routing import AnsweredRun, Route

MOST_WAITING = 1024
"""Most runs in the queue; counting this many takes about 1 ms."""

MOST_BYTES = 16 << 10
"""A run with a larger output is counted at once, so that the queue holds little memory."""

Values = NDArray[Any]
"""[rows, ...] a numeric output."""

_NUMBERS = "fiub"
"""Numeric kinds of dtypes."""

_NO_VALUES = np.empty(0)


def one_answer(
    route: Route, *, good: bool, took_s: float, outputs: Mapping[str, Values] | None
) -> AnsweredRun:
    """The answer to one request, as a run with a single request.

    Args:
        route: where the request went.
        good: whether it was answered in time and with a successful status.
        took_s: its duration, seconds.
        outputs: output name -> array; None if there are none.
    """
    patience_s = math.inf if good else -math.inf
    return AnsweredRun((route,), (0.0,), (patience_s,), (), outputs or {}, took_s)


_Waiting = tuple[
    Sequence[Route],
    Sequence[float],
    Sequence[float],
    Sequence[int],
    float,
    Any,
    tuple[int, ...],
    bytes,
]
"""A run that holds dtype, shape and bytes of its first numeric output instead of its arrays: freeing the arrays of many
runs later takes longer than copying their numbers. It is not a class, since creating one takes as long as the copy."""


class WaitingAnswers:
    """Answers in the order in which they came; thread-safe.

    Adding one is a single call: next to a run of a model, whose memory has replaced the processor's caches, each line
    of Python takes four times as long as in a loop of its own.
    """

    def __init__(self, when_full: Callable[[], None]) -> None:
        """Start with an empty queue.

        Args:
            when_full: called when the queue is full.
        """
        self._waiting: deque[_Waiting] = deque()
        self._when_full = when_full
        self.clear = self._waiting.clear
        """Empty the queue."""

        self._output = ""  # name of the first numeric output in the last run

    def add(self, run: AnsweredRun) -> None:
        """Add answers to the queue."""
        routes, came_s, patience_s, sizes, outputs, ended_s = run
        values = outputs.get(self._output, _NO_VALUES)
        raw = values.tobytes()
        if not raw or values.dtype.kind not in _NUMBERS:
            self._output = first_of_numbers(outputs)
            values = outputs.get(self._output, _NO_VALUES)
            raw = values.tobytes()
        waiting = self._waiting
        waiting.append(
            (routes, came_s, patience_s, sizes, ended_s, values.dtype, values.shape, raw)
        )
        if len(waiting) >= MOST_WAITING or len(raw) > MOST_BYTES:
            self._when_full()

    def count(
        self,
        counts: dict[int, VersionCounts],
        keys: StageKeys,
        *,
        slow_s: float = math.inf,
        times_count: bool = True,
    ) -> bool:
        """Count all queued answers; called by one thread at a time.

        Args:
            counts: version -> counts of the stage.
            keys: the keys that have counted in the stage.
            slow_s: time above which an answer is slow for at least one gate, seconds.
            times_count: whether durations count; they do not while a stage warms up.

        Returns:
            Whether any answer was counted.
        """
        by_version: dict[int, list[_Waiting]] = defaultdict(list)
        for run in self._taken():
            by_version[run[0][0].version].append(run)
        for version, runs in by_version.items():
            took_s = _count(runs, counts.setdefault(version, VersionCounts()), keys, slow_s)
            if times_count:
                counts[version].latency.update(buckets_of(took_s).tolist())
        return bool(by_version)

    def _taken(self) -> Iterator[_Waiting]:
        try:
            while True:  # other threads may add answers meanwhile
                yield self._waiting.popleft()
        except IndexError:
            return


def _count(
    runs: Sequence[_Waiting], counts: VersionCounts, keys: StageKeys, slow_s: float
) -> NDArray[np.float64]:
    """Add answers of one version to its counts; return the durations that count, seconds."""
    by_run, came_s, patience_s, sizes, ended_s, *arrays = zip(*runs, strict=True)
    routes = list(chain.from_iterable(by_run))
    took_s = np.repeat(ended_s, list(map(len, by_run))) - _array(came_s)
    good = took_s <= _array(patience_s)
    by_request = list(map(_rows, by_run, sizes, arrays[1]))
    rows = list(chain.from_iterable(by_request))
    values = _predictions(list(map(sum, by_request)), arrays[0], arrays[2])
    owners = np.repeat(np.arange(len(good)), rows)
    finite = np.isfinite(values)
    good[owners[~finite]] = False
    # A slow answer that turned out bad still counts as slow: it may have been counted while it ran.
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
            if slow[at]:  # a client whose requests are all slow counts as one slow client
                timed[at] = keys.is_first(route.key, Once.SLOW)
            if bad[at]:
                bad[at] = keys.is_first(route.key, Once.BAD)
            else:
                predicted[at] = bool(rows[at]) and keys.is_first(route.key, Once.PREDICTED)
    counts.requests += len(good) if each_counts else sum(route.counts for route in routes)
    counts.bad += int(bad.sum())
    counts.predictions.update(buckets_of(values[predicted[owners] & finite]).tolist())
    return took_s[timed]


def _array(parts: Iterable[Sequence[float]]) -> NDArray[np.float64]:
    return np.array(list(chain.from_iterable(parts)))


def _rows(routes: Sequence[Route], sizes: Sequence[int], shape: tuple[int, ...]) -> Sequence[int]:
    """The number of rows of each request of a run; 0 if its output has no row for each."""
    number = shape[0] if shape else 1
    sizes = sizes or (number,)
    return sizes if sum(sizes) == number else (0,) * len(routes)


def _predictions(
    rows: Sequence[int], dtypes: Sequence[np.dtype[Any]], raw: Sequence[bytes]
) -> NDArray[np.float64]:
    """[rows] the prediction of each row, for consecutive runs."""
    kinds = {
        (dtype, len(each) // number)
        for number, dtype, each in zip(rows, dtypes, raw, strict=True)
        if number
    }
    if len(kinds) == 1:  # usually one call for all
        ((dtype, _),) = kinds
        rows, dtypes, raw = [sum(rows)], [dtype], [b"".join(raw)]
    parts = [
        predictions_of(np.frombuffer(each, dtype).reshape(number, -1))
        for number, dtype, each in zip(rows, dtypes, raw, strict=True)
        if number
    ]
    return np.concatenate([np.empty(0), *parts])


def first_of_numbers(outputs: Mapping[str, Values]) -> str:
    """The name of the first numeric output in the order of names; empty if no output is numeric."""
    for name in sorted(outputs):
        if _holds_numbers(outputs[name]):
            return name
    return ""


def _holds_numbers(values: Values) -> bool:
    return values.dtype.kind in _NUMBERS and values.size > 0


def predictions_of(values: Values) -> NDArray[np.float64]:
    """[rows] the predicted number or class of each row.

    Args:
        values: [rows, ...] numbers.

    Returns:
        The number if a row has a single one, else the index of the largest; NaN where one is not finite.
    """
    table = values.reshape(len(values), -1).astype(np.float64)
    if table.shape[1] == 1:
        return table[:, 0]
    classes = table.argmax(1).astype(np.float64)
    classes[~np.isfinite(table).all(1)] = math.nan
    return classes
