"""Finds a worker that is slower than the others, by the local step time of each.

Each worker writes its own to a file next to the run's output once a second; the first one reads them all. All
workers see the run's folder at the same path, on one machine or several.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import statistics
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

from stoker.core.incarnation import is_newest

_LOG = logging.getLogger(__name__)

RATIO = 1.2
"""A straggler's local step time is above that of the others' median by this factor."""

EVERY_S = 1.0
"""Pause between two looks, seconds."""


def ratios(medians_s: Mapping[str, float]) -> dict[str, float]:
    """Return each worker's local step time, divided by the median of the others'.

    Args:
        medians_s: Worker -> its local step time, seconds.
    """
    found = {}
    for worker, own_s in medians_s.items():
        others_s = [seconds for other, seconds in medians_s.items() if other != worker]
        if others_s and (usual_s := statistics.median(others_s)) > 0:
            found[worker] = own_s / usual_s
    return found


class Stragglers:
    """Exchanges the local step times of all workers; a context manager."""

    def __init__(
        self, folder: Path, *, rank: int, median_s: Callable[[], float | None], reads: bool
    ) -> None:
        """Store the arguments.

        Args:
            folder: For the files, shared by all workers.
            rank: Of this worker.
            median_s: Its local step time; called by another thread.
            reads: Whether this worker reads the others' files, reports stragglers, and removes the
                folder at the end.
        """
        self._folder, self._rank, self._median_s, self._reads = folder, rank, median_s, reads
        self._medians_s: dict[str, float] = {}
        self._ratios: dict[str, float] = {}
        self._worst: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="stragglers", daemon=True)

    @property
    def medians_s(self) -> Mapping[str, float]:
        """Worker -> its local step time, seconds."""
        return self._medians_s

    @property
    def ratios(self) -> Mapping[str, float]:
        """Worker -> its local step time over that of the others."""
        return self._ratios

    def line(self) -> str:
        """Return the part of the progress line about stragglers; "" without one."""
        slow = {worker: ratio for worker, ratio in self._ratios.items() if ratio > RATIO}
        return ", ".join(f"worker {worker} slow {ratio:.1f}x" for worker, ratio in slow.items())

    def facts(self) -> list[dict[str, float | str]]:
        """Return the stragglers of the whole training, each with its largest ratio; JSON values."""
        return [{"worker": worker, "ratio": ratio} for worker, ratio in self._worst.items()]

    def __enter__(self) -> Self:
        if self._reads and is_newest():
            # Only this worker makes the folder: no other one brings it back after its end.
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._reads and is_newest():  # else it is the folder of a later start of the job
            self._tell()
            self._look()
            shutil.rmtree(self._folder, ignore_errors=True)

    def _keep(self) -> None:
        while not self._over.wait(EVERY_S):
            self._tell()
            if self._reads:
                self._look()

    def _tell(self) -> None:
        median_s = self._median_s()
        if median_s is None or not is_newest():
            return
        made = self._folder / f".{self._rank}.tmp"
        with contextlib.suppress(OSError):  # the next write may succeed
            made.write_text(json.dumps({"median_s": median_s}))
            os.replace(made, self._folder / f"{self._rank}.json")

    def _look(self) -> None:
        found = {}
        for path in sorted(self._folder.glob("*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                found[path.stem] = float(json.loads(path.read_text())["median_s"])
        self._medians_s, self._ratios = found or self._medians_s, ratios(found) or self._ratios
        for worker, ratio in self._ratios.items():
            if ratio <= RATIO:
                continue
            if worker not in self._worst:
                _LOG.warning(
                    "worker %s is slow: %.3g ms from one all-reduce to the next, %.1f x the others",
                    worker,
                    1e3 * self._medians_s[worker],
                    ratio,
                )
            self._worst[worker] = max(ratio, self._worst.get(worker, 0.0))
