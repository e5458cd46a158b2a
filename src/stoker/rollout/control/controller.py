"""Takes a rollout from stage to stage. Any server can run the controller, but only one controller acts at a time."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.core.files import write_json
from stoker.registry.repository import version_folders
from stoker.rollout.control.hooks import Hooks
from stoker.rollout.control.next_step import Action, Decision, decide, without_answer
from stoker.rollout.counts.counts import (
    MEASURED,
    UNLOADED,
    Counts,
    read_all,
    read_failures,
    requests_of,
    stage_counts,
)
from stoker.rollout.gates.gates import (
    Verdict,
    VersionCounts,
    at_full_traffic,
    judge,
)
from stoker.rollout.state.changes import advance, bar, compare_again, pause, roll_back
from stoker.rollout.state.files import Conflict, StateFiles, Stored
from stoker.rollout.state.settings import SLOW_P50, SLOW_P99
from stoker.rollout.state.state import ACTIVE, Phase, RolloutState, state_of
from stoker.rollout.statistics.histogram import quantile

_log = logging.getLogger(__name__)

TAKEOVER_S = 10.0
"""A server replaces a controller whose heartbeat has not changed for this long, seconds by the server's own clock."""

GONE_S = 60.0
"""A version whose folder is missing for this long is rolled back, seconds; over NFS a folder can appear a minute
late."""

MEASURED_REQUESTS = 1_000
"""Number of the baseline's requests after which its latency is known well enough."""

SLOWER = 1.1
"""An answer is slow if it takes longer than this times the baseline's quantile, and longer than the quantile plus
`SLOWER_S`."""

SLOWER_S = 1e-3
"""An answer may always be this much slower than the baseline's quantile, seconds: a version with less traffic finds the
processor's caches colder (measured: 60 us at 20 % of the traffic, a fifth of the median of a small model)."""

