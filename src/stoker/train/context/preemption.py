"""Handles requests to stop training: an eviction, a time limit of Slurm, Ctrl-C."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import tensorflow as tf

from stoker.core.errors import Plain, Preempted
from stoker.core.incarnation import VARIABLE
from stoker.core.signals import ASKING, end_at_once, heard


class Preemption:
    """Requests to stop this process, and the variable from which the compiled step reads them."""

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self.signals = tf.Variable(tf.constant([0, 0]), trainable=False, name="signals")
        """[stop requested, checkpoint due after this call], read by the compiled step."""
        self.requested = False
        self.has_work = False
        """Whether there is unsaved work; if not, a signal ends the process immediately."""
        self._interrupted = 0
        self._saves = False

    def request(self) -> None:
        """Request a stop after the current step."""
        self.requested = True
        with suppress(tf.errors.OpError):
            self.signals[0].assign(1)

    def save_after_call(self, wanted: bool) -> None:
        """Tell all workers whether a checkpoint is due after this call."""
        # Assign only a changed value, because each assignment is a call of TensorFlow.
        if wanted != self._saves:
            self.signals[1].assign(int(wanted))
            self._saves = wanted

    def on_signal(self, number: signal.Signals) -> None:
        """Handle a signal: the first one requests a stop, the second one ends the process.

        In a job, all signals together count as a single request, because Slurm sends TERM to every process of a
        worker, and each of these processes passes it on to its child. To end a job at once, a scheduler sends KILL.
        """
        if self.requested and VARIABLE in os.environ:
            return
        if number != signal.SIGINT and (self.requested or not self.has_work):
            end_at_once(number)
        self.request()

    def on_interrupt(self, number: int) -> None:
        """Handle Ctrl-C in the main thread; it may come from a notebook.

        Raises:
            KeyboardInterrupt: There is nothing to save, or this is the second Ctrl-C.
        """
        if number != signal.SIGINT:
            return
        self._interrupted += 1
        if self._interrupted > 1 or not self.has_work:
            raise KeyboardInterrupt

    def end_error(self, *, step: int, steps: int) -> Preempted | KeyboardInterrupt:
        """Return the exception to raise once everything is saved.

        Args:
            step: Number of steps done.
            steps: Number of steps of the whole run.
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

    In any thread but the main one, no signal is handled.
    """
    preemption = Preemption()
    with heard([*ASKING, signal.SIGINT], preemption.on_signal, handler=preemption.on_interrupt):
        yield preemption
