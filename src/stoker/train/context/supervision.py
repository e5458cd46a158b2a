"""Heartbeats to the launcher, once a second, and requests to stop.

A process that is asked to stop finishes its step and writes a checkpoint. The compiled step reads a
variable, so that a call of many steps ends after the current one.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import select
import signal
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress

import tensorflow as tf

from stoker.cluster.launch.member import EVERY_S, FD_VARIABLE, STACKS, Beat, Phase
from stoker.core.errors import Plain, Preempted
from stoker.core.signals import ASKING, end_at_once, heard

RANK_VARIABLE = "STOKER_RANK"
"""Environment variable with the rank of this process."""

OTHERS_S = 600.0
"""Longest time that a finished worker waits for the others, seconds; the launcher stops it
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
        """Enter another phase; only `train` requires steps."""
        self._phase = phase
        self._hurry.set()

    def progress(self, line: str, share: float | None) -> None:
        """Store a progress line for the user, and the completed share."""
        self._line, self._share = line, share

    def finish(self) -> None:
        """Report that this process has finished, and wait until all others have.

        The first worker coordinates TensorFlow's cluster: the others fail if it exits before them.
        """
        self._phase = "done"
        self._end_thread()
        # The launcher sends nothing: the descriptor becomes readable when the launcher closes it or
        # dies.
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
            # The launcher has not read for minutes. It reads the next heartbeat.
            return
        except (BrokenPipeError, ConnectionResetError):
            # The launcher is gone, and this process will be killed.
            return


@functools.cache
def process_heartbeat() -> Heartbeat:
    """Return the heartbeat of this process, to the launcher if there is one.

    SIGUSR2 then writes Python's stacks to stderr.
    """
    return open_heartbeat(os.environ)


def open_heartbeat(environ: MutableMapping[str, str]) -> Heartbeat:
    """Open a heartbeat to the launcher of an environment; child processes do not inherit it.

    Args:
        environ: `STOKER_HEARTBEAT_FD` is removed from it.
    """
    descriptor = environ.pop(FD_VARIABLE, None)
    rank = int(environ.get(RANK_VARIABLE, "0"))
    if descriptor is None:
        return Heartbeat(os.open(os.devnull, os.O_RDWR), rank=rank)
    faulthandler.register(STACKS, all_threads=True)
    return Heartbeat(int(descriptor), rank=rank)


class Preemption:
    """Requests to stop this process, and the variable through which the compiled step sees them."""

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self.signals = tf.Variable(tf.constant([0, 0]), trainable=False, name="signals")
        """[stop requested, checkpoint due after this call], read by the compiled step."""
        self.requested = False
        self.has_work = False
        """Whether there is unsaved work; without any, a signal ends the process immediately."""
        self._interrupted = 0
        self._saves = False

    def request(self) -> None:
        """Request a stop after the current step."""
        self.requested = True
        with suppress(tf.errors.OpError):
            self.signals[0].assign(1)

    def save_after_call(self, wanted: bool) -> None:
        """Tell all workers whether a checkpoint is due after this call."""
        # Assigning is a TensorFlow call of its own.
        if wanted != self._saves:
            self.signals[1].assign(int(wanted))
            self._saves = wanted

    def on_signal(self, number: signal.Signals) -> None:
        """Handle a signal: the first one requests a stop, the second one ends the process."""
        if number != signal.SIGINT and (self.requested or not self.has_work):
            end_at_once(number)
        self.request()

    def on_interrupt(self, number: int) -> None:
        """Handle a signal in the main thread; Ctrl-C may come from a notebook.

        Raises:
            KeyboardInterrupt: There is nothing to save, or it is the second Ctrl-C.
        """
        if number != signal.SIGINT:
            return
        self._interrupted += 1
        if self._interrupted > 1 or not self.has_work:
            raise KeyboardInterrupt

    def end_error(self, *, step: int, steps: int) -> Preempted | KeyboardInterrupt:
        """Return the exception to raise once everything is saved.

        Args:
            step: Steps done.
            steps: Steps in all.
        """
        if self._interrupted:
            return KeyboardInterrupt()
        return Preempted(
            "training was stopped by a signal",
            got=Plain(f"a signal after step {step} of {steps}"),
            fix="Everything is saved: run the same command again to continue.",
        )


@contextmanager
def listen_for_preemption() -> Iterator[Preemption]:
    """Yield a `Preemption` that SIGTERM, SIGUSR1, SIGHUP and Ctrl-C trigger.

    Outside the main thread, signals are ignored.
    """
    preemption = Preemption()
    with heard([*ASKING, signal.SIGINT], preemption.on_signal, handler=preemption.on_interrupt):
        yield preemption
