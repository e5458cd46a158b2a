"""Decides how many workers a start of an elastic job has: a queue may admit fewer pods, and does not tell the pods.

    incarnations/N.pods/size    number of workers of the start, and number of pods that had joined

The pod of rank 0 writes this file when all pods have joined, or when no pod has joined for a while. A pod that comes
later begins the next start.
"""

from __future__ import annotations

import time
from pathlib import Path

from stoker.core.files import write_atomic

SIZE = "size"

SETTLED_S = 60.0
"""The pods that have joined start if no other pod joins for this many seconds. A later pod (e.g. because its node
still pulls the image) causes a restart. If a queue admits only a part of the pods, every start waits this long."""


class Settling:
    """Tells whether other pods may still join a start."""

    def __init__(self, longest_s: float) -> None:
        """Begin to wait.

        Args:
            longest_s: Time without another pod after which the wait is over, seconds.
        """
        self._longest_s, self._come, self._since_s = longest_s, 0, time.monotonic()

    def is_over(self, come: int) -> bool:
        """Return whether no other pod has joined for `longest_s` seconds.

        Args:
            come: Number of pods that have joined.
        """
        if come != self._come:
            self._come, self._since_s = come, time.monotonic()
        return time.monotonic() - self._since_s >= self._longest_s


def decide_size(folder: Path, claimed: set[int], sizes: tuple[int, ...]) -> None:
    """Write the largest allowed number of workers that the joined pods can form; nothing if there are too few.

    Args:
        folder: Folder of the start's claims.
        claimed: Ranks of the pods that have joined; ranks after a gap are not used.
        sizes: Allowed numbers of workers.
    """
    come = next(rank for rank in range(len(claimed) + 1) if rank not in claimed)
    fitting = [size for size in sizes if size <= come]
    if fitting and read_size(folder) is None:
        write_atomic(folder / SIZE, f"{max(fitting)} {come}\n")


def read_size(folder: Path) -> tuple[int, int] | None:
    """Return two numbers of a start: its workers, and the pods that had joined when this was decided; None before."""
    try:
        workers, come = (folder / SIZE).read_text().split()
    except FileNotFoundError:
        return None
    return int(workers), int(come)
