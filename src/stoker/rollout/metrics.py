"""Metrics of rollouts, computed from the state files: all servers show the same, and a restart loses nothing."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stoker.core.errors import DataError
from stoker.rollout.control.announcer import LEASE
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.state import FOLDER, Phase, RolloutState, state_of
from stoker.serve.routing import Served
from stoker.telemetry.catalogue.rollout import EVENTS, PHASE, TRAFFIC_SHARE
from stoker.telemetry.exposition import family


@dataclass(kw_only=True)
class _Read:
    """Facts read from one model's state files."""

    files: StateFiles
    number: int = 0
    state: RolloutState | None = None
    events: Counter[str] = field(default_factory=Counter)


_Found = tuple[str, _Read, RolloutState]
"""Name of a model, facts from its state files, and its newest state."""


class RolloutMetrics:
    """Reports phase, share and events of each model with a rollout; thread-safe."""

    def __init__(self) -> None:
        """Create the metrics; `families` reads the states."""
        self._lock = threading.Lock()
        self._read: dict[Path, _Read] = {}

    def families(self, served: Mapping[str, Served]) -> list[list[str]]:
        """Return the lines of each metric in Prometheus' format; none if no model has a rollout.

        Args:
            served: Model -> folder of its versions.
        """
        found: list[_Found] = []
        with self._lock:
            for model, each in sorted(served.items()):
                with contextlib.suppress(DataError, OSError):  # the controller reports this error
                    read = self._take_up(each.base / FOLDER)
                    if read is not None and read.state is not None:
                        found.append((model, read, read.state))
            return [
                family(PHASE, _phases(found)),
                family(TRAFFIC_SHARE, _shares(found)),
                family(EVENTS, _events(found)),
            ]

    def _take_up(self, folder: Path) -> _Read | None:
        if not folder.is_dir():
            return None
        read = self._read.setdefault(folder, _Read(files=StateFiles(folder)))
        newest = read.files.latest()
        if newest is not None and newest.number != read.number:
            for stored in read.files.history():
                if stored.number > read.number:
                    read.events[str(stored.content["event"]["what"])] += 1
                    read.number, read.state = stored.number, state_of(stored.content["state"])
        return read


def _phases(found: list[_Found]) -> dict[Sequence[str], float]:
    return {
        (model, phase): float(phase is state.phase) for model, _, state in found for phase in Phase
    }


def _shares(found: list[_Found]) -> dict[Sequence[str], float]:
    return {
        (model, str(version)): share
        for model, _, state in found
        for version, share in state.arms.items()
    }


def _events(found: list[_Found]) -> dict[Sequence[str], float]:
    return {
        (model, event): count
        for model, read, _ in found
        for event, count in sorted(read.events.items())
        if event != LEASE
    }
