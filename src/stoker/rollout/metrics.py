"""The metrics of rollouts, from the files of their states: the same at each server, and nothing is lost by a restart."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stoker.core.errors import DataError
from stoker.rollout.control.announcer import LEASE
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.state import FOLDER, Phase, RolloutState, state_of
from stoker.serve.routing import Served
from stoker.telemetry.exposition import sample

_PHASE = "stoker_rollout_phase"
_SHARE = "stoker_rollout_traffic_share"
_EVENTS = "stoker_rollout_events_total"


@dataclass(kw_only=True)
class _Read:
    """What was read of one model's states."""

    files: StateFiles
    number: int = 0
    state: RolloutState | None = None
    events: Counter[str] = field(default_factory=Counter)


class RolloutMetrics:
    """Phase, share and events of each model with a rollout; may be used by many threads."""

    def __init__(self) -> None:
        """Read nothing yet."""
        self._lock = threading.Lock()
        self._read: dict[Path, _Read] = {}

    def exposition(self, served: Mapping[str, Served]) -> str:
        """The text for Prometheus; empty without a rollout.

        Args:
            served: model -> where it is.
        """
        found: list[tuple[str, _Read, RolloutState]] = []
        with self._lock:
            for model, each in sorted(served.items()):
                with contextlib.suppress(DataError, OSError):  # the controller reports it
                    read = self._take_up(each.base / FOLDER)
                    if read is not None and read.state is not None:
                        found.append((model, read, read.state))
            if not found:
                return ""
            return "\n".join([*_phases(found), *_shares(found), *_events(found)]) + "\n"

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


def _phases(found: list[tuple[str, _Read, RolloutState]]) -> list[str]:
    return [
        f"# HELP {_PHASE} 1 for the phase that a model's rollout is in, 0 for the others.",
        f"# TYPE {_PHASE} gauge",
        *(
            sample(_PHASE, (("model_name", model), ("phase", phase)), float(phase is state.phase))
            for model, _, state in found
            for phase in Phase
        ),
    ]


def _shares(found: list[tuple[str, _Read, RolloutState]]) -> list[str]:
    return [
        f"# HELP {_SHARE} Share of the traffic that a version is to take, 0 to 1.",
        f"# TYPE {_SHARE} gauge",
        *(
            sample(_SHARE, (("model_name", model), ("version", str(version))), share)
            for model, _, state in found
            # One version has all of it where a push is still to come.
            for version, share in {
                state.baseline: 1.0 - state.share,
                state.candidate: state.share,
            }.items()
        ),
    ]


def _events(found: list[tuple[str, _Read, RolloutState]]) -> list[str]:
    return [
        f"# HELP {_EVENTS} Changes of a model's rollouts, by what changed; the same at each server.",
        f"# TYPE {_EVENTS} counter",
        *(
            sample(_EVENTS, (("model_name", model), ("event", event)), count)
            for model, read, _ in found
            for event, count in sorted(read.events.items())
            if event != LEASE
        ),
    ]
