"""Calls the Python function of a user's gate, in a separate process with a time limit."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stoker.cluster.processes import Child, ProcessOptions, how_it_ended
from stoker.core.errors import UserError
from stoker.rollout.http_call import NoAnswerError

_MAX_BYTES = 1 << 16
_STDERR = 2


def call_in_process(
    folder: Path, reference: str, rollout: Mapping[str, Any], *, timeout_s: float
) -> bool | float | None:
    """Call the function and return its value; a function that crashes or hangs does not affect this process.

    Args:
        folder: Folder of the function's module.
        reference: `module:function` of the function.
        rollout: The argument of the function.
        timeout_s: Maximum time of the function, seconds; after it, the process and all its children are killed.

    Raises:
        NoAnswerError: the function raised, hung, or ended its process.
    """
    reading, writing = os.pipe()
    try:
        argv = [sys.executable, "-m", "stoker.rollout.gates.gate_process", str(folder), reference]
        try:
            # The function's output goes to the log, because stdout belongs to the server.
            child = Child(
                f"gate {reference}",
                [*argv, str(writing)],
                ProcessOptions(stdin=subprocess.PIPE, output=_STDERR, pass_fds=[writing]),
            )
        except (OSError, UserError) as error:
            raise NoAnswerError(f"its process cannot be started: {error}") from None
        finally:
            os.close(writing)
        with contextlib.suppress(BrokenPipeError):
            child.tell(json.dumps(rollout))
        in_time = child.end(timeout_s)
        if not in_time:
            raise NoAnswerError(f"no answer within {timeout_s:g} s")
        return _answer(reading, child)
    finally:
        os.close(reading)


def _answer(reading: int, child: Child) -> bool | float | None:
    # a process that left the process group may hold the other end open
    os.set_blocking(reading, False)
    with contextlib.suppress(BlockingIOError, ValueError, KeyError, TypeError):
        answer = json.loads(os.read(reading, _MAX_BYTES))
        if "error" in answer:
            raise NoAnswerError(str(answer["error"]))
        value: bool | float | None = answer["value"]
        return value
    raise NoAnswerError(f"its process {how_it_ended(child.code or 0)} without an answer")
