"""Distributes batches to free workers and collects their results at the server."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

from stoker.train.parameter_server.cluster import ClusterConnection
from stoker.train.parameter_server.server import Inbox, PassTotals

CALLS_PER_WORKER = 4
"""Number of calls per worker in progress: one is computed, and the next ones are prepared. More calls would
keep more batches in memory, and use older weights."""

_LOG = logging.getLogger(__name__)


class WorkerCalls:
    """Runs calls on the workers of a run."""

    def __init__(self, connection: ClusterConnection, *, silent_s: float) -> None:
        """Start the threads that wait for calls.

        Args:
            connection: The connection to the workers.
            silent_s: A warning is logged if no worker answers for this time, seconds.
        """
        self._coordinator = connection.coordinator
        self._most = CALLS_PER_WORKER * connection.workers
        self._silent_s = silent_s
        self._handed_out: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(self._most):
            threading.Thread(target=self._wait, name="stoker-ps-call", daemon=True).start()

    def each(
        self, function: Callable[..., Any], arguments: Iterable[tuple[Any, ...]]
    ) -> Iterator[None]:
        """Call a function once for each element of `arguments`, and yield whenever calls have ended.

        If a worker dies, its calls are repeated by another worker, or by the same one when it has returned.

        Args:
            function: A `tf.function` that returns nothing.
            arguments: Arguments of each call; they are read only when a call can be started.

        Raises:
            tf.errors.OpError: The function failed.
        """
        under_way = 0
        for each in arguments:
            if under_way == self._most:
                under_way -= self._ended()
                yield
            self._handed_out.put(self._coordinator.schedule(function, args=each))
            under_way += 1
        while under_way:
            under_way -= self._ended()
            yield

    def _wait(self) -> None:
        while True:
            remote = self._handed_out.get()
            try:
                self._answers.put(remote.fetch())
            except Exception as error:  # noqa: BLE001 - raised where the answers are read
                self._answers.put(error)

    def _ended(self) -> int:
        """Wait until a call has ended; return how many calls have ended."""
        answers = [self._first_answer()]
        with contextlib.suppress(queue.Empty):
            while True:
                answers.append(self._answers.get_nowait())
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return len(answers)

    def _first_answer(self) -> Any:
        # Only warn: an error would not end this process, because TensorFlow would cancel the work of all
        # workers, and would wait for the worker that hangs.
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=self._silent_s)
            _LOG.warning(
                "no worker has answered for %g s; training continues when a worker answers, or when the "
                "process that hangs is killed",
                self._silent_s,
            )


class Pass:
    """A pass over the training or the eval split: workers compute batches, the server collects results."""

    def __init__(
        self, workers: WorkerCalls, inbox: Inbox, send: Callable[[tf.Tensor, Any], None]
    ) -> None:
        """Store the arguments.

        Args:
            workers: The workers.
            inbox: Collects the results.
            send: Computes a batch on a worker, and sends the result; called with number and element.
        """
        self._workers, self._inbox, self._send = workers, inbox, send

    def trace(self) -> None:
        """Trace the server's function before the first batch; see `open_inbox`."""
        self._inbox.take()

    def run(self, first: int, elements: Iterable[Any]) -> Iterator[PassTotals]:
        """Distribute batches, and yield the totals whenever more results have been collected.

        Args:
            first: Number of the first batch; numbers must be unique in a run.
            elements: An element per batch; an element is read only when its call can be started, and none
                after a batch that is not finite.

        Yields:
            The totals since the start of the pass. The last ones contain every batch exactly once.

        Raises:
            tf.errors.OpError: A worker's function failed.
        """
        handed_out = 0
        is_finite = True

        def numbered() -> Iterator[tuple[tf.Tensor, Any]]:
            nonlocal handed_out
            for element in elements:
                handed_out += 1
                yield tf.constant(first + handed_out - 1, tf.int64), element
                if not is_finite:
                    # Do not cancel calls in progress: wait for them, because they use the queue.
                    return

        self._inbox.begin(first)
        for _ in self._workers.each(self._send, numbered()):
            totals = self._inbox.take()
            is_finite = totals.not_finite < 0
            yield totals
        last = self._inbox.take()
        if last.not_finite < 0 and last.batches != handed_out:
            raise RuntimeError(f"the server has taken {last.batches} of {handed_out} batches")
        yield last
