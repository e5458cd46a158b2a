"""How many workers a start of an elastic job has: a queue may admit fewer pods than the job wants, and tells none of them.

    incarnations/N.pods/size    workers of the start, and how many pods had come

The pod of rank 0 writes it as soon as all pods have come, or none has for a while. A pod that comes later begins the next start.
"""

from __future__ import annotations

import time
from pathlib import Path

from stoker.core.files import write_atomic

SIZE = "size"

SETTLED_S = 60.0
"""How long no further pod has come until those that are there start, seconds. A pod that is later (its node still pulls the
image) costs a restart; all restarts of a job that was admitted in part cost this time."""


class Settling:
    """Whether pods still come."""

    def __init__(self, longest_s: float) -> None:
        """Begin to watch.

        Args:
            longest_s: Without a further pod.
        """
        self._longest_s, self._come, self._since_s = longest_s, 0, time.monotonic()

    def is_over(self, come: int) -> bool:
        """Return whether none has come for so long.

        Args:
            come: How many are there now.
        """
        if come != self._come:
            self._come, self._since_s = come, time.monotonic()
        return time.monotonic() - self._since_s >= self._longest_s


def decide_size(folder: Path, claimed: set[int], sizes: tuple[int, ...]) -> None:
    """Write the largest allowed number of workers that have come; nothing if there are too few.

    Args:
        folder: Of the start's claims.
        claimed: Ranks of the pods that have come; only those without a gap before them count.
        sizes: Allowed numbers of workers.
    """
    come = next(rank for rank in range(len(claimed) + 1) if rank not in claimed)
    fitting = [size for size in sizes if size <= come]
    if fitting and read_size(folder) is None:
        write_atomic(folder / SIZE, f"{max(fitting)} {come}\n")


def read_size(folder: Path) -> tuple[int, int] | None:
    """Return workers of a start, and how many pods had come; None before that is decided."""
    try:
        workers, come = (folder / SIZE).read_text().split()
    except FileNotFoundError:
        return None
    return int(workers), int(come)
