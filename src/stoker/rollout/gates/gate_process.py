"""The process of a Python gate: calls the user's function once, and writes the returned value.

`python -m stoker.rollout.gates.gate_process FOLDER MODULE:FUNCTION DESCRIPTOR`; one line of JSON on standard input is
the argument.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from stoker.core.errors import UserError
from stoker.core.user_code import call, load_function

MAX_CHARS = 500
"""Maximum length of an error message, characters: it must fit into the pipe's buffer."""


def main(folder: str, reference: str, descriptor: str) -> None:
    """Call the function, and write its value or its error to the descriptor.

    Args:
        folder: Folder of the function's module.
        reference: `module:function` of the function.
        descriptor: Number of the file descriptor to write the answer to.
    """
    rollout = json.loads(sys.stdin.readline())
    try:
        function = load_function(Path(folder), reference, where="the gate")
        value = call(function, rollout, what=reference)
        answer: dict[str, object] = {"value": _plain(value)}
    except UserError as error:
        answer = {"error": f"{error.rule}: {error.got}"[:MAX_CHARS]}
    except TypeError as error:
        answer = {"error": str(error)[:MAX_CHARS]}
    os.write(int(descriptor), json.dumps(answer).encode())


def _plain(value: object) -> bool | float | None:
    """Convert the value to JSON.

    Raises:
        TypeError: the value is neither a boolean nor a number.
    """
    if value is None:
        return None
    if type(value).__name__ in ("bool", "bool_"):  # also NumPy's booleans
        return bool(value)
    try:
        return float(value)  # type: ignore[arg-type]  # any object; it may fail
    except (TypeError, ValueError):
        raise TypeError(
            f"it returned {type(value).__name__}, not true, false, a number or None"
        ) from None


if __name__ == "__main__":
    main(*sys.argv[1:])
