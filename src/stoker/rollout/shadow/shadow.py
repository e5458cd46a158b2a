"""Shadow traffic of one stage: copies of requests go to a process that runs the candidate.

    request's thread -> offer -> a few copies wait -> one thread sends one copy at a time, and counts the comparison

Nothing here makes a request wait: a copy that finds no room, or comes while requests of the primary wait, is dropped.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from subprocess import DEVNULL
from typing import Any

from stoker.cluster.processes import Child, ProcessOptions, how_it_ended
from stoker.core.errors import UserError
from stoker.rollout.shadow.channel import (
    CopiedRequest,
    ShadowTarget,
    receive_answer,
    send_request,
)
from stoker.rollout.shadow.compare import Comparison, comparison_of, failed
from stoker.serve.routing import CopyResult, RequestCopy, Route

_log = logging.getLogger(__name__)

MOST_WAITING = 8
"""Most copies in the queue."""

MOST_BYTES = 64 << 20
"""Most bytes of arrays in the queued copies."""

_CLOSE_S = 1.0
"""Time that the process has to end by itself, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowLimits:
    """How long the process may take, and how often it may end."""

    run_s: float = 10.0
    """Longest time of a call, seconds; or `baseline_times` as long as the baseline's, if that is longer."""

    baseline_times: float = 200.0
    """See `run_s`. Next to a busy thread the process gets a tenth of one core, where the baseline may have 16."""

    load_s: float = 600.0
    """Longest time until the version is loaded, seconds."""

    ends: int = 3
    """Deaths or hangs after which the version is abandoned: the first ones may be chance (out of memory)."""

    pause_s: float = 1.0
    """Time before the process is started again, seconds, times the number of its ends so far."""


Sink = Callable[[Route, RequestCopy, Comparison | None], None]
"""Receives the result of a copy: the comparison; None: it was dropped."""


