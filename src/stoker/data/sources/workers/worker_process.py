"""`python -m stoker.data.sources.workers.worker_process FD PARENT`: executes tasks until the socket closes.

It never imports TensorFlow. It ends when the process that started it ends, in whatever way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from stoker.data.sources.workers.messages import Failure, receive, send

PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h; prctl(2)."""


def main(link: socket.socket) -> None:
    """Answer each task, a function and its argument, with the function's result or a `Failure`."""
    # If the other end is closed, there is no one to report an error to.
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            function, argument = receive(link)
            answer = _answer(function, argument)
            try:
                send(link, answer)
            except ConnectionError:
                raise
            except OSError as error:  # no memory for its buffers: of the message nothing was sent
                send(link, _failure(error))


def _answer(function: Callable[[Any], Any], argument: Any) -> Any:
    try:
        return function(argument)
    except Exception as error:  # noqa: BLE001  # the process that asked raises it again
        return _failure(error)


def _failure(error: Exception) -> Failure:
    """The error, or its text where it cannot be sent to another process."""
    text = f"In a worker process:\n{''.join(traceback.format_exception(error)).rstrip()}"
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301  # what was dumped here
    except Exception:  # noqa: BLE001  # an exception's own code may raise anything
        return Failure(error=RuntimeError(text))
    error.add_note(text)
    return Failure(error=error)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()


if __name__ == "__main__":
    end_with(int(sys.argv[2]))
    with socket.socket(fileno=int(sys.argv[1])) as _link:
        main(_link)
