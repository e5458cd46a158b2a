"""Another project's converter, run in a process of its own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from stoker.core.errors import Plain, UserError
from stoker.export.carried import NotCarriedError


def run_converter(
    command: Sequence[str], written: Path, *, form: str, refusals: Callable[[str], list[str]]
) -> None:
    """Run it, and hold it to having written its file.

    Args:
        command: Its argv.
        written: The file that it must have written when it ends with 0.
        form: What it writes, as people call it.
        refusals: What it printed to stderr -> the operations that it says it cannot carry.

    Raises:
        NotCarriedError: it cannot carry some operations, each of them named.
        UserError: it failed in another way; its last line is shown.
    """
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    found = refusals(done.stderr)
    if found:
        raise NotCarriedError(form, found)
    if done.returncode or not written.is_file():
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}, and no word"]
        raise UserError(
            f"the converter to {form} must be able to convert the model",
            got=Plain(lines[-1].rstrip(".")),
        )
