"""Sends requests by a schedule and reads the answers, in one thread."""

from __future__ import annotations

import gc
import select
import selectors
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from stoker.loadtest.config import LoadConfig, SocketAddress
from stoker.loadtest.connection import HttpConnection
from stoker.loadtest.result import Latencies, LoadResult

_CHECK_S = 0.05
"""Maximum sleep, seconds; a time-out or a request to stop is noticed at most this late."""

_REST_S = 0.01
"""Pause of a closed-loop connection after an error, seconds, because a stopped server refuses connections
immediately."""

TIMED_OUT = "no answer in time"
NOT_SENT = "not sent in time"


def run_load(
    config: LoadConfig,
    address: SocketAddress,
    requests: Sequence[bytes],
    *,
    stopped: Callable[[], bool],
) -> LoadResult:
    """Send `requests` in a cycle, and measure the latency of the answers.

    Args:
        config: Rate, duration and connections.
        address: The server.
        requests: Complete HTTP requests.
        stopped: Called repeatedly; if it returns True, the run ends with the result so far.
    """
    with selectors.DefaultSelector() as selector:
        load = _Load(config, address, requests, selector)
        # Garbage collection would delay the schedule.
        gc.collect()
        gc.disable()
        try:
            return load.run(stopped)
        finally:
            gc.enable()
            load.close()


class _Load:
    def __init__(
        self,
        config: LoadConfig,
        address: SocketAddress,
        requests: Sequence[bytes],
        selector: selectors.DefaultSelector,
    ) -> None:
        self._config = config
        self._requests = requests
        self._selector = selector
        self._idle = [HttpConnection(address, selector) for _ in range(config.connections)]
        self._all = tuple(self._idle)
        self._busy: set[HttpConnection] = set()
        self._resting: deque[tuple[float, HttpConnection]] = deque()
        self._waiting: deque[tuple[float, float]] = deque()
        """Requests that wait for a connection: due time, and the time at which they were taken from the schedule."""
        self._due = 0
        """Number of requests due so far."""
        self._begun = 0
        """Number of requests given to a connection."""
        self._latencies, self._lag, self._waited = Latencies(), Latencies(), Latencies()
        self._errors: Counter[str] = Counter()
        self._last_answer_s = 0.0
        self._checked_s = 0.0

    def run(self, stopped: Callable[[], bool]) -> LoadResult:
        for connection in self._all:
            connection.open()
        self._wait(_REST_S)  # on the same machine, the connections are open after this
        clock = time.perf_counter
        cpu_s = time.process_time()
        start_s = self._last_answer_s = clock()
        end_s = start_s + self._config.seconds
        open_loop = self._config.rate_per_s is not None
        while not (ended := stopped()):
            now_s = clock()
            if open_loop:
                self._take_due(start_s, clock)
            elif now_s < end_s:
                self._take_free(now_s)
            self._hand_out(clock)
            if self._is_done(now_s, end_s):
                break
            self._wait(self._sleep_s(start_s, clock()))
            self._check_time_outs(clock())
        now_s = clock()
        if not ended:
            self._count_unanswered()
        # The run counts as at least as long as the schedule, even if the last answer came earlier.
        took_s = now_s - start_s if ended else max(self._last_answer_s, min(end_s, now_s)) - start_s
        return LoadResult(
            mode="open" if open_loop else "closed",
            asked_rate_per_s=self._config.rate_per_s,
            connections=self._config.connections,
            took_s=took_s,
            sent=self._due,
            latencies=self._latencies,
            errors=dict(sorted(self._errors.items())),
            lag=self._lag,
            waited=self._waited,
            cpu_share=(time.process_time() - cpu_s) / max(now_s - start_s, 1e-9),
            stopped=ended,
        )

    def close(self) -> None:
        for connection in self._all:
            connection.close()

    def _take_due(self, start_s: float, clock: Callable[[], float]) -> None:
        """Take due requests from the schedule, and record by how much the generator is late."""
        rate_per_s = self._config.rate_per_s or 0.0
        while self._due < self._config.requests:
            due_s = start_s + self._due / rate_per_s
            now_s = clock()
            if now_s < due_s:
                return
            self._lag.add(now_s - due_s)
            self._waiting.append((due_s, now_s))
            self._due += 1
            if len(self._idle) and len(self._waiting) >= len(self._idle):
                return  # send these requests first

    def _take_free(self, now_s: float) -> None:
        """In a closed loop, take a request for each idle connection."""
        while self._resting and self._resting[0][0] <= now_s:
            self._idle.append(self._resting.popleft()[1])
        free = min(len(self._idle), self._config.requests - self._due)
        self._waiting.extend([(now_s, now_s)] * free)
        self._due += free

    def _hand_out(self, clock: Callable[[], float]) -> None:
        open_loop = self._config.rate_per_s is not None
        while self._waiting and self._idle:
            due_s, scheduled_s = self._waiting.popleft()
            connection, now_s = self._idle.pop(), clock()
            if open_loop:
                self._waited.add(now_s - scheduled_s)
            else:
                due_s = now_s
            request = self._requests[self._begun % len(self._requests)]
            self._begun += 1
            self._busy.add(connection)
            fault = connection.send(request, due_s=due_s, now_s=now_s)
            if fault:
                self._ended(connection, fault, now_s)

    def _wait(self, sleep_s: float) -> None:
        # `epoll` sleeps for whole milliseconds; `select` on epoll's descriptor can sleep for microseconds.
        if sleep_s > 0:
            select.select([self._selector.fileno()], [], [], sleep_s)
        for key, events in self._selector.select(0):
            connection: HttpConnection = key.data
            outcome = connection.on_ready(events)
            if outcome is not None and connection in self._busy:
                self._ended(connection, outcome, time.perf_counter())
            elif outcome is not None:
                connection.close()  # the server closed an idle connection

    def _sleep_s(self, start_s: float, now_s: float) -> float:
        if self._waiting and self._idle:
            return 0.0
        rate_per_s = self._config.rate_per_s
        if rate_per_s is None:
            return _REST_S if self._resting else _CHECK_S
        if self._due >= self._config.requests:
            return _CHECK_S
        return min(_CHECK_S, start_s + self._due / rate_per_s - now_s)

    def _ended(self, connection: HttpConnection, fault: str, now_s: float) -> None:
        self._busy.discard(connection)
        self._last_answer_s = now_s
        if fault:
            self._errors[fault] += 1
        else:
            self._latencies.add(now_s - connection.due_s)
        if fault and self._config.rate_per_s is None:
            self._resting.append((now_s + _REST_S, connection))
        else:
            self._idle.append(connection)

    def _check_time_outs(self, now_s: float) -> None:
        if now_s - self._checked_s < _CHECK_S:
            return
        self._checked_s = now_s
        late = [c for c in self._busy if now_s - c.began_s > self._config.timeout_s]
        for connection in late:
            connection.close()
            self._ended(connection, TIMED_OUT, now_s)

    def _is_done(self, now_s: float, end_s: float) -> bool:
        over = now_s >= end_s
        if self._config.rate_per_s is None:
            over = over or self._due >= self._config.requests
        elif self._due < self._config.requests:
            return False
        if over and not self._busy and not self._waiting:
            return True
        return now_s >= end_s + self._config.timeout_s

    def _count_unanswered(self) -> None:
        """Count the requests that have no answer at the end."""
        self._errors[TIMED_OUT] += len(self._busy)
        self._errors[NOT_SENT] += len(self._waiting)
        self._errors = +self._errors
