"""How many workers a start of an elastic job has: a queue may admit fewer pods than requested, without informing them.

    incarnations/N.pods/size    workers of the start, and how many pods had joined

The pod of rank 0 writes it when all pods have joined, or none has for a while. A later pod begins the next start.
"""

from __future__ import annotations

import time
from pathlib import Path

from stoker.core.files import write_atomic

SIZE = "size"

SETTLED_S = 60.0
"""After this long without a further pod, the present pods start, seconds. A later pod (its node still pulls the
image) costs a restart; all restarts of a partially admitted job cost this time."""


class Settling:
    """Whether pods still join."""

    def __init__(self, longest_s: float) -> None:
        """Begin to wait.

        Args:
            longest_s: Without a further pod.
        """
        self._longest_s, self._come, self._since_s = longest_s, 0, time.monotonic()

    def is_over(self, come: int) -> bool:
        """Return whether no further pod has joined for this long.

        Args:
            come: How many have joined.
        """
        if come != self._come:
            self._come, self._since_s = come, time.monotonic()
        return time.monotonic() - self._since_s >= self._longest_s


def decide_size(folder: Path, claimed: set[int], sizes: tuple[int, ...]) -> None:
    """Write the largest allowed number of workers that have joined; nothing if there are too few.

    Args:
        folder: Of the start's claims.
        claimed: Ranks of the pods that have joined; ranks after a gap do not count.
        sizes: Allowed numbers of workers.
    """
    come = next(rank for rank in range(len(claimed) + 1) if rank not in claimed)
    fitting = [size for size in sizes if size <= come]
    if fitting and read_size(folder) is None:
        write_atomic(folder / SIZE, f"{max(fitting)} {come}\n")


def read_size(folder: Path) -> tuple[int, int] | None:
    """Return the workers of a start, and how many pods had joined; None until that is decided."""
    try:
        workers, come = (folder / SIZE).read_text().split()
    except FileNotFoundError:
        return None
    return int(workers), int(come)
