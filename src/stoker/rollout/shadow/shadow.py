"""Shadow traffic of one stage: copies of requests go to a process that runs the candidate.

    request's thread -> offer -> one thread sends the copy, and counts the comparison -> a pause -> offer

Nothing here makes a request wait: a copy that comes too early, or while requests of the primary wait, is dropped.
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
"""Share of one core that copies take from the server's process, which has one lock for all of its Python code."""

_CLOSE_S = 1.0
"""Time that the process has to end by itself, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowLimits:
    """How long the process may take, and how often it may end."""

    run_s: float = 10.0
    """Longest time of a call, seconds; or `baseline_times` as long as the baseline's, if that is longer."""

    baseline_times: float = 200.0
    """See `run_s`. The process has one core, where the baseline may have 16. Time without that core does not count."""

    load_s: float = 600.0
    """Longest time until the version is loaded, seconds."""

    ends: int = 3
    """Deaths or hangs after which the version is abandoned: the first ones may be chance (out of memory)."""

    pause_s: float = 1.0
    """Time before the process is started again, seconds, times the number of its ends so far."""


Sink = Callable[[Route, RequestCopy, Comparison | None], None]
"""Receives the result of a copy: the comparison; None: it was dropped."""


class Shadow:
    """The process of one stage, and the copy that it answers; `offer` may be called by many threads."""

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
        self._copy: tuple[Route, RequestCopy] | None = None  # that is not sent yet
        self._free_s = math.inf  # when the next copy is taken, by the monotonic clock
        self._changed = threading.Condition()
        self._closed = False
        self._child: Child | None = None
        self.failure = ""
        """Why the version was abandoned; empty if it was not."""
        self._thread = threading.Thread(target=self._run, name="stoker-shadow", daemon=True)
        self._thread.start()

    @property
    def is_free(self) -> bool:
        """Whether a copy would be taken now."""
        return time.monotonic() >= self._free_s

    def offer(self, route: Route, request: RequestCopy) -> None:
        """Have a request answered by the candidate, or drop it; returns at once."""
        if not request.primary_waits():
            with self._changed:
                if self.is_free and not self._closed:
                    self._copy, self._free_s = (route, request), math.inf
                    self._changed.notify()
                    return
        self._sink(route, request, None)

    @property
    def pid(self) -> int | None:
        """The running process; None if none runs."""
        child = self._child
        return None if child is None else child.pid

    def close(self) -> None:
        """End the process and drop its copy; returns at once."""
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
        """Return why the process can no longer be used, and the comparison."""
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
    """Return the server's counts for one copy.

    Args:
        version: the version that received it.
        found: the comparison; None: it was dropped.
        copies: how many were dropped.
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
    """Whether a process answers, or ends, before it has run or slept for so long."""
    # `select.select` refuses the descriptors of a server with 1,000 connections.
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
    """How long the threads of a process have waited for a core so far, seconds; 0 where the kernel does not say."""
    waited_ns = 0
    for thread in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended
            waited_ns += int(thread.read_text().split()[1])
    return waited_ns / 1e9
