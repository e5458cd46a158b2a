"""A queue of answers that are counted many at a time: a numpy call takes as long for one answer as for hundreds."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.rollout.counts.counted_keys import Once, StageKeys
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.statistics.histogram import buckets_of
from stoker.serve.routing import Route, RunRequests

MAX_WAITING = 1024
"""Maximum number of runs in the queue; counting this many takes about 1 ms."""

MAX_BYTES = 16 << 10
"""A run with a larger output, in bytes, is counted immediately, so that the queue holds little memory."""

Values = NDArray[Any]
"""A numeric output, [rows, ...]."""

Flags = NDArray[np.bool_]
"""One flag per request, [requests]."""

_NUMBERS = "fiub"
"""The `kind` characters of numeric numpy dtypes."""

_NO_VALUES = np.empty(0)


def one_request(route: Route, *, good: bool) -> RunRequests:
    """Return a run of one request that arrived at time 0, so that its end time is its duration.

    Args:
        route: The route of the request.
        good: Whether the answer came in time and with a successful status.
    """
    return RunRequests(
        came_s=(0.0,), routes=(route,), patience_s=(math.inf if good else -math.inf,)
    )


_Waiting = tuple[RunRequests, float, "np.dtype[Any]", tuple[int, ...], bytes]
"""A queued run: dtype, shape and bytes of its first numeric output. The arrays themselves are not kept, because freeing
the arrays of many runs later takes longer than copying their numbers. A tuple, because creating an object of a class
takes as long as the copy."""

_parts_of = attrgetter("routes", "came_s", "patience_s", "sizes")
_version_of, _counts_of, _key_of = map(attrgetter, ("version", "counts", "key"))


class WaitingAnswers:
    """Answers that wait to be counted, in their order; thread-safe.

    To add a run is a single call: a run of the model has replaced the content of the processor's caches, so each line
    of Python after it takes four times as long as in a tight loop.
    """

    def __init__(self, when_full: Callable[[], None]) -> None:
        """Start with an empty queue.

        Args:
            when_full: Called when the queue is full.
        """
        self._waiting: deque[_Waiting] = deque()
        self._when_full = when_full
        self.clear = self._waiting.clear
        """Empties the queue."""

        self._output = ""  # name of the first numeric output in the last run

    def add(self, requests: RunRequests, outputs: Mapping[str, Values], ended_s: float) -> None:
        """Add the answers of one run to the queue; the arguments are those of `Route.answered`."""
        values = outputs.get(self._output, _NO_VALUES)
        raw = values.tobytes()
        if not raw or values.dtype.kind not in _NUMBERS:
            self._output = first_of_numbers(outputs)
            values = outputs.get(self._output, _NO_VALUES)
            raw = values.tobytes()
        waiting = self._waiting
        waiting.append((requests, ended_s, values.dtype, values.shape, raw))
        if len(waiting) >= MAX_WAITING or len(raw) > MAX_BYTES:
            self._when_full()

    def count(
        self,
        counts: dict[int, VersionCounts],
        keys: StageKeys,
        *,
        slow_s: float = math.inf,
        times_count: bool = True,
    ) -> bool:
        """Count all queued answers and remove them from the queue; called by one thread at a time.

        Args:
            counts: Version -> its counts in the stage.
            keys: The keys that have already been counted in the stage.
            slow_s: Latency above which an answer is slow for at least one gate, seconds.
            times_count: Whether to count durations; False while a stage warms up.

        Returns:
            Whether any answer was counted.
        """
        take, number = self._waiting.popleft, len(self._waiting)  # other threads may add more
        taken = [take() for _ in range(number)]
        if not taken:
            return False
        requests, ended_s, dtypes, shapes, raw = zip(*taken, strict=True)
        by_run, came_s, patience_s, sizes = zip(*map(_parts_of, requests), strict=True)
        routes = list(chain.from_iterable(by_run))
        took_s = np.repeat(ended_s, list(map(len, by_run))) - _array(came_s)
        good = took_s <= _array(patience_s)
        rows, values = _predictions(sizes, shapes, dtypes, raw)
        owners = np.repeat(np.arange(len(rows)), rows)
        finite = np.isfinite(values)
        good[owners[~finite]] = False
        # A slow answer that is also bad still counts as slow, because it may have been counted as slow while it ran.
        slow = took_s > slow_s
        bad, timed, predicted = ~good, good | slow, good & (rows > 0)
        counted = np.array(list(map(_counts_of, routes)))
        bad &= counted
        timed &= counted
        predicted &= counted
        if set(map(_key_of, routes)) != {None}:
            _count_keys_once(
                keys, routes, bad=bad, slow=slow & counted, timed=timed, predicted=predicted
            )
        versions = np.array(list(map(_version_of, routes)))
        for version in np.unique(versions).tolist():
            found, its = counts.setdefault(version, VersionCounts()), versions == version
            found.requests += int((its & counted).sum())
            found.bad += int((its & bad).sum())
            of_rows = finite & (its & predicted)[owners]
            found.predictions.update(buckets_of(values[of_rows]).tolist())
            if times_count:
                found.latency.update(buckets_of(took_s[its & timed]).tolist())
        return True


def _count_keys_once(
    keys: StageKeys,
    routes: Sequence[Route],
    *,
    bad: Flags,
    slow: Flags,
    timed: Flags,
    predicted: Flags,
) -> None:
    """Of each key, count only the first slow, bad and predicted answer in the stage: clear the flags of later ones.

    Each array of flags has the shape [requests]. A later slow answer loses its flag in `timed`.
    """
    for at, route in enumerate(routes):
        if slow[at]:  # of each key, only the first slow answer is timed
            timed[at] = keys.is_first(route.key, Once.SLOW)
        if bad[at]:
            bad[at] = keys.is_first(route.key, Once.BAD)
        elif predicted[at]:
            predicted[at] = keys.is_first(route.key, Once.PREDICTED)


def _array(parts: Iterable[Sequence[float]]) -> NDArray[np.float64]:
    return np.array(list(chain.from_iterable(parts)))


def _predictions(
    sizes: Sequence[Sequence[int]],
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[np.dtype[Any]],
    raw: Sequence[bytes],
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the number of rows of each request, [requests], and the predictions of these rows, [rows].

    The number is 0 for a request whose output does not have one row per input row.

    Args:
        sizes: Number of rows of each request of each run, as in `RunRequests`.
        shapes: Shapes of the outputs of the runs.
        dtypes: Dtypes of the outputs of the runs.
        raw: Bytes of the outputs of the runs.
    """
    rows_of = {shape: shape[0] if shape else 1 for shape in set(shapes)}
    of_run = np.array(list(map(rows_of.__getitem__, shapes)))
    given = np.array(list(map(len, sizes)))
    fits = (given == 0) | (of_run == list(map(sum, sizes)))
    of_run[~fits] = 0
    requests = np.maximum(given, 1)
    rows = np.repeat(of_run, requests)
    of_several = np.repeat(given > 0, requests)
    rows[of_several] = list(chain.from_iterable(sizes))
    rows[np.repeat(~fits, requests)] = 0
    some = of_run > 0
    numbers, dtypes, raw = of_run[some], list(compress(dtypes, some)), list(compress(raw, some))
    kinds = set(zip(dtypes, (np.array(list(map(len, raw)), int) // numbers).tolist(), strict=True))
    if len(kinds) == 1:  # usually, one call handles all runs
        numbers, dtypes, raw = numbers.sum(keepdims=True), dtypes[:1], [b"".join(raw)]
    parts = [
        predictions_of(np.frombuffer(each, dtype).reshape(number, -1))
        for number, dtype, each in zip(numbers.tolist(), dtypes, raw, strict=True)
    ]
    return rows, np.concatenate([np.empty(0), *parts])


def first_of_numbers(outputs: Mapping[str, Values]) -> str:
    """Return the name of the first numeric output, in alphabetical order; empty if no output is numeric."""
    for name in sorted(outputs):
        if _holds_numbers(outputs[name]):
            return name
    return ""


def _holds_numbers(values: Values) -> bool:
    return values.dtype.kind in _NUMBERS and values.size > 0


def predictions_of(values: Values) -> NDArray[np.float64]:
    """Return the predicted number or class of each row, [rows].

    Args:
        values: [rows, ...] numbers.

    Returns:
        The number if a row has a single number, else the index of the largest; NaN if a number of the row is not
        finite.
    """
    table = values.reshape(len(values), -1).astype(np.float64)
    if table.shape[1] == 1:
        return table[:, 0]
    classes = table.argmax(1).astype(np.float64)
    classes[~np.isfinite(table).all(1)] = math.nan
    return classes
