"""The signs of life that a worker gives the launcher that started it, once a second."""

from __future__ import annotations

import faulthandler
import functools
import os
import select
import threading
import time
from collections.abc import MutableMapping

from stoker.cluster.launch.heartbeat import EVERY_S, FD_VARIABLE, Beat, Phase
from stoker.cluster.launch.member import STACKS

RANK_VARIABLE = "STOKER_RANK"
"""Environment variable: this process's place among those that were started together."""

OTHERS_S = 600.0
"""Longest that a worker whose work is done waits for the others; the launcher ends it before."""


class Heartbeat:
    """Beats from a thread of its own, whatever the training does.

    What is told by `beat`, `enter` and `progress` is only remembered: the thread sends it.
    """

    def __init__(self, descriptor: int, *, rank: int, every_s: float = EVERY_S) -> None:
        """Begin to beat.

        Args:
            descriptor: The worker's end of the launcher's socket; it is closed with this object.
            rank: This process's place.
            every_s: Pause between two beats, seconds.
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
        """A step is done: in the phase `train`, the number must grow."""
        self._step = step

    def enter(self, phase: Phase) -> None:
        """Something else begins; only in `train` are steps expected."""
        self._phase = phase
        self._hurry.set()

    def progress(self, line: str, share: float | None) -> None:
        """What a person may know of how far it is."""
        self._line, self._share = line, share

    def finish(self) -> None:
        """Say that this process's work is done, and wait until that of all others is.

        The first worker leads what TensorFlow coordinates: others fail when it ends before them.
        """
        self._phase = "done"
        self._end_thread()
        # Nothing is ever sent this way: it becomes readable when the launcher lets go, or dies.
        select.select([self._descriptor], [], [], OTHERS_S)

    def close(self) -> None:
        """Stop beating."""
        self._end_thread()
        os.close(self._descriptor)

    def _end_thread(self) -> None:
        self._closed.set()
        self._hurry.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            closing = self._closed.is_set()
            # That all is done must not be lost; any other beat may be.
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
            # The launcher has not read for minutes; it will see the next one.
            return
        except (BrokenPipeError, ConnectionResetError):
            # It is gone, and this process is about to be killed.
            return


@functools.cache
def process_heartbeat() -> Heartbeat:
    """This process's heartbeat: to the launcher that the environment names, else to nobody.

    Python's stacks are then written to stderr at SIGUSR2.
    """
    return open_heartbeat(os.environ)


def open_heartbeat(environ: MutableMapping[str, str]) -> Heartbeat:
    """A heartbeat to whom an environment names; what it starts does not inherit the socket.

    Args:
        environ: `STOKER_HEARTBEAT_FD` is taken out of it.
    """
    descriptor = environ.pop(FD_VARIABLE, None)
    rank = int(environ.get(RANK_VARIABLE, "0"))
    if descriptor is None:
        return Heartbeat(os.open(os.devnull, os.O_RDWR), rank=rank)
    faulthandler.register(STACKS, all_threads=True)
    return Heartbeat(int(descriptor), rank=rank)
