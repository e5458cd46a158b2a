"""Process many parts of a source in parallel, and return the results in the order of the parts.

The work is done by threads, which the GIL limits to about one core if the work is many small calls; or by worker
processes, each of which gets a whole part and returns Arrow buffers in shared memory (decision 0049). Both run the
same functions on the same parts, so the results are the same.
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
"""Maximum number of unfinished parts per worker process, so that a slow part does not block the other workers. A part
is also unfinished while its result waits for an earlier result. With threads, whose parts are larger, the limit is one
part per thread, and one more in total."""

MIN_BYTES, MAX_BYTES = 256 << 20, 2 << 30
"""Minimum and maximum of the limit for the total size of parts in progress, which is a sixteenth of the memory. Without
a limit, more cores would need more memory: a part takes about three times its size while it is converted."""

FILES, FILES_EACH = 256, 6
"""Number of file descriptors that this process needs for itself, and for each worker: for the connection, and two for
each message in progress."""

END_S = 5.0
"""Maximum wait for a killed worker to exit, seconds."""


def _no_bytes(_: object) -> int:
    """Return 0: the size of parts that need almost no memory, such as names."""
    return 0


class InThreads:
    """Workers that are threads of this process."""

    def __init__(self, count: int | None = None) -> None:
        """Set the number of threads, which start in `map`.

        Args:
            count: Number of threads; None: one for each core, but at least two.
        """
        self.count = count or max(2, usable_cores())

    def map(
        self,
        function: Callable[[Part], Made],
        parts: Iterable[Part],
        *,
        bytes_of: Callable[[Part], int] = _no_bytes,
    ) -> Iterator[Made]:
        """Yield the results of a function in the order of the parts.

        Args:
            function: Any function.
            parts: The arguments of the function; they are read from the iterator when they are needed.
            bytes_of: Function that returns the memory of a part, bytes. If parts are large, fewer parts are
                processed at the same time.

        Raises:
            Any error of the function.
        """
        with ThreadPoolExecutor(self.count, thread_name_prefix="source") as pool:
            yield from _in_order(
                lambda part: pool.submit(function, part), parts, most=self.count, bytes_of=bytes_of
            )

    def call(self, function: Callable[[Part], Made], part: Part) -> Made:
        """Compute one result in the calling thread."""
        return function(part)


class InProcesses:
    """Workers that are processes; `close` ends them."""

    def __init__(self, count: int) -> None:
        """Start the processes, which are ready after some tenths of a second."""
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
        """Do what `InThreads.map` does; the function must be at the top level of a module, and parts picklable.

        Raises:
            UserError: a worker process ended; or any error of the function.
        """
        yield from _in_order(
            lambda part: self._pool.submit(self.call, function, part),
            parts,
            most=self.count * AHEAD,
            bytes_of=bytes_of,
        )

    def call(self, function: Callable[[Part], Made], part: Part) -> Made:
        """Compute one result in a free process, and wait for it; raises the errors of `map`. Thread-safe."""
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
        """Kill the processes; the results of their current tasks are lost."""
        for worker in self._workers:
            worker.kill()
        self._pool.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()


class _Worker:
    """One worker process, and the connection to it."""

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
        """The process id."""
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
                "The worker processes need more open files than this process may have",
                got=Plain(str(error)),
                fix="Raise the limit with `ulimit -n`, or set data.workers to fewer processes.",
            ) from error

    def kill(self) -> None:
        """Kill the process; a thread that waits for its answer gets an error."""
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
            fix="Run the command again; it continues after the last complete shard. If there was not enough "
            "memory, set data.workers to fewer processes.",
        )


Workers = InThreads | InProcesses
"""Workers that process the parts of a source."""


@contextlib.contextmanager
def started(count: int | None, *, processes: bool) -> Iterator[Workers]:
    """Start workers, which end with the context.

    Args:
        count: Number of workers; None: one for each core that this process may use.
        processes: Whether to use processes, if there are at least two workers; else threads.
    """
    found = count or usable_cores()
    if not processes or found < 2:
        yield InThreads(count)
        return
    raise_open_files(FILES + FILES_EACH * found)
    with contextlib.closing(InProcesses(found)) as workers:
        yield workers


def max_part_bytes(memory: int) -> int:
    """Return the maximum total size of parts in progress on a machine with `memory` bytes."""
    return max(MIN_BYTES, min(memory // 16, MAX_BYTES))


def _in_order(
    begin: Callable[[Part], Future[Made]],
    parts: Iterable[Part],
    *,
    most: int,
    bytes_of: Callable[[Part], int],
) -> Iterator[Made]:
    """Keep up to `most` parts in progress, and yield their results in the order of the parts.

    While a part that is larger than the limit is in progress, no other part is. If reading the next part fails, the
    error is raised after the results of the earlier parts.
    """
    under_way: deque[tuple[Future[Made], int]] = deque()
    held, limit = 0, max_part_bytes(usable_memory())
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
            except Exception as error:  # noqa: BLE001  # raised below, after the earlier results
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
