"""`python -m stoker.app.tuning.child SPEC.json ASKS ANSWERS`: measures one setting of an experiment.

What it is asked comes as a JSON line on the descriptor ASKS, what it answers goes as one to ANSWERS:
the user's code may print what it likes. It ends when ASKS is closed.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from stoker.app.tuning.session import Session
from stoker.core.errors import EXIT_BUG, EXIT_DONE, UserError
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


SIGNS_OF_XLA = ("tf2xla conversion failed", "XLA_CPU_JIT", "XLA_GPU_JIT")
"""What TensorFlow says of a graph that XLA is to compile, and cannot."""

REASONS_OF_XLA = ("XLA_CPU_JIT", "XLA_GPU_JIT", "compile-time constant", "nsupported")
"""In the line that says why."""

LONGEST_LINE = 300
"""Characters of it."""


def answer_of(asked: Callable[[], Any]) -> dict[str, Any]:
    """What was asked, or why there is no answer."""
    try:
        return {"answer": asked()}
    except UserError as error:
        memory = "must fit" in error.rule or "memory" in error.rule
        return {"failed": "memory" if memory else "refused", "text": error.line()}
    except MemoryError:
        return {"failed": "memory", "text": "Python ran out of memory"}
    except Exception as error:  # noqa: BLE001 - the edge: a trial that fails is a result
        traceback.print_exc()
        if (why := _refused_by_xla(str(error))) is not None:
            return {"failed": "refused", "text": why}
        memory = type(error).__name__ == "ResourceExhaustedError"
        text = _cause(str(error))
        return {
            "failed": "memory" if memory else "crash",
            "text": f"{type(error).__name__}: {text}",
        }


def _cause(text: str) -> str:
    """The line of an error that says most: TensorFlow puts what a user's Python raised behind its own."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [
        line for line in lines if re.match(r"(\{\{.*?\}\} )?[A-Za-z_.]*(Error|Exception): ", line)
    ]
    telling = [line for line in lines if not line.endswith("Graph execution error:")]
    line = next(iter(raised or telling or lines), "")
    return re.sub(r"^\{\{.*?\}\} ", "", line)[:LONGEST_LINE]


def _refused_by_xla(text: str) -> str | None:
    """TensorFlow's line on a graph that XLA does not compile; None where it says nothing of XLA."""
    if not any(sign in text for sign in SIGNS_OF_XLA):
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = (line for line in lines if any(why in line for why in REASONS_OF_XLA))
    # The operation's place in the graph stands behind the reason once more.
    line = re.sub(r"\)\{\{node [^}]*\}\}", ")", next(said, lines[0]))
    return re.sub(r"\{\{node ([^}]*)\}\}", r"\1", line)[:LONGEST_LINE]
