"""`python orphan_killer.py`: kills the process groups of workers whose launcher was killed.

Its standard input names process groups: `+123` has started, `-123` has ended. The kernel closes it
when the launcher ends for any reason. A separate file, run by path without Stoker.
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
