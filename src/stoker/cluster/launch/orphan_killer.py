"""`python orphan_killer.py`: kills the process groups of workers whose launcher was killed.

The launcher writes to its standard input: `+123` when process group 123 has started, `-123` when it has ended. The
kernel closes this input when the launcher ends, for whatever reason. The file is run by its path and imports nothing
of Stoker, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def main() -> None:
    """Wait for the end of the launcher, then kill every remaining group."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        (groups.add if line[0] == "+" else groups.discard)(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
