"""The process that runs a version in shadow: `python -m stoker.rollout.shadow_process FD SETTINGS`.

A version that hangs, dies or fills its memory does so here, not in the server.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from pathlib import Path

from stoker.rollout.shadow_channel import ShadowTarget, receive_request, send_answer, target_of

NICE = 10
"""How far it stands back behind requests, in the scheduler's steps, as a load of a version does."""


def main(descriptor: int, target: ShadowTarget) -> None:
    """Load a version, and answer copies until the server ends.

    Args:
        descriptor: of the socket to the server.
        target: what is run.
    """
    with contextlib.suppress(OSError):
        os.nice(NICE)
        # Where the kernel shares the cores among sessions, a session's own priority counts.
        Path("/proc/self/autogroup").write_text(str(NICE))
    logging.basicConfig(format="%(levelname)s %(name)s: shadow: %(message)s", level=logging.WARNING)
    with socket.socket(fileno=descriptor) as channel:
        # TensorFlow's import takes seconds, and is not needed where the channel cannot be opened.
        from stoker.rollout.shadow_model import ShadowModel

        model = ShadowModel(target)
        send_answer(channel, {"failed": model.failure})
        while not model.failure and (request := receive_request(channel)) is not None:
            send_answer(channel, model.compare(request).to_json())


if __name__ == "__main__":
    main(int(sys.argv[1]), target_of(sys.argv[2]))
