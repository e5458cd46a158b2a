"""`python exec_shim.py PARENT CORES COMMAND...`: becomes COMMAND, which dies with its launcher.

A file of its own, run by path without Stoker: between fork and exec of a process with threads,
Python code (`preexec_fn`) may deadlock.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that this process gets when its parent dies; exec keeps it."""


def main(arguments: list[str]) -> None:
    """Become the command.

    Args:
        arguments: Process id of the launcher, cores by number and comma ("-" for any), the command.
    """
    parent, cores, *command = arguments
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        # The launcher died before the kernel was told.
        sys.exit(1)
    if cores != "-":
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(command[0], command)  # noqa: S606 - an argument vector, no shell


if __name__ == "__main__":
    main(sys.argv[1:])
