"""Shadow traffic of one stage: copies of requests go to a process that runs the candidate.

    request's thread -> offer -> one thread sends the copy, and counts the comparison -> a pause -> offer

A request never waits for its copy: a copy is dropped if it comes during the pause, or while requests wait for the
primary version.
"""

from __future__ import annotations

import logging
import math
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL

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

MAX_SHARE = 0.005
"""Maximum share of one core that copies take in the server's process, whose Python threads share one lock (the GIL)."""

_CLOSE_S = 1.0
"""Time that the process has to exit by itself, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowLimits:
    """Limits of the shadow process: the time of its calls, and how often it may crash or hang."""

    run_s: float = 10.0
    """Maximum time of a call, seconds, or the baseline's time multiplied by `baseline_times` if that is longer."""

    baseline_times: float = 200.0
    """Factor for `run_s`. The process has one core, the baseline may have 16. Time in which the process waits for a
    core does not count."""

    load_s: float = 600.0
    """Maximum time until the version is loaded, seconds."""

    ends: int = 3
    """Number of crashes or hangs after which the version is abandoned. A single one may be chance (out of memory)."""

    pause_s: float = 1.0
    """Pause before the process is started again, seconds, multiplied by the number of crashes and hangs so far."""


Sink = Callable[[Route, RequestCopy, Comparison | None], None]
"""Receives the comparison for a copy, or None if the copy was dropped."""


class Shadow:
    """Runs the shadow process of one stage, which answers one copy at a time; `offer` may be called by many threads."""

    def __init__(
        self, target: ShadowTarget, sink: Sink, limits: ShadowLimits = ShadowLimits()
    ) -> None:
        """Start the process; copies are dropped until it has loaded the version.

        Args:
            target: The version to run.
            sink: Called once for each copy.
            limits: Limits of the process.
        """
        self._target, self._sink, self._limits = target, sink, limits
        self._copy: tuple[Route, RequestCopy] | None = None  # taken, but not sent yet
        self._free_s = math.inf  # monotonic time from which the next copy is taken
        self._changed = threading.Condition()
        self._closed = False
        self._child: Child | None = None
        self.failure = ""
        """Why the version was abandoned; empty if it was not."""
        self._thread = threading.Thread(target=self._run, name="stoker-shadow", daemon=True)
        self._thread.start()

    @property
    def is_free(self) -> bool:
        """Whether `offer` would take a copy now."""
        return time.monotonic() >= self._free_s

    def offer(self, route: Route, request: RequestCopy) -> None:
        """Take a copy of a request for the candidate, or drop it; does not wait."""
        if not request.primary_waits():
            with self._changed:
                if self.is_free and not self._closed:
                    self._copy, self._free_s = (route, request), math.inf
                    self._changed.notify()
                    return
        self._sink(route, request, None)

    @property
    def pid(self) -> int | None:
        """Process number of the shadow process; None if it is not running."""
        child = self._child
        return None if child is None else child.pid

    def close(self) -> None:
        """Kill the process and drop its copy; does not wait."""
        with self._changed:
            self._closed = True
            self._changed.notify()
            if self._child is not None:
                self._child.kill()  # the thread waits until the process has ended

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
                _log.exception("internal error in shadow traffic")
                reason = "its process gave an answer that cannot be read"
            if self._copy is not None:
                self._sink(*self._copy, None)
                self._copy = None
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
        """Start the process and send it copies until it ends; return why it ended."""
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
                    self._free_s, self._child = math.inf, None
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
                    output=DEVNULL,  # stdout belongs to the server, whose first line its caller reads
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
        channel.settimeout(None)
        _log.info("%s is loaded in shadow", self._target.candidate)
        reason, cpu_s = "", 0.0
        while not reason:
            with self._changed:
                self._free_s = time.monotonic() + cpu_s / MAX_SHARE
                self._changed.wait_for(lambda: self._copy or self._closed)
                if self._closed or self._copy is None:
                    return ""
                (route, request), self._copy = self._copy, None
            began_s = time.thread_time()
            reason, found = self._compared(channel, child, request)
            self._sink(route, request, None if self._closed else found)
            cpu_s = time.thread_time() - began_s
        return reason

    def _compared(
        self, channel: socket.socket, child: Child, request: RequestCopy
    ) -> tuple[str, Comparison]:
        """Send a copy; return why the process can no longer be used (empty if it can), and the comparison."""
        limit_s = max(self._limits.run_s, self._limits.baseline_times * request.took_s)
        try:
            send_request(
                channel,
                CopiedRequest(
                    signature=request.signature, inputs=request.inputs, outputs=request.outputs
                ),
            )
            if not _answers(channel, child.pid, limit_s):
                reason = f"a call ran longer than {limit_s:.3g} s"
            elif (answer := receive_answer(channel)) is not None:
                return "", comparison_of(answer)
            else:
                reason = f"its process {_end_of(child)}"
        except OSError:
            reason = f"its process {_end_of(child)}"
        except (ValueError, TypeError, KeyError):
            reason = "its process gave an answer that cannot be read"
        return reason, failed(request.outputs, reason)


def result_of(version: int, found: Comparison | None, *, copies: int = 1) -> CopyResult:
    """Return the result of a copy, for the server's metrics.

    Args:
        version: The version that received it.
        found: Comparison of the answers; None: the copy was dropped.
        copies: Number of dropped copies.
    """
    if found is None:
        return CopyResult(version=version, is_compared=False, copies=copies)
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


def _answers(channel: socket.socket, pid: int, limit_s: float) -> bool:
    """Return whether a process answers or ends within `limit_s`, not counting time in which it waits for a core."""
    # Not `select.select`, which refuses descriptors above 1,023: a server may have more connections.
    answer = select.poll()
    answer.register(channel, select.POLLIN)
    began_s = math.inf
    while not answer.poll(limit_s / 2.0 * 1e3):
        now_s = time.monotonic() - _waited_s(pid)
        began_s = min(began_s, now_s)
        if now_s - began_s > 0.4 * limit_s:
            return False
    return True


def _waited_s(pid: int) -> float:
    """Return how long the threads of a process have waited for a core, seconds; 0 if the kernel does not count it."""
    waited_ns = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            waited_ns += int(thread.read_text().split()[1])
    return waited_ns / 1e9
