"""Batches handed out to whichever worker is free, and what comes of them at the server."""

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
"""Calls a worker that are handed out at once: one is computed, its successor is on its way. More
would hold more batches in memory, and the weights that they see would be older."""

_LOG = logging.getLogger(__name__)


class WorkerCalls:
    """The workers of a run, as a place where calls are made."""

    def __init__(self, connection: ClusterConnection, *, silent_s: float) -> None:
        """Make ready to wait for several calls at once.

        Args:
            connection: Who they are.
            silent_s: When none has answered for so long, that is said, seconds.
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
        """Call a function with each of some arguments, and stop whenever some calls have ended.

        A call whose worker died is made again, by another worker or by that one when it is back.

        Args:
            function: A `tf.function` that returns nothing.
            arguments: Of each call; read no further ahead than what is under way.

        Raises:
            tf.errors.OpError: the function failed.
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
        """Wait until a call has ended; how many have."""
        answers = [self._first_answer()]
        with contextlib.suppress(queue.Empty):
            while True:
                answers.append(self._answers.get_nowait())
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return len(answers)

    def _first_answer(self) -> Any:
        # An error would not end this process: TensorFlow takes back from every worker what it was
        # given, and waits for the one that hangs. When that one goes on, or dies, so do we.
        while True:
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=self._silent_s)
            _LOG.warning(
                "no worker has answered for %g s; training goes on when it does, or when the "
                "process that hangs is killed",
                self._silent_s,
            )


class Pass:
    """Batches of one kind: computed by the workers, taken at the server."""

    def __init__(
        self, workers: WorkerCalls, inbox: Inbox, send: Callable[[tf.Tensor, Any], None]
    ) -> None:
        """Join what belongs together.

        Args:
            workers: Who computes.
            inbox: Where it arrives.
            send: What a worker runs of a batch's number and its element.
        """
        self._workers, self._inbox, self._send = workers, inbox, send

    def trace(self) -> None:
        """Trace what is run at the server, before the first batch: see `open_inbox`."""
        self._inbox.take()

    def run(self, first: int, elements: Iterable[Any]) -> Iterator[PassTotals]:
        """Hand out one batch after the other, and say what has been taken, whenever more has.

        Args:
            first: Number of the first batch; no number may come twice in a run.
            elements: Read no further ahead than what is under way, and no further than a batch that
                is not finite.

        Yields:
            What was taken since the beginning. Of the last one nothing is under way any more: it
            holds every batch that was handed out, each once.

        Raises:
            tf.errors.OpError: a worker's function failed.
        """
        handed_out = 0
        is_finite = True

        def numbered() -> Iterator[tuple[tf.Tensor, Any]]:
            nonlocal handed_out
            for element in elements:
                handed_out += 1
                yield tf.constant(first + handed_out - 1, tf.int64), element
                if not is_finite:
                    # What is under way still ends: it needs the queue, which goes with this run.
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
