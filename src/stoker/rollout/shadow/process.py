"""The process that runs a version in shadow: `python -m stoker.rollout.shadow.process FD SETTINGS`.

If the version hangs, crashes or runs out of memory, this happens in this process, not in the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from pathlib import Path

from stoker.rollout.shadow.channel import ShadowTarget, receive_request, send_answer, target_of

LOAD_NICE, CALL_NICE = 5, 19
"""Niceness during the load and during calls: the server's requests go first. The load, which happens once, has the
lower niceness, so that it ends sooner."""


def main(descriptor: int, target: ShadowTarget) -> None:
    """Load a version, and answer copies until the server ends.

    Args:
        descriptor: File descriptor of the socket to the server.
        target: The version to run.
    """
    _stand_back(LOAD_NICE, os.SCHED_OTHER)
    logging.basicConfig(format="%(levelname)s %(name)s: shadow: %(message)s", level=logging.WARNING)
    with socket.socket(fileno=descriptor) as channel:
        # TensorFlow's import takes seconds, and is not needed if the channel cannot be opened.
        from stoker.rollout.shadow.model import ShadowModel

        model = ShadowModel(target)
        # With SCHED_IDLE, a request's thread preempts this process immediately; with niceness alone, the thread would
        # wait for the end of a time slice.
        _stand_back(CALL_NICE, os.SCHED_IDLE)
        send_answer(channel, {"failed": model.failure})
        while not model.failure and (request := receive_request(channel)) is not None:
            send_answer(channel, model.compare(request).to_json())


def _stand_back(nice: int, policy: int) -> None:
    """Give all threads this niceness and scheduling policy; future threads inherit them."""
    with contextlib.suppress(OSError):
        for thread in Path("/proc/self/task").iterdir():
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)
            os.sched_setscheduler(int(thread.name), policy, os.sched_param(0))
        # If the kernel divides the cores among sessions (autogroup), the session's niceness decides.
        Path("/proc/self/autogroup").write_text(str(nice))


if __name__ == "__main__":
    main(int(sys.argv[1]), target_of(sys.argv[2]))
