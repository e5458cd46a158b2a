"""A process that is asked to end ends its step and writes a checkpoint.

The compiled step looks at a variable, so that a call of many steps ends after the one being run.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import tensorflow as tf

from stoker.core.errors import Plain, Preempted
from stoker.core.signals import ASKING, end_at_once, heard


class Preemption:
    """Whether this process is asked to end; what the compiled step looks at."""

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self.signals = tf.Variable(tf.constant([0, 0]), trainable=False, name="signals")
        """[asked to end, asked to save after this call], read by the compiled step."""
        self.requested = False
        self.has_work = False
        """Whether there is anything that is not saved: before it, an end is an end at once."""
        self._interrupted = 0
        self._saves = False

    def request(self) -> None:
        """End after the step that is being run."""
        self.requested = True
        with suppress(tf.errors.OpError):
            self.signals[0].assign(1)

    def save_after_call(self, wanted: bool) -> None:
        """Let all workers know that a checkpoint is due."""
        # An assignment is a call of TensorFlow's of its own.
        if wanted != self._saves:
            self.signals[1].assign(int(wanted))
            self._saves = wanted

    def on_signal(self, number: signal.Signals) -> None:
        """A signal came: the first asks, the second ends the process at once."""
        if number != signal.SIGINT and (self.requested or not self.has_work):
            end_at_once(number)
        self.request()

    def on_interrupt(self, number: int) -> None:
        """The main thread has come to a signal: Ctrl-C is the person's, who may be in a notebook.

        Raises:
            KeyboardInterrupt: nothing is to be saved, or it is the second.
        """
        if number != signal.SIGINT:
            return
        self._interrupted += 1
        if self._interrupted > 1 or not self.has_work:
            raise KeyboardInterrupt

    def end_error(self, *, step: int, steps: int) -> Preempted | KeyboardInterrupt:
        """What to raise once everything is saved.

        Args:
            step: Steps done.
            steps: Steps in all.
        """
        if self._interrupted:
            return KeyboardInterrupt()
        return Preempted(
            "training ends when its process is asked to",
            got=Plain(f"a signal after step {step} of {steps}"),
            fix="Everything is saved: run it again to go on.",
        )


@contextmanager
def listen_for_preemption() -> Iterator[Preemption]:
    """An `Preemption` that SIGTERM, SIGUSR1, SIGHUP and Ctrl-C ask.

    Outside the main thread nobody is listened to.
    """
    preemption = Preemption()
    with heard([*ASKING, signal.SIGINT], preemption.on_signal, handler=preemption.on_interrupt):
        yield preemption