class Shadow:
    """The process of one stage, and the queue of copies for it; many threads may call `offer`."""

    def __init__(
        self, target: ShadowTarget, sink: Sink, limits: ShadowLimits = ShadowLimits()
    ) -> None:
        """Start the process; copies are dropped until it has loaded the version.

        Args:
            target: the version to run.
            sink: called once for each copy.
            limits: for the process.
        """
        self._target, self._sink, self._limits = target, sink, limits
        self._waiting: deque[tuple[Route, RequestCopy, int]] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._is_ready = self._closed = False
        self._child: Child | None = None
        self.failure = ""
        """Why the version was abandoned; empty if it was not."""
        self._thread = threading.Thread(target=self._run, name="stoker-shadow", daemon=True)
        self._thread.start()

    def offer(self, route: Route, request: RequestCopy) -> None:
        """Have a request answered by the candidate, or drop it; returns at once."""
        size = _bytes_of(request.inputs) + _bytes_of(request.outputs or {})
        if not request.primary_waits():
            with self._changed:
                room = len(self._waiting) < MOST_WAITING and self._bytes + size <= MOST_BYTES
                if room and self._is_ready and not self._closed:
                    self._waiting.append((route, request, size))
                    self._bytes += size
                    self._changed.notify()
                    return
        self._end(route, request, None)

    @property
    def pid(self) -> int | None:
        """The running process; None if none runs."""
        child = self._child
        return None if child is None else child.pid

    def close(self) -> None:
        """End the process and drop the queue; returns at once."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            if self._child is not None:
                self._child.kill()  # the thread waits for the end of the process

    def join(self, timeout_s: float) -> None:
        """Wait, after `close`, until the process has ended."""
        self._thread.join(timeout_s)

    def _run(self) -> None:
        ends = 0
        while not self._closed and not self.failure:
            try:
                reason = self._live()
            except (UserError, OSError) as error:
                reason = f"its process cannot be started: {error}"
            except Exception:  # noqa: BLE001 - the primary continues, whatever happens here
                _log.exception("shadow traffic met a bug")
                reason = "its process gave an answer that cannot be read"
            self._drop_all()
            if self._closed or self.failure:
                break
            ends += 1
            _log.error("%s in shadow: %s", self._target.candidate, reason)
            if ends >= self._limits.ends:
                self.failure = f"in shadow {reason} (end {ends} of its process)"
            else:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, self._limits.pause_s * ends)

    def _live(self) -> str:
        """Start the process and send it copies until it ends; return how it ended."""
        ours, its = socket.socketpair()
        with ours:
            with its:
                child = self._started(its)
            if child is None:
                return ""
            try:
                ours.settimeout(self._limits.load_s)
                return self._talk(ours, child)
            finally:
                with self._changed:
                    self._is_ready, self._child = False, None
                child.kill()
                child.wait()

    def _started(self, channel: socket.socket) -> Child | None:
        with self._changed:
            if self._closed:
                return None
            self._child = Child(
                "the shadow process",
                [
                    *(sys.executable, "-m", "stoker.rollout.shadow.process"),
                    *(str(channel.fileno()), self._target.to_json()),
                ],
                ProcessOptions(
                    # It must not take GPU memory from the version that answers.
                    environ=os.environ
                    | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "2"},
                    output=DEVNULL,  # the first line of a server's output is for its caller
                    pass_fds=[channel.fileno()],
                ),
            )
            return self._child

    def _talk(self, channel: socket.socket, child: Child) -> str:
        try:
            loaded = receive_answer(channel)
        except TimeoutError:
            return f"it was not loaded after {self._limits.load_s:g} s"
        if loaded is None:
            return f"its process {_end_of(child)} while loading it"
        if loaded["failed"]:
            self.failure = f"in shadow it cannot be loaded: {loaded['failed']}"
            return self.failure
        with self._changed:
            self._is_ready = True
        _log.info("%s is loaded in shadow", self._target.candidate)
        while True:
            route, request = self._next()
            if request is None:
                return ""
            assert route is not None
            if request.primary_waits():
                self._end(route, request, None)
                continue
            reason, found = self._asked(channel, child, request)
            if self._closed:
                self._end(route, request, None)
                return ""
            self._end(route, request, found)
            if reason:
                return reason

    def _next(self) -> tuple[Route | None, RequestCopy | None]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self._closed:
                return None, None
            route, request, size = self._waiting.popleft()
            self._bytes -= size
            return route, request

    def _asked(
        self, channel: socket.socket, child: Child, request: RequestCopy
    ) -> tuple[str, Comparison]:
        """Return why the process can no longer be used, and the comparison."""
        limit_s = max(self._limits.run_s, self._limits.baseline_times * request.took_s)
        channel.settimeout(limit_s)
        try:
            send_request(
                channel,
                CopiedRequest(
                    signature=request.signature, inputs=request.inputs, outputs=request.outputs
                ),
            )
            answer = receive_answer(channel)
            if answer is not None:
                return "", comparison_of(answer)
            reason = f"its process {_end_of(child)}"
        except TimeoutError:
            reason = f"a call ran longer than {limit_s:.3g} s"
        except OSError:
            reason = f"its process {_end_of(child)}"
        except (ValueError, TypeError, KeyError):
            reason = "its process gave an answer that cannot be read"
        return reason, failed(request.outputs, reason)

    def _drop_all(self) -> None:
        with self._changed:
            dropped, self._waiting, self._bytes = list(self._waiting), deque(), 0
        for route, request, _ in dropped:
            self._end(route, request, None)

    def _end(self, route: Route, request: RequestCopy, found: Comparison | None) -> None:
        self._sink(route, request, found)


def result_of(version: int, found: Comparison | None) -> CopyResult:
    """The server's counts for one copy.

    Args:
        version: the version that received it.
        found: the comparison; None: it was dropped.
    """
    if found is None:
        return CopyResult(version=version, is_compared=False)
    return CopyResult(
        version=version,
        is_compared=True,
        is_bad=bool(found.bad),
        is_different=found.is_different,
        took_s=found.took_s,
    )


def _end_of(child: Child) -> str:
    code = child.wait(_CLOSE_S)
    return "stopped answering" if code is None else how_it_ended(code)


def _bytes_of(arrays: Any) -> int:
    """Bytes that arrays hold, including their texts."""
    return sum(
        sum(len(text) for text in array.flat if isinstance(text, bytes))
        if array.dtype == object
        else int(array.nbytes)
        for array in arrays.values()
    )
