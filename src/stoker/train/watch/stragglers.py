"""Finds workers that are slower than others, from the local step time of each worker.

Once per second, each worker writes its own time to a file next to the run's output, and the first worker reads all
files. All workers see the run's folder at the same path, on one or several machines.
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
"""A worker is a straggler if its local step time is more than this many times the median of the others."""

EVERY_S = 1.0
"""Pause before each worker writes its time again, seconds."""


def ratios(medians_s: Mapping[str, float]) -> dict[str, float]:
    """Return worker -> its local step time, divided by the median of the other workers' times.

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
    """A context manager that exchanges the local step times of all workers."""

    def __init__(
        self, folder: Path, *, rank: int, median_s: Callable[[], float | None], reads: bool
    ) -> None:
        """Store the arguments.

        Args:
            folder: Folder for the files, shared by all workers.
            rank: Rank of this worker.
            median_s: Returns the local step time of this worker; called by another thread.
            reads: Whether this worker reads all files, reports stragglers, and removes the folder at the
                end.
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
        """Worker -> its local step time, divided by the median of the other workers' times."""
        return self._ratios

    def line(self) -> str:
        """Return the part of the progress line about stragglers; empty without stragglers."""
        slow = {worker: ratio for worker, ratio in self._ratios.items() if ratio > RATIO}
        return ", ".join(f"worker {worker} slow {ratio:.1f}x" for worker, ratio in slow.items())

    def facts(self) -> list[dict[str, float | str]]:
        """Return the stragglers of the whole training, each with its largest ratio; JSON values."""
        return [{"worker": worker, "ratio": ratio} for worker, ratio in self._worst.items()]

    def __enter__(self) -> Self:
        if self._reads and is_newest():
            # Only this worker creates the folder, so that no other worker creates it again after its end.
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                self._folder.mkdir(parents=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        if self._reads and is_newest():  # if not, a later start of the job uses the folder
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
                    "worker %s is slow: %.3g ms between two all-reduces, %.1f times the median of the others",
                    worker,
                    1e3 * self._medians_s[worker],
                    ratio,
                )
            self._worst[worker] = max(ratio, self._worst.get(worker, 0.0))