_QUANTILES = {SLOW_P99: 0.99, SLOW_P50: 0.5}


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One change of the state, as the history stores it."""

    what: str
    who: str
    why: str
    at_s: float

    def to_json(self) -> dict[str, object]:
        """Return the fields as a JSON object."""
        return {"what": self.what, "who": self.who, "why": self.why, "at_s": self.at_s}


def change(files: StateFiles, after: Stored | None, state: RolloutState, event: Event) -> Stored:
    """Append a state to the state files, with the event that caused it.

    Raises:
        Conflict: another writer changed the state first.
    """
    is_urgent = state.phase is Phase.ROLLED_BACK  # uses the space that is reserved for a full disk
    content = {"state": state.to_json(), "event": event.to_json()}
    return files.append(content, after=after, is_urgent=is_urgent)


class Controller:
    """Judges a model's rollout at each `step`, if no other server does."""

    def __init__(
        self,
        folder: Path,
        *,
        hooks: Hooks | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        """Create a controller, which does nothing until its `step`.

        Args:
            folder: Folder of the rollout's state.
            hooks: The user's gates, webhooks and messages; None: hooks that call no Python gates.
            clock: Returns monotonic time, seconds.
            now: Returns the seconds since the epoch.
        """
        self._folder, self._clock, self._now = folder, clock, now
        self._hooks = hooks or Hooks(folder.parent.name, folder)
        self._files = StateFiles(folder)
        self._name = f"{os.uname().nodename}/{os.getpid()}"
        self._lease: int | None = None
        self._beats = 0
        self._seen: tuple[object, float] = (None, clock())
        # `began_s` of the stage, and the time of `clock` at that moment
        self._stage_clock = (
            0.0,
            0.0,
        )
        self._looked_s = -math.inf  # time of the last step
        self._gone_s: float | None = None  # when the candidate's folder was first missed

    def step(self) -> Decision | None:
        """Judge the rollout, and change the state if the decision requires it.

        Returns:
            The decision; None if no rollout is running, or another server judges it.

        Raises:
            DataError: a file of the state is damaged.
            UserError: the disk is full.
        """
        stored = self._files.latest()
        state = None if stored is None else state_of(stored.content["state"])
        if stored is None or state is None:
            return None
        self._look_at_clock(state)
        if state.is_test:
            self._look_at_arms(stored, state)
            return None
        active, news = state.phase in ACTIVE, self._hooks.has_news(stored, state)
        if not active and not news:
            return None
        # another writer was first: the next step reads its state
        with contextlib.suppress(Conflict):
            if self._lease == state.lease != 0:
                if news:
                    self._hooks.announce()
                decision = self._judge(stored, state) if active else None
                self._beat()  # comes last, because it fails on a full disk, where a rollback still succeeds
                return decision
            self._watch(stored, state)
        return None

    def _look_at_arms(self, stored: Stored, state: RolloutState) -> None:
        """Roll an A/B test back if an arm hangs. If an arm cannot be loaded, the result only warns."""
        failures = read_failures(self._folder, rollout=state.rollout)
        for version in sorted(state.on_trial & failures.keys()):
            if not failures[version].startswith(UNLOADED):
                reason = f"version {version}: {failures[version]}"
                following = roll_back(bar(state, [version]), reason=reason, now_s=self._now())
                with contextlib.suppress(Conflict):  # another server has ended it
                    decision = Decision(action=Action.ROLL_BACK, reason=reason)
                    self._change(stored, following, decision)
                return

    def _watch(self, stored: Stored, state: RolloutState) -> None:
        """Become the controller if the current one has not written its heartbeat for `TAKEOVER_S`."""
        seen = (state.lease, self._read_beat())
        if seen != self._seen[0]:
            self._seen = seen, self._clock()
        if state.lease == 0 or self._clock() - self._seen[1] >= TAKEOVER_S:
            lease = state.lease + 1
            event = Event(what="controller", who=self._name, why=f"lease {lease}", at_s=self._now())
            # If the replaced controller's process was only paused, it finds a newer state, so its change is refused.
            change(self._files, stored, replace(state, lease=lease), event)
            self._lease = lease
            self._beat()

    def _judge(self, stored: Stored, state: RolloutState) -> Decision:
        counts, failures = read_all(self._folder, rollout=state.rollout)
        failed = failures.get(state.candidate, "")
        if failed and not failed.startswith(UNLOADED):
            state = bar(state, [state.candidate])
        if failed := failed or self._gone(state.candidate):
            decision = Decision(action=Action.ROLL_BACK, reason=failed)
            return self._follow(stored, state, decision)
        if state.phase is Phase.MEASURING:
            return self._measure(stored, state, counts)
        stages = stage_counts(counts, state)
        results = judge(stages, state) + self._hooks.gates(state)
        requests = requests_of(counts, stage=state.stage, version=state.candidate)
        decision = decide(state, results, requests=requests, now_s=self._stage_now(state))
        if decision.action is Action.COMPARE or state.share < 1.0:
            state = replace(state, explained=at_full_traffic(stages))
        return self._follow(stored, state, decision)

    def _look_at_clock(self, state: RolloutState) -> None:
        """Record when a stage began that this controller has not seen before.

        It must have begun after the last step, even if the clock of the operator's machine is wrong.
        """
        clock_s = self._clock()
        unseen_s, self._looked_s = clock_s - self._looked_s, clock_s
        if self._stage_clock[0] != state.began_s:
            passed_s = min(max(self._now() - state.began_s, 0.0), unseen_s)
            self._stage_clock = state.began_s, clock_s - passed_s

    def _stage_now(self, state: RolloutState) -> float:
        """Return the stage's start plus the monotonic time since then: a jump of the system clock ends no stage."""
        return state.began_s + self._clock() - self._stage_clock[1]

    def _gone(self, version: int) -> str:
        """Return why a version must be rolled back because its folder is missing; empty if it need not."""
        if version in version_folders(self._folder.parent):
            self._gone_s = None
            return ""
        if self._gone_s is None:
            self._gone_s = self._clock()
        missed_s = self._clock() - self._gone_s
        return f"its folder is missing for {missed_s:.0f} s" if missed_s >= GONE_S else ""

    def _follow(self, stored: Stored, state: RolloutState, decision: Decision) -> Decision:
        """Carry out a decision. A webhook can delay the next stage."""
        if decision.action is Action.ADVANCE:
            following = advance(state, now_s=self._now())
            answers = self._hooks.before(state, following, why=decision.reason)
            silent = [each for each in answers if each.verdict is not Verdict.PASS]
            if silent:
                return self._follow(stored, state, without_answer(state, silent))
            self._change(stored, following, decision)
        elif decision.action is Action.COMPARE:
            following = compare_again(state, reason=decision.reason, now_s=self._now())
            self._change(stored, following, decision)
        elif decision.action is Action.PAUSE:
            self._change(stored, pause(state, reason=decision.reason), decision)
        elif decision.action is Action.ROLL_BACK:
            following = roll_back(state, reason=decision.reason, now_s=self._now())
            self._change(stored, following, decision)
        return decision

    def _measure(self, stored: Stored, state: RolloutState, counts: Counts) -> Decision:
        """Begin the first stage as soon as the baseline's latency is known."""
        seen = counts.get(MEASURED, {}).get(state.baseline, VersionCounts())
        judged = set(_QUANTILES) - set(state.settings.dry_run)
        if judged and seen.requests < MEASURED_REQUESTS:
            reason = f"{seen.requests} of {MEASURED_REQUESTS} requests of the baseline"
            return Decision(action=Action.WAIT, reason=reason)
        slow_s = {
            gate: max(SLOWER * (usual_s := quantile(seen.latency, share)), usual_s + SLOWER_S)
            for gate, share in _QUANTILES.items()
            if seen.requests
        }
        decision = Decision(action=Action.ADVANCE, reason="the baseline's latency is known")
        return self._follow(stored, replace(state, slow_s=slow_s), decision)

    def _change(self, stored: Stored, state: RolloutState, decision: Decision) -> None:
        event = Event(what=decision.action, who=self._name, why=decision.reason, at_s=self._now())
        change(self._files, stored, state, event)
        _log.warning(
            "rollout of version %d: %s: %s", state.candidate, decision.action, decision.reason
        )

    def _beat(self) -> None:
        self._beats += 1
        write_json(self._folder / "beat.json", {"lease": self._lease, "count": self._beats})

    def _read_beat(self) -> Mapping[str, int] | None:
        with contextlib.suppress(OSError, ValueError):
            beat: Mapping[str, int] = json.loads((self._folder / "beat.json").read_bytes())
            return beat
        return None
