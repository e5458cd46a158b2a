"""`python exec_shim.py PARENT SIGNAL CORES COMMAND...`: executes COMMAND so that it ends with its parent.

The file is run by its path and imports nothing of Stoker. `preexec_fn` could do the same, but in a process with
threads, Python code between fork and exec may deadlock.
"""

from __future__ import annotations

import ctypes
import os
import sys

PR_SET_PDEATHSIG = 1
"""Number of the prctl option that makes the kernel send a signal to this process when its parent dies. The option
stays set after exec. Source: prctl(2)."""

EXIT_NOT_FOUND = 127
"""Exit code if the command cannot be started, as in a shell."""


def main(arguments: list[str]) -> None:
    """Set the signal and the cores, then execute the command in this process.

    Args:
        arguments: Process ID of the parent; number of the signal (0: no signal); numbers of the cores, separated by
            commas ("-": all cores); the command.
    """
    parent, number, cores, *command = arguments
    if number != "0":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != int(parent):
            # The parent died before prctl was called.
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
