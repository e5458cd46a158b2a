"""`python -m stoker.data.sources.workers.worker_process FD`: executes tasks until the socket closes.

It never imports TensorFlow.
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any

from stoker.data.sources.workers.messages import Failure, receive, send


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


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as _link:
        main(_link)
