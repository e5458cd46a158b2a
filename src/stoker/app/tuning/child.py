"""`python -m stoker.app.tuning.child KIND SPEC.json QUESTIONS ANSWERS`: a child process of a tuning or profile.

KIND is `prepare` or `measure`. Questions arrive as JSON lines on the descriptor QUESTIONS, and answers
leave as JSON lines on ANSWERS. Standard output is not used, because the user's code may print anything. The process
exits when QUESTIONS is closed.
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

from stoker.app.tuning.session import Preparation, Session
from stoker.core.errors import EXIT_BUG, EXIT_DONE, UserError
from stoker.core.files import read_json

KINDS: dict[str, type[Preparation | Session]] = {"prepare": Preparation, "measure": Session}
"""KIND -> the class that answers the questions."""

XLA_SIGNS = ("tf2xla conversion failed", "XLA_CPU_JIT", "XLA_GPU_JIT")
"""Text by which TensorFlow's error about a graph that XLA cannot compile is recognized."""

XLA_REASONS = ("XLA_CPU_JIT", "XLA_GPU_JIT", "compile-time constant", "nsupported")
"""Text by which the line with the reason is recognized."""

MAX_LINE = 300
"""Maximum length of an error text, characters."""


def main(kind: str, spec: Path, questions: TextIO, answers: TextIO) -> int:
    """Answer questions until their pipe is closed; return the exit code."""

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    session = KINDS[kind](read_json(spec), lambda line: send({"progress": line}))
    try:
        for line in questions:
            question = json.loads(line)
            answer = answer_of(functools.partial(getattr(session, question.pop("ask")), **question))
            send(answer)
            if "failed" in answer:
                return EXIT_BUG
    finally:
        session.close()
    return EXIT_DONE


def answer_of(work: Callable[[], Any]) -> dict[str, Any]:
    """Return the answer to a question, or why it failed."""
    try:
        return {"answer": work()}
    except UserError as error:
        memory = "must fit" in error.rule or "memory" in error.rule
        return {"failed": "memory" if memory else "refused", "text": error.line()}
    except MemoryError:
        return {"failed": "memory", "text": "Python ran out of memory"}
    except Exception as error:  # noqa: BLE001 - the edge: a trial that fails is a result
        traceback.print_exc()
        if (reason := _refused_by_xla(str(error))) is not None:
            return {"failed": "refused", "text": reason}
        memory = type(error).__name__ == "ResourceExhaustedError"
        text = f"{type(error).__name__}: {_cause(str(error))}"
        return {"failed": "memory" if memory else "crash", "text": text}


def _cause(text: str) -> str:
    """Return the most informative line of an error: TensorFlow appends the Python error to its own message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [
        line for line in lines if re.match(r"(\{\{.*?\}\} )?[A-Za-z_.]*(Error|Exception): ", line)
    ]
    others = [line for line in lines if not line.endswith("Graph execution error:")]
    line = next(iter(raised or others or lines), "")
    return re.sub(r"^\{\{.*?\}\} ", "", line)[:MAX_LINE]


def _refused_by_xla(text: str) -> str | None:
    """Return TensorFlow's line about a graph that XLA cannot compile; None for another error."""
    if not any(sign in text for sign in XLA_SIGNS):
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    with_reason = (line for line in lines if any(reason in line for reason in XLA_REASONS))
    # Remove `{{node NAME}}` directly after the closing parenthesis of a reason: it repeats the operation's name.
    line = re.sub(r"\)\{\{node [^}]*\}\}", ")", next(with_reason, lines[0]))
    return re.sub(r"\{\{node ([^}]*)\}\}", r"\1", line)[:MAX_LINE]


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[3])) as _questions, os.fdopen(int(sys.argv[4]), "w") as _answers:
        code = main(sys.argv[1], Path(sys.argv[2]), _questions, _answers)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip TensorFlow's shutdown, which would wait for computations that are not needed.
    os._exit(code)
