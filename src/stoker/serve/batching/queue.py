"""The queue of a signature: a request runs at once if the model is idle; requests that had to wait are joined.

The queue has no thread and no timer. The first request runs the model in its own thread; requests that arrive during
the run wait. When the run ends, the oldest of them leads the next batch: its thread runs the model for all.
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
"""Maximum usual duration of a run for which the event loop may wait, seconds. Other requests wait meanwhile."""

_GROWTH = 1.5
"""Maximum factor by which one run can raise the estimate of the usual duration."""

_NOT_BY_ROWS = "an output does not have one row for each row of the inputs"

COMPARED_WITH_SINGLE = 3
"""Number of joined batches of each signature whose requests also run one by one, before joined answers are trusted."""


@dataclass(eq=False, kw_only=True, slots=True)
class Request:
    """One request in the queue."""

    inputs: Sequence[Array]
    """The inputs in the signature's order."""

    rows: int
    """Rows of every input, at least 1."""

    key: Key
    """Requests with equal keys can be joined."""

    deadline: Deadline
    """How long its client waits."""

    came_s: float = field(default_factory=time.monotonic)
    """When it arrived, seconds of the monotonic clock."""

    woken: threading.Event = field(default_factory=threading.Event)
    """Set when its outcome is known, or when it must lead the next batch."""

    leads: bool = False
    """Whether its thread must run the next batch."""

    outcome: Outputs | Exception | None = None
    """Its answer, or the error that it gets instead; None: not known yet."""

    def result(self) -> Outputs:
        """Return its answer.

        Raises:
            Exception: the error that it gets instead of an answer.
        """
        if self.outcome is None:
            raise ServeError(Code.INTERNAL, "the batch ended without an answer")
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Queue:
    """The queue of one signature of a model; thread-safe."""

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
            run: Runs the model.
            config: Limits of batches and of the queue.
            name: Name of model and signature in the log.
            metrics: The metrics to update; None: no metrics.
            model_name: Label of the metrics.
            runs: Detects runs that do not end; None: runs are not watched.
            may_not_end: Whether a run could last forever; with `runs`, each run then gets a thread of its own.
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
        self._compared = 0
        self._trusted = True
        self._usual_s = math.inf
        self.quick_runs = 0  # runs that took at most QUICK_S
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def joins(self) -> bool:
        """Whether requests are still joined: False after a joined answer differed from the single answer."""
        return self._trusted

    @property
    def max_batch_size(self) -> int:
        """Maximum number of rows of a run."""
        return self._config.max_batch_size

    def submit(self, request: Request) -> Outputs:
        """Answer a request, alone or together with others.

        Raises:
            ServeError: too many requests wait, or the client no longer waits.
            Exception: the error that the model raised for this request.
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
            request.leads = False  # its thread waits like the threads of other requests
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
        """Whether runs are usually so short that the event loop may wait for one."""
        return self._trusted and not self._may_wait and self._usual_s <= QUICK_S

    def run_now(self, arrays: Sequence[Array], sizes: Sequence[int]) -> Outputs | None:
        """Run the model for the rows of several requests, if it is idle.

        Args:
            arrays: The inputs in the signature's order; each has the rows of all requests.
            sizes: Number of rows of each request.

        Returns:
            The outputs; None if the model is busy, or requests must not be joined.

        Raises:
            Exception: the error that the model raised.
        """
        with self._lock:  # the same lock as `_changed`; entering it directly is faster
            free = self._running < self._config.num_batch_threads and not self._waiting
            if self._stuck or not free:
                return None
            self._running += 1
        try:
            with self._watched(()):
                if len(sizes) > 1 and not self._check_joined(arrays, sizes):
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
        # Only a run that succeeded is counted here. After a failure, each request runs and is counted alone.
        self._count((), sizes, size)
        return outputs

    def _check_joined(self, arrays: Sequence[Array], sizes: Sequence[int]) -> bool:
        """Compare the first joined answers with single answers; return whether requests may be joined."""
        variable = self._config.pad_variable_length_inputs
        if self._compared < COMPARED_WITH_SINGLE and not variable:
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
        """Wait until the outcome is known, the request must lead, or the deadline has passed."""
        left_s = request.deadline.left_s
        if request.woken.wait(min(left_s, threading.TIMEOUT_MAX) if left_s > 0 else 0.0):
            return
        with self._changed:
            if request in self._waiting:
                self._waiting.remove(request)
            elif request.leads:  # it was just chosen as leader: the next request leads instead
                self._pass_on()
            request.leads = False
            request.outcome = request.deadline.lost() or ServeError(
                Code.DEADLINE_EXCEEDED, "Deadline exceeded before the model ran"
            )

    def _drop(self, request: Request) -> None:
        """Remove a request from the queue, because its client has gone. If it runs already, the run continues."""
        with self._changed:
            waits = request in self._waiting
            if waits:
                self._waiting.remove(request)
            # A request that runs in another thread (`_apart`) need not wait for the end of the run.
            if waits or self._apart:
                request.outcome = request.deadline.lost()
                request.woken.set()

    def _lead_on(self, request: Request) -> None:
        """Run one batch after the other, in a thread that does not belong to a request."""
        following: Request | None = request
        while following is not None:
            following = self._lead(following)

    def _lead(self, request: Request) -> Request | None:
        """Run the batch that a request leads.

        Returns:
            The leader of the next batch, if this thread must run that batch; else None.
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
                mate.woken.set()
        return following

    def _watched(self, batch: Sequence[Request]) -> AbstractContextManager[None]:
        if self._runs is None:
            return nullcontext()
        return self._runs.watched(lambda: self._give_up(batch))

    def _give_up(self, batch: Sequence[Request]) -> None:
        """Fail all requests of the batch and of the queue, and accept no more: the run will not end."""
        with self._changed:
            self._stuck = True
            for request in [*batch, *self._waiting]:
                request.outcome = request.outcome or stuck_error()
                request.woken.set()
            self._waiting.clear()

    def _pass_on(self) -> Request | None:
        """Let the oldest waiting request lead, or mark the model idle. The caller holds the lock.

        Returns:
            The request, if this thread must run its batch; None if the request's own thread does, or no request waits.
        """
        while self._waiting:
            following = self._waiting.popleft()
            following.outcome = following.deadline.lost()
            if self._apart and following.outcome is None:
                return following
            following.leads = following.outcome is None
            following.woken.set()
            if following.leads:
                return None
        self._running -= 1
        return None

    def _gather(self, leader: Request) -> list[Request]:
        """Take the requests that fit in the leader's batch from the queue; return the batch in order of arrival."""
        max_rows = self._config.max_batch_size
        timeout_s = self._config.batch_timeout_micros / 1e6
        batch, rows = [leader], leader.rows
        with self._changed:
            left_s = min(leader.came_s + timeout_s - time.monotonic(), leader.deadline.left_s)
            if timeout_s and left_s > 0:
                self._changed.wait_for(lambda: self._rows_like(leader) >= max_rows, left_s)
            for other in [found for found in self._waiting if found.key == leader.key]:
                if not self._trusted or rows + other.rows > max_rows:
                    break
                self._waiting.remove(other)
                other.outcome = other.deadline.lost()
                if other.outcome is not None:
                    other.woken.set()
                    continue
                batch.append(other)
                rows += other.rows
        return batch

    def _rows_like(self, leader: Request) -> int:
        return leader.rows + sum(other.rows for other in self._waiting if other.key == leader.key)

    def _run(self, batch: Sequence[Request]) -> None:
        """Run a batch and set the outcome of each request. An error of one request affects only that request."""
        rows = sum(request.rows for request in batch)
        size = self._config.padded(rows) if self._trusted else rows
        self._count([r.came_s for r in batch], [r.rows for r in batch], size)
        began_s = time.monotonic()
        self._run_padded(batch, rows, size)
        self._took(time.monotonic() - began_s)

    def _took(self, seconds: float) -> None:
        """Update the estimate of a run's usual duration after a run."""
        self.quick_runs += seconds <= QUICK_S
        if self._usual_s == math.inf:
            self._usual_s = seconds
        else:  # one slow run (a busy machine, a new size) changes the usual duration only a little
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
        if self._compared < COMPARED_WITH_SINGLE and not self._config.pad_variable_length_inputs:
            self._compare_with_single(batch)

    def _compare_with_single(self, batch: Sequence[Request]) -> None:
        """Also answer each request alone, and use these answers. If they differ from the joined ones, stop joining."""
        self._compared += 1
        alone = self._refilled if self._config.only_allowed_sizes else self._single
        for request in batch:
            single, joined = alone(request), request.outcome
            request.outcome = single
            if isinstance(single, Exception) or isinstance(joined, Exception) or joined is None:
                continue
            if not agree(joined, single):
                self._distrust("a joined answer differs from the single answer")

    def _distrust(self, reason: str) -> None:
        if self._trusted:
            _log.warning("%s: requests are no longer joined, because %s", self._name, reason)
        self._trusted = False

    def _single(self, request: Request) -> Outputs | Exception:
        try:
            return self._run_model(request.inputs)
        except Exception as error:  # noqa: BLE001 - it is raised in the request's thread
            return error

    def _refilled(self, request: Request) -> Outputs | Exception:
        """Run the request alone, padded with its last row to a size that was run before.

        A joined batch is filled with a first row or with other requests, so an answer that depends on the filling
        differs.
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
            came_s: When each request entered the queue, seconds of the monotonic clock; empty if none had to wait.
            sizes: Number of rows of each request.
            size: Number of rows of the batch, padding included.
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
    """The metrics that each batch updates."""

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
