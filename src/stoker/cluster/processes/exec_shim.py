"""`python exec_shim.py PARENT SIGNAL CORES COMMAND...`: becomes COMMAND, which ends with its parent.

A separate file, run by path without Stoker: between fork and exec of a process with threads,
Python code (`preexec_fn`) may deadlock.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
"""The kernel sends a signal to this process when its parent dies; exec keeps that. Source: prctl(2)."""

EXIT_NOT_FOUND = 127
"""Exit code if the command cannot be started, as in a shell."""


def main(arguments: list[str]) -> None:
    """Become the command.

    Args:
        arguments: Process id of the parent, number of the signal (0 for none), numbers of the cores
            separated by commas ("-" for all cores), the command.
    """
    parent, number, cores, *command = arguments
    if number != "0":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != int(parent):
            # The parent died before the call.
            sys.exit(1)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    try:
        os.execvp(command[0], command)  # noqa: S606 - an argument vector, no shell
    except OSError as error:
        sys.stderr.write(f"{command[0]!r} cannot be started: {error.strerror}\n")
        sys.exit(EXIT_NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1:])
