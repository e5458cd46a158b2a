"""The requests to one signature: run at once if it is idle, joined if they had to wait.

The queue has no thread and no timer. The first request runs the model in its own thread;
those that come meanwhile wait. When it ends, one of them leads the next batch, of all that waited.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np

from stoker.serve.batching.config import BatchingConfig
from stoker.serve.batching.joined import (
    Array,
    Key,
    NotByRowsError,
    Outputs,
    agree,
    cut,
    join,
    key_of,
    rows_of,
)
from stoker.serve.deadline import Deadline
from stoker.serve.errors import Code, ServeError
from stoker.serve.observability.counters import COUNTING, Count, Spread
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.runtime.stuck_call_watchdog import Runs, stuck_error

_log = logging.getLogger(__name__)

Run = Callable[[Sequence[Array]], Outputs]
"""Runs the model once on inputs in the signature's order."""

QUICK_S = 1e-3
"""Usual duration up to which the event loop may wait for a run, although it serves others too."""

_GROWTH = 1.5
"""Most by which one run can raise the estimate of the usual duration."""

_NOT_BY_ROWS = "an output does not have one row for each row of the inputs"

HELD_AGAINST_SINGLE = 3
"""Number of joined batches of each signature that are also run one by one, before joining is trusted."""


@dataclass(eq=False, kw_only=True, slots=True)
class Request:
    """One request in the queue."""

    inputs: Sequence[Array]
    """The inputs in the signature's order."""

    rows: int
    """Rows of every input, at least 1."""

    key: Key
    """What must be equal in requests that it is joined with."""

    deadline: Deadline
    """How long its client waits."""

    came_s: float = field(default_factory=time.monotonic)
    """When it arrived, by the monotonic clock."""

    told: threading.Event = field(default_factory=threading.Event)
    """Set when its outcome is known, or when it must lead the next batch."""

    leads: bool = False
    """Whether its thread must run the next batch."""

    outcome: Outputs | Exception | None = None
    """Its answer, or the reason why it has none."""

    def result(self) -> Outputs:
        """Its answer.

        Raises:
            Exception: the reason why it has no answer.
        """
        if self.outcome is None:
            raise ServeError(Code.INTERNAL, "the batch ended without an answer")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Queue:
    """The requests to one signature of one model; thread-safe."""

    def __init__(
        self,
        run: Run,
        config: BatchingConfig,
        *,
        name: str,
        metrics: ServeMetrics | None,
        model_name: str = "",
        runs: Runs | None = None,
        may_not_end: bool = False,
    ) -> None:
        """Create an empty queue.

        Args:
            run: The model.
            config: The limits.
            name: For the log.
            metrics: The counts.
            model_name: For the counts.
            runs: Watches over every run; None: runs are not watched.
            may_not_end: Whether a run gets a thread of its own; only with `runs`.
        """
        self._model_name = model_name
        self._runs = runs
        self._apart = may_not_end and runs is not None
        self._may_wait = may_not_end or config.batch_timeout_micros > 0
        self._stuck = False
        self._run_model = run
        self._config = config
        self._name = name
        self._metrics = metrics
        self._counts = None if metrics is None else _counts_of(metrics)
        self._waiting: deque[Request] = deque()
        self._running = 0
        self._held = 0
        self._trusted = True
        self._usual_s = math.inf
        self.quick_runs = 0  # runs that took at most QUICK_S
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def joins(self) -> bool:
        """Whether requests are still joined: not after a joined answer differed from the single one."""
        return self._trusted

    @property
    def max_batch_size(self) -> int:
        """The most rows of one run."""
        return self._config.max_batch_size

    def submit(self, request: Request) -> Outputs:
        """Answer a request, alone or together with others.

        Raises:
            ServeError: too many requests wait, or the client waits no longer.
            Exception: what the model raised on this request.
        """
        with self._changed:
            if self._stuck:
                raise stuck_error()
            if self._running < self._config.num_batch_threads:
                self._running += 1
                request.leads = True
            else:
                self._check_room(request)
                self._waiting.append(request)
                self._changed.notify_all()  # a leader may be waiting for more requests
        if self._apart and request.leads:
            assert self._runs is not None
            request.leads = False  # its thread waits like those of the others
            self._runs.start(lambda: self._lead_on(request))
        if not request.leads:
            request.deadline.when_cancelled(lambda: self._drop(request))
            with self._queued():
                self._wait(request)
        if request.leads:
            self._lead(request)
        return request.result()

    @property
    def is_quick(self) -> bool:
        """Whether a run is short enough to wait for it in the event loop."""
        return self._trusted and not self._may_wait and self._usual_s <= QUICK_S

    def run_now(self, arrays: Sequence[Array], sizes: Sequence[int]) -> Outputs | None:
        """Run the model for the rows of several requests without waiting, if it is free.

        Args:
            arrays: The inputs in the signature's order, each of the rows of all requests.
            sizes: How many rows each request has.

        Returns:
            The outputs; None if the model is busy, or requests must not be joined.

        Raises:
            Exception: what the model raised.
        """
        with self._lock:  # like `_changed`, whose own entry takes longer
            free = self._running < self._config.num_batch_threads and not self._waiting
            if self._stuck or not free:
                return None
            self._running += 1
        try:
            with self._watched(()):
                if len(sizes) > 1 and not self._prove(arrays, sizes):
                    return None
                return self._run_at_once(arrays, sizes)
        finally:
            with self._lock:
                self._pass_on()

    def _run_at_once(self, arrays: Sequence[Array], sizes: Sequence[int]) -> Outputs | None:
        rows = sum(sizes)
        size = self._config.padded(rows)
        began_s = time.monotonic()
        outputs = self._run_model(arrays if size == rows else join([arrays], size=size))
        shared = size > rows or len(sizes) > 1
        if shared and any(array.shape[:1] != (size,) for array in outputs.values()):
            self._distrust(_NOT_BY_ROWS)
            return None
        if size > rows:
            outputs = {name: array[:rows] for name, array in outputs.items()}
        self._took(time.monotonic() - began_s)
        # If it fails, each request is run again alone, and counted there.
        self._count((), sizes, size)
        return outputs

    def _prove(self, arrays: Sequence[Array], sizes: Sequence[int]) -> bool:
        """Compare the first joined answers with single ones; return whether requests may be joined."""
        variable = self._config.pad_variable_length_inputs
        if self._held < HELD_AGAINST_SINGLE and not variable:
            key, parts, first = key_of(arrays, variable=variable), [], 0
            for size in sizes:
                part = [array[first : first + size] for array in arrays]
                first += size
                parts.append(Request(inputs=part, rows=size, key=key, deadline=Deadline()))
            rows = sum(sizes)
            self._run_padded(parts, rows, self._config.padded(rows))
        return self._trusted

    def run_alone(self, inputs: Sequence[Array]) -> Outputs:
        """Run the model outside of the queue, for a request that is not joined with others."""
        rows = rows_of(inputs)
        self._count((), (rows,), rows)
        return self._run_model(inputs)

    def _check_room(self, request: Request) -> None:
        rows = request.rows + sum(other.rows for other in self._waiting)
        batches = -(-rows // self._config.max_batch_size)
        if batches > self._config.max_enqueued_batches:
            raise ServeError(
                Code.UNAVAILABLE,
                "The batch scheduling queue to which this task was submitted is full",
            )

    def _wait(self, request: Request) -> None:
        """Wait for the outcome, for the turn to lead, or until the deadline has passed."""
        left_s = request.deadline.left_s
        if request.told.wait(min(left_s, threading.TIMEOUT_MAX) if left_s > 0 else 0.0):
            return
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
            elif request.leads:  # it was just chosen as leader: it passes the turn on
                self._pass_on()
            request.leads = False
            request.outcome = request.deadline.lost() or ServeError(
                Code.DEADLINE_EXCEEDED, "Deadline exceeded before the model ran"
            )

    def _drop(self, request: Request) -> None:
        """Remove a request whose client has gone; a running one continues."""
        with self._changed:
            waits = request in self._waiting
            if waits:
                self._waiting.remove(request)
            if waits or self._apart:  # the run is in another thread, which this one leaves
                request.outcome = request.deadline.lost()
                request.told.set()

    def _lead_on(self, request: Request) -> None:
        """Run one batch after the other, in a thread that belongs to none of the requests."""
        following: Request | None = request
        while following is not None:
            following = self._lead(following)

    def _lead(self, request: Request) -> Request | None:
        """Run the batch of a request.

        Returns:
            The first request of the next batch, if this thread runs it; else None.
        """
        batch = [request]
        try:
            batch = self._gather(request)
            began_s = time.monotonic()
            with self._watched(batch):
                self._run(batch)
            ended_s = time.monotonic()
            for mate in batch:
                mate.deadline.record.ran(began_s, ended_s, came_s=mate.came_s)
        finally:
            with self._changed:
                following = self._pass_on()
            for mate in batch if self._apart else batch[1:]:
                mate.told.set()
        return following

    def _watched(self, batch: Sequence[Request]) -> AbstractContextManager[None]:
        if self._runs is None:
            return nullcontext()
        return self._runs.watched(lambda: self._give_up(batch))

    def _give_up(self, batch: Sequence[Request]) -> None:
        """Fail all waiting requests and accept no more, because the run will not end."""
        with self._changed:
            self._stuck = True
            for request in [*batch, *self._waiting]:
                request.outcome = request.outcome or stuck_error()
                request.told.set()
            self._waiting.clear()

    def _pass_on(self) -> Request | None:
        """Let the oldest request lead, or mark the model idle; the caller holds the lock.

        Returns:
            The request, if this thread runs its batch; None if its own thread does, or no request waits.
        """
        while self._waiting:
            following = self._waiting.popleft()
            following.outcome = following.deadline.lost()
            if self._apart and following.outcome is None:
                return following
            following.leads = following.outcome is None
            following.told.set()
            if following.leads:
                return None
        self._running -= 1
        return None

    def _gather(self, leader: Request) -> list[Request]:
        """The leader and all requests that can join it, in the order in which they arrived."""
        most = self._config.max_batch_size
        timeout_s = self._config.batch_timeout_micros / 1e6
        batch, rows = [leader], leader.rows
        with self._changed:
            left_s = min(leader.came_s + timeout_s - time.monotonic(), leader.deadline.left_s)
            if timeout_s and left_s > 0:
                self._changed.wait_for(lambda: self._rows_like(leader) >= most, left_s)
            for other in [found for found in self._waiting if found.key == leader.key]:
                if not self._trusted or rows + other.rows > most:
                    break
                self._waiting.remove(other)
                other.outcome = other.deadline.lost()
                if other.outcome is not None:
                    other.told.set()
                    continue
                batch.append(other)
                rows += other.rows
        return batch

    def _rows_like(self, leader: Request) -> int:
        return leader.rows + sum(other.rows for other in self._waiting if other.key == leader.key)

    def _run(self, batch: Sequence[Request]) -> None:
        """Set the outcome of each request; an error of one request affects only that request."""
        rows = sum(request.rows for request in batch)
        size = self._config.padded(rows) if self._trusted else rows
        self._count([r.came_s for r in batch], [r.rows for r in batch], size)
        began_s = time.monotonic()
        self._run_padded(batch, rows, size)
        self._took(time.monotonic() - began_s)

    def _took(self, seconds: float) -> None:
        """Update the usual duration of a run."""
        self.quick_runs += seconds <= QUICK_S
        if self._usual_s == math.inf:
            self._usual_s = seconds
        else:  # an outlier (a busy machine, a new size) does not change the usual duration
            usual_s = self._usual_s + (seconds - self._usual_s) / 4
            self._usual_s = min(usual_s, self._usual_s * _GROWTH)

    def _run_padded(self, batch: Sequence[Request], rows: int, size: int) -> None:
        if len(batch) == 1 and size == rows:
            batch[0].outcome = self._single(batch[0])
            return
        try:
            inputs = join([request.inputs for request in batch], size=size)
            answers = cut(self._run_model(inputs), [request.rows for request in batch], size=size)
        except Exception as error:  # noqa: BLE001 - each request runs alone and gets its own
            if isinstance(error, NotByRowsError):
                self._distrust(_NOT_BY_ROWS)
            for request in batch:
                request.outcome = self._single(request)
            return
        for request, answer in zip(batch, answers, strict=True):
            request.outcome = answer
        if self._held < HELD_AGAINST_SINGLE and not self._config.pad_variable_length_inputs:
            self._hold_against_single(batch)

    def _hold_against_single(self, batch: Sequence[Request]) -> None:
        """Also answer each request alone; if the answers differ, the single ones count from now on."""
        self._held += 1
        alone = self._refilled if self._config.only_allowed_sizes else self._single
        for request in batch:
            single, joined = alone(request), request.outcome
            request.outcome = single
            if isinstance(single, Exception) or isinstance(joined, Exception) or joined is None:
                continue
            if not agree(joined, single):
                self._distrust("a joined answer differs from the single one")

    def _distrust(self, reason: str) -> None:
        if self._trusted:
            _log.warning("%s: requests are not joined any more, as %s", self._name, reason)
        self._trusted = False

    def _single(self, request: Request) -> Outputs | Exception:
        try:
            return self._run_model(request.inputs)
        except Exception as error:  # noqa: BLE001 - it is raised in the request's thread
            return error

    def _refilled(self, request: Request) -> Outputs | Exception:
        """Run the request alone, padded with its last row to a size that was run before.

        Joined requests were padded with a first row, or with other requests. An answer that depends
        on the padding differs.
        """
        size = self._config.padded(request.rows)
        times = [1] * (request.rows - 1) + [1 + size - request.rows]
        try:
            filled = [np.repeat(array, times, axis=0) for array in request.inputs]
            return cut(self._run_model(filled), [request.rows], size=size)[0]
        except Exception as error:  # noqa: BLE001 - it is raised in the request's thread
            return error

    def _queued(self) -> AbstractContextManager[None]:
        if self._metrics is None:
            return nullcontext()
        return self._metrics.queued_requests.held(model_name=self._model_name)

    def _count(self, came_s: Sequence[float], sizes: Sequence[int], size: int) -> None:
        """Count a batch.

        Args:
            came_s: When each of its requests entered the queue; empty if none had to wait.
            sizes: The rows of each.
            size: Rows of the batch, padding included.
        """
        counts = self._counts
        if counts is None:
            return
        now_s = time.monotonic()
        with COUNTING:
            for each_s in came_s:
                counts.waited_us.put((now_s - each_s) * 1e6)
            if not came_s:
                counts.waited_us.put(0.0, times=len(sizes))
            for each in sizes:
                counts.request_rows.put(each)
            counts.batches.put()
            counts.batch_rows.put(size)
            counts.filling_rows.put(size - sum(sizes))


@dataclass(frozen=True, slots=True)
class _Counts:
    """What is counted of each batch."""

    waited_us: Spread
    request_rows: Spread
    batches: Count
    batch_rows: Spread
    filling_rows: Spread


def _counts_of(metrics: ServeMetrics) -> _Counts:
    return _Counts(
        metrics.queuing_latency.of(),
        metrics.input_batch_size.of(),
        metrics.wrapped_run_count.of(),
        metrics.processed_batch_size.of(),
        metrics.padding_size.of(),
    )
