"""`python -m stoker.app.trial.child SPEC.json ASKS ANSWERS PARENT`: measures one setting of an experiment.

What it is asked comes as a JSON line on the descriptor ASKS, what it answers goes as one to ANSWERS:
the user's code may print what it likes. It ends when ASKS is closed, or whoever asks is gone.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

from stoker.app.trial.answer import answer_of
from stoker.app.trial.session import Session
from stoker.core.errors import EXIT_BUG, EXIT_DONE
from stoker.core.files import read_json

PR_SET_PDEATHSIG = 1
"""Source: linux/prctl.h; prctl(2)."""

PARENT_POLL_S = 0.5
"""How often a trial looks whether whoever asks it is still there."""


def end_with(parent: int) -> None:
    """Watch, from a thread, whether the process that asks is still there; end with it.

    The kernel kills it too: no thread of it sees anything while it is paused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PARENT_POLL_S)  # between two looks
        os._exit(EXIT_BUG)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(spec: Path, asks: TextIO, answers: TextIO) -> int:
    """Answer until nobody asks any more; the exit code."""

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    session = Session(read_json(spec), lambda line: send({"told": line}))
    try:
        for line in asks:
            asked = json.loads(line)
            work = functools.partial(getattr(session, asked.pop("ask")), **asked)
            answer = answer_of(work)
            send(answer)
            if "failed" in answer:
                return EXIT_BUG
    finally:
        session.close()
    return EXIT_DONE


if __name__ == "__main__":
    end_with(int(sys.argv[4]))
    with os.fdopen(int(sys.argv[2])) as _asks, os.fdopen(int(sys.argv[3]), "w") as _answers:
        code = main(Path(sys.argv[1]), _asks, _answers)
    sys.stdout.flush()
    sys.stderr.flush()
    # What TensorFlow has under way is nobody's any more.
    os._exit(code)
