"""`python -m stoker.app.trial.child SPEC.json ASKS ANSWERS`: measures one setting of an experiment.

What it is asked comes as a JSON line on the descriptor ASKS, what it answers goes as one to ANSWERS:
the user's code may print what it likes. It ends when ASKS is closed.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from stoker.app.trial.answer import answer_of
from stoker.app.trial.session import Session
from stoker.core.errors import EXIT_BUG, EXIT_DONE
from stoker.core.files import read_json


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
    with os.fdopen(int(sys.argv[2])) as _asks, os.fdopen(int(sys.argv[3]), "w") as _answers:
        code = main(Path(sys.argv[1]), _asks, _answers)
    sys.stdout.flush()
    sys.stderr.flush()
    # What TensorFlow has under way is nobody's any more.
    os._exit(code)
