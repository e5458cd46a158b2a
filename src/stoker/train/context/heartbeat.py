"""Sends a worker's heartbeats to the launcher that started it, once per second. Imports no TensorFlow."""

from __future__ import annotations

import faulthandler
import functools
import os
import select
import threading
import time
from collections.abc import MutableMapping

from stoker.cluster.launch.member import EVERY_S, FD_VARIABLE, STACKS, Beat, Phase

RANK_VARIABLE = "STOKER_RANK"
"""Environment variable with the rank of this process."""

OTHERS_S = 600.0
"""Maximum time that a finished worker waits for the others, seconds; usually the launcher stops it
earlier."""


class Heartbeat:
    """Sends heartbeats from a separate thread.

    `beat`, `enter` and `progress` only store their arguments; the thread sends them.
    """

    def __init__(self, descriptor: int, *, rank: int, every_s: float = EVERY_S) -> None:
        """Start to send heartbeats.

        Args:
            descriptor: The worker's end of the launcher's socket; `close` closes it.
            rank: The rank of this process.
            every_s: Interval between two heartbeats, seconds.
        """
        os.set_inheritable(descriptor, False)
        self.rank = rank
        self._descriptor, self._every_s = descriptor, every_s
        self._phase: Phase = "start"
        self._step = 0
        self._line, self._share = "", None  # type: tuple[str, float | None]
        self._hurry, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def beat(self, step: int) -> None:
        """Store the number of completed steps; in the phase `train` it must grow."""
        self._step = step

    def enter(self, phase: Phase) -> None:
        """Enter another phase; only in the phase `train`, the number of steps must grow."""
        self._phase = phase
        self._hurry.set()

    def progress(self, line: str, share: float | None) -> None:
        """Store a progress line for the user, and the completed share of the run."""
        self._line, self._share = line, share

    def finish(self) -> None:
        """Report that this process has finished, and wait until all others have finished.

        The first worker coordinates TensorFlow's cluster: if it exits first, the others fail.
        """
        self._phase = "done"
        self._end_thread()
        # The launcher sends nothing, so the descriptor becomes readable only when the launcher closes
        # it or dies.
        select.select([self._descriptor], [], [], OTHERS_S)

    def close(self) -> None:
        """Stop sending heartbeats."""
        self._end_thread()
        os.close(self._descriptor)

    def _end_thread(self) -> None:
        self._closed.set()
        self._hurry.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            closing = self._closed.is_set()
            # The message `done` must arrive; any other heartbeat may be lost.
            os.set_blocking(self._descriptor, self._phase == "done")
            self._send()
            if closing:
                return
            self._hurry.wait(self._every_s)
            self._hurry.clear()

    def _send(self) -> None:
        beat = Beat(
            rank=self.rank,
            phase=self._phase,
            step=self._step,
            at_s=time.monotonic(),
            line=self._line,
            share=self._share,
        )
        try:
            os.write(self._descriptor, beat.to_message())
        except BlockingIOError:
            # The launcher has not read for minutes, so the socket is full. Drop this heartbeat.
            return
        except (BrokenPipeError, ConnectionResetError):
            # The launcher has ended, and this process will be killed.
            return


@functools.cache
def process_heartbeat() -> Heartbeat:
    """Return the heartbeat of this process; without a launcher, its messages go nowhere.

    With a launcher, the signal SIGUSR2 writes Python's stacks to stderr.
    """
    return open_heartbeat(os.environ)


def open_heartbeat(environ: MutableMapping[str, str]) -> Heartbeat:
    """Open a heartbeat to the launcher that an environment names; child processes do not inherit it.

    Args:
        environ: The environment; its variable `STOKER_HEARTBEAT_FD` is read and removed.
    """
    descriptor = environ.pop(FD_VARIABLE, None)
    rank = int(environ.get(RANK_VARIABLE, "0"))
    if descriptor is None:
        return Heartbeat(os.open(os.devnull, os.O_RDWR), rank=rank)
    faulthandler.register(STACKS, all_threads=True)
    return Heartbeat(int(descriptor), rank=rank)
