"""Processes many parts of a source in parallel and returns the results in the order of the parts.

It uses threads, which the GIL limits to about one core if the work is many small calls, or worker
processes, each of which takes a whole part and returns Arrow buffers in shared memory (decision
0049). Both do the same work on the same parts, so the results are the same.
"""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from stoker.cluster.limits import (
    kernel_refusals,
    raise_open_files,
    usable_cores,
    usable_memory,
)
from stoker.cluster.processes import Child, ProcessOptions, how_it_ended
from stoker.core.errors import Plain, UserError
from stoker.data.sources.worker_process import Failure, receive, send

Part = TypeVar("Part")
Made = TypeVar("Made")

AHEAD = 2
"""Parts in progress or done per worker process, so that a slow one does not block the others.
Threads have one each, plus one in all: their parts are larger."""

MIN_BYTES, MAX_BYTES = 256 << 20, 2 << 30
"""Bytes of the parts that are in progress: a sixteenth of the memory, within these. More cores would need
more memory otherwise. While a part is typed it takes about three times its bytes."""

FILES, FILES_EACH = 256, 6
"""File descriptors that this process needs for itself, and for each worker: its connection, and two for each
message in progress."""

END_S = 5.0
"""Longest wait for a killed worker to exit, seconds."""


def _no_bytes(_: object) -> int:
    """Size of parts that are names or numbers."""
    return 0


class InThreads:
    """Threads of this process."""

    def __init__(self, count: int | None = None) -> None:
        """Create the pool; threads start when they are needed.

        Args:
            count: Number of threads; None: one for each core, and at least two.
        """
        self.count = count or max(2, usable_cores())

    def map(
        self,
        function: Callable[[Part], Made],
        parts: Iterable[Part],
        *,
        bytes_of: Callable[[Part], int] = _no_bytes,
    ) -> Iterator[Made]:
        """Yield the results in the order of the parts, which are drawn as they are needed.

        Args:
            function: Any function.
            parts: Its arguments.
            bytes_of: Memory that a part takes until its result is given. Fewer parts are processed at a
                time if they are large.

        Raises:
            Whatever the function raises.
        """
        with ThreadPoolExecutor(self.count, thread_name_prefix="source") as pool:
            yield from _in_order(
                lambda part: pool.submit(function, part), parts, most=self.count, bytes_of=bytes_of
            )

    def call(self, function: Callable[[Part], Made], part: Part) -> Made:
        """Return one result, computed in the calling thread."""
        return function(part)


class InProcesses:
    """Worker processes, ended by `close`."""

    def __init__(self, count: int) -> None:
        """Start them; they are ready after some tenths of a second."""
        self.count = count
        self._workers: list[_Worker] = []
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="worker")
        try:
            for _ in range(count):
                self._workers.append(_Worker())
        except BaseException:
            self.close()
            raise
        for worker in self._workers:
            self._free.put(worker)

    def map(
        self,
        function: Callable[[Part], Made],
        parts: Iterable[Part],
        *,
        bytes_of: Callable[[Part], int] = _no_bytes,
    ) -> Iterator[Made]:
        """Like `InThreads.map`, with a function of a module, and parts that can be pickled.

        Raises:
            UserError: a worker was killed; or whatever the function raises.
        """
        yield from _in_order(
            lambda part: self._pool.submit(self.call, function, part),
            parts,
            most=self.count * AHEAD,
            bytes_of=bytes_of,
        )

    def call(self, function: Callable[[Part], Made], part: Part) -> Made:
        """Wait for one result; callable from any thread. Raises as `map`."""
        worker = self._free.get()
        try:
            found = worker.ask(function, part)
        finally:
            self._free.put(worker)
        if isinstance(found, Failure):
            raise found.error
        made: Made = found
        return made

    def close(self) -> None:
        """Kill them; the results of their current tasks are not needed."""
        for worker in self._workers:
            worker.kill()
        self._pool.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()


