"""A model's rollout without a server: a folder, a clock that a test moves, and counts that it writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stoker.rollout.control.controller import Controller, Event, change
from stoker.rollout.control.hooks import Hooks
from stoker.rollout.counts.counts import MEASURED, write_counts
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.state.changes import start
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import Phase, RolloutState, state_of
from stoker.rollout.statistics.histogram import count

SETTINGS = RolloutSettings(stages="10,50,100", step_time_s=20, warm_up_s=5, min_requests=100)


@dataclass
class Cluster:
    """A folder, a clock, and what a server has counted."""

    folder: Path
    now_s: float = 1_000.0
    counts: dict[int, dict[int, VersionCounts]] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    server: str = "one"
    took_s: float = 0.02

    def controller(self, *, gate_folder: Path | None = None) -> Controller:
        def clock() -> float:
            return self.now_s

        hooks = Hooks("m", self.folder, gate_folder=gate_folder, clock=clock)
        return Controller(self.folder, hooks=hooks, clock=clock, now=clock)

    @property
    def candidate(self) -> Path:
        return self.folder.parent / "2"

    def start(self, settings: RolloutSettings = SETTINGS) -> None:
        self.candidate.mkdir(parents=True, exist_ok=True)
        files = StateFiles(self.folder)
        state = start(None, 2, serving=1, settings=settings, now_s=self.now_s)
        event = Event(what="start", who="me", why="", at_s=self.now_s)
        change(files, files.latest(), state, event)

    def state(self) -> RolloutState:
        latest = StateFiles(self.folder).latest()
        assert latest is not None
        return state_of(latest.content["state"])

    def answer(self, requests: int, *, bad: int = 0, is_outage: bool = False) -> None:
        """A second's traffic, in the shares of the state.

        Args:
            requests: of both versions.
            bad: answers of the candidate.
            is_outage: half of the answers of both versions are bad.
        """
        state = self.state()
        stage = MEASURED if state.phase is Phase.MEASURING else state.stage
        mine = round(requests * state.share)
        for version, number, wrong in ((1, requests - mine, 0), (2, mine, min(bad, mine))):
            down = number // 2 if is_outage else wrong
            added = VersionCounts(
                requests=number, bad=down, latency=count(np.full(number, self.took_s))
            )
            self.counts.setdefault(stage, {}).setdefault(version, VersionCounts()).add(added)
        write_counts(
            self.folder, self.counts, self.failed, rollout=state.rollout, server=self.server
        )


def run(
    cluster: Cluster,
    controller: Controller,
    seconds: int,
    *,
    bad: int = 0,
    is_outage: bool = False,
) -> list[Phase]:
    phases = []
    for _ in range(seconds):
        cluster.now_s += 1.0
        cluster.answer(200, bad=bad, is_outage=is_outage)
        controller.step()
        phases.append(cluster.state().phase)
    return phases
