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
"""Calls per worker that are in progress at once: one is computed, the next one is prepared. More
would hold more batches in memory, and use older weights."""

_LOG = logging.getLogger(__name__)


class WorkerCalls:
    """Runs calls on the workers of a run."""

    def __init__(self, connection: ClusterConnection, *, silent_s: float) -> None:
        """Start the threads that wait for calls.

        Args:
            connection: The workers.
            silent_s: If no worker answers for this long, a warning is logged, seconds.
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
        """Call a function with each of some arguments, and yield whenever calls have ended.

        A call whose worker died is repeated, by another worker or by that one when it is back.

        Args:
            function: A `tf.function` that returns nothing.
            arguments: Arguments of each call; not read further ahead than calls in progress.

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
        """Wait until a call has ended; return how many have."""
        answers = [self._first_answer()]
        with contextlib.suppress(queue.Empty):
            while True:
                answers.append(self._answers.get_nowait())
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return len(answers)

    def _first_answer(self) -> Any:
        # An error would not end this process: TensorFlow takes back the work of every worker, and
        # waits for one that hangs. When that one continues or dies, so does this process.
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=self._silent_s)
            _LOG.warning(
                "no worker has answered for %g s; training goes on when it does, or when the "
                "process that hangs is killed",
                self._silent_s,
            )


class Pass:
    """Batches of one kind: computed by the workers, collected at the server."""

    def __init__(
        self, workers: WorkerCalls, inbox: Inbox, send: Callable[[tf.Tensor, Any], None]
    ) -> None:
        """Store the arguments.

        Args:
            workers: The workers.
            inbox: Collects the results.
            send: The workers' function of a batch's number and its element.
        """
        self._workers, self._inbox, self._send = workers, inbox, send

    def trace(self) -> None:
        """Trace the server's function before the first batch; see `open_inbox`."""
        self._inbox.take()

    def run(self, first: int, elements: Iterable[Any]) -> Iterator[PassTotals]:
        """Distribute batches, and yield the totals whenever more have been collected.

        Args:
            first: Number of the first batch; a number must be unique in a run.
            elements: Not read further ahead than batches in progress, and not beyond a batch that
                is not finite.

        Yields:
            The totals since the start. The last one is complete: it contains every batch once.

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
                    # Calls in progress still end: they need the queue, which ends with this run.
                    return

        self._inbox.begin(first)
        for _ in self._workers.each(self._send, numbered()):
            taken = self._inbox.take()
            is_finite = taken.not_finite < 0
            yield taken
        last = self._inbox.take()
        if last.not_finite < 0 and last.batches != handed_out:
            raise RuntimeError(f"the server has taken {last.batches} of {handed_out} batches")
        yield last