class _Worker:
    """One process and the connection to it."""

    def __init__(self) -> None:
        self._refusals = kernel_refusals().out_of_memory
        self._link, theirs = socket.socketpair()
        try:
            with theirs:
                command = (
                    f"from stoker.data.sources.worker_process import main; main({theirs.fileno()})"
                )
                self._child = Child(
                    "a worker process",
                    [sys.executable, "-P", "-c", command],
                    ProcessOptions(
                        pass_fds=[theirs.fileno()],
                        # One thread per core would compete with the other workers.
                        environ={**os.environ, "OMP_NUM_THREADS": "1"},
                    ),
                )
        except BaseException:
            self._link.close()
            raise

    @property
    def pid(self) -> int:
        """Its number."""
        return self._child.pid

    def ask(self, function: Callable[[Any], Any], part: object) -> Any:
        """Send a task and wait for the answer."""
        try:
            send(self._link, (function, part))
            return receive(self._link)
        except (EOFError, ConnectionError) as error:
            raise self._lost() from error
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise UserError(
                "The results of worker processes need more open files than this process may have",
                got=Plain(str(error)),
                fix="Raise the limit with `ulimit -n`, or set data.workers to fewer processes.",
            ) from error

    def kill(self) -> None:
        """Kill it; a thread that waits for its answer gets an error."""
        self._child.kill()

    def close(self) -> None:
        """Wait until a killed process is gone, and close the connection."""
        self._child.wait(END_S)
        self._link.close()

    def _lost(self) -> UserError:
        self._child.end(END_S)
        how = f"it {how_it_ended(self._child.code or 0)}"
        if kernel_refusals().out_of_memory > self._refusals:
            how += ": the container's memory is used up"
        return UserError(
            "A worker process ended before its work was done",
            got=Plain(how),
            fix="Run it again: it continues from the last complete shard. If memory was short, set "
            "data.workers to fewer processes.",
        )


Workers = InThreads | InProcesses
"""Workers that process the parts of a source."""


@contextlib.contextmanager
def started(count: int | None, *, processes: bool) -> Iterator[Workers]:
    """Workers while the context is open.

    Args:
        count: Number of workers; None: one for each core that this process may use.
        processes: Use processes, if there are at least two workers.
    """
    found = count or usable_cores()
    if not processes or found < 2:
        yield InThreads(count)
        return
    raise_open_files(FILES + FILES_EACH * found)
    with contextlib.closing(InProcesses(found)) as workers:
        yield workers


def most_bytes(memory: int) -> int:
    """Bytes of the parts that may be in progress on a machine with this much memory."""
    return max(MIN_BYTES, min(memory // 16, MAX_BYTES))


def _in_order(
    begin: Callable[[Part], Future[Made]],
    parts: Iterable[Part],
    *,
    most: int,
    bytes_of: Callable[[Part], int],
) -> Iterator[Made]:
    """Start up to this many parts, and yield each result after all those before it.

    A single part may be larger than `most_bytes`; then no other part is in progress. An error while
    the parts are drawn is raised after the results of the earlier parts.
    """
    under_way: deque[tuple[Future[Made], int]] = deque()
    held, limit = 0, most_bytes(usable_memory())
    drawn = iter(parts)

    def oldest() -> Made:
        nonlocal held
        future, size = under_way.popleft()
        held -= size
        return future.result()

    failed: Exception | None = None
    try:
        while True:
            try:
                part = next(drawn)
            except StopIteration:
                break
            except Exception as error:  # noqa: BLE001  # raised below, in its turn
                failed = error
                break
            size = bytes_of(part)
            while under_way and held + size > limit:
                yield oldest()
            under_way.append((begin(part), size))
            held += size
            if len(under_way) > most:
                yield oldest()
        while under_way:
            yield oldest()
    finally:
        for future, _ in under_way:
            future.cancel()
    if failed is not None:
        raise failed
