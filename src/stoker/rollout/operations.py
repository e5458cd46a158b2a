"""Operations on a model's rollout: start, pause, resume, promote, roll back. Each is one change of its state."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.core.errors import Plain, UserError
from stoker.registry.repository import Repository, verify
from stoker.rollout.control.controller import Event, change
from stoker.rollout.control.hooks import read_user_results
from stoker.rollout.counts.counts import Counts, read_counts, stage_counts
from stoker.rollout.gates.checks import check_names, check_queries
from stoker.rollout.gates.gates import GateResult, compared_stages, judge
from stoker.rollout.memory import check_fits
from stoker.rollout.shadow.counts import ShadowSummary, summary
from stoker.rollout.state.changes import (
    advance,
    end_test,
    first_version,
    pause,
    promote_fully,
    resume,
    roll_back,
    start,
)
from stoker.rollout.state.files import Conflict, StateFiles, Stored
from stoker.rollout.state.settings import BAD, RolloutSettings
from stoker.rollout.state.state import FOLDER, RolloutState, state_of
from stoker.rollout.state.user_gates import with_code
from stoker.rollout.statistics.evidence import BadAnswers, bad_answers_needed

MAX_WHY = 1_000
"""Maximum length of a stored reason, characters."""

Change = Callable[[RolloutState], RolloutState]
"""Returns the changed state; raises UserError if the change is not possible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The current state of a model's rollout, with its counts and results."""

    state: RolloutState
    counts: Counts
    gates: list[GateResult]

    def bad_answers_needed(self) -> int | None:
        """Return how many more bad answers of the candidate cause a rollback; None if the baseline takes no traffic."""
        state = self.state
        if not (state.is_active and 0.0 < state.share < 1.0) or state.is_test:
            return None
        settings = state.settings
        stages = compared_stages(stage_counts(self.counts, state), BAD) or [
            BadAnswers(share=state.share, candidate=0, baseline=0)
        ]
        return bad_answers_needed(
            stages,
            gates=settings.gates,
            alpha=settings.alpha,
            allowed_ratio=settings.allowed_ratio,
        )

    def shadow_stages(self) -> dict[int, ShadowSummary]:
        """Return stage -> figures, for each shadow stage so far."""
        found = {stage: summary(each, self.state) for stage, each in sorted(self.counts.items())}
        return {stage: figures for stage, figures in found.items() if figures is not None}


class ModelRollouts:
    """The rollouts of one model of a repository."""

    def __init__(
        self, root: Path, model: str, *, who: str = "", gate_folder: Path | None = None
    ) -> None:
        """Open the rollouts; nothing is written before the first operation.

        Args:
            root: Folder of the repository.
            model: Name of the model in the repository.
            who: Name of the operator, for the history; empty: the user of this process.
            gate_folder: Folder with the modules of Python gates; None: no Python gates.

        Raises:
            UserError: the repository has no such model.
        """
        self.who = who or operator()
        self.repository, self.model, self._gate_folder = Repository(root), model, gate_folder
        self.folder = self.repository.base(model) / FOLDER
        self._files = StateFiles(self.folder)
        if not self.repository.versions(model):
            raise UserError(
                f"{root} must hold the model {model!r}",
                got=Plain(f"models {', '.join(self.repository.models()) or 'none'}"),
                fix="Push it first, or name another repository with --models.",
            )

    def start(
        self,
        candidate: int,
        settings: RolloutSettings,
        *,
        why: str,
        baseline: int | None = None,
        server_bytes: int | None = None,
    ) -> RolloutState:
        """Start the rollout of a version. A model's only version takes all traffic immediately.

        Args:
            candidate: The version to roll out.
            settings: Settings of the rollout.
            why: Reason, for the history.
            baseline: The version to compare with; None: the version that serves; without a state, an older version.
            server_bytes: Memory of a server, bytes; None: the memory of this machine.

        Raises:
            ConfigError: a gate of `dry_run` is unknown.
            UserError: another rollout is running, the version does not exist, clients of the baseline could not
                call it, or both versions do not fit in memory.
            DataError: the candidate is damaged.
        """
        check_names(settings)
        gates = with_code(settings.user_gates, self._gate_folder)
        settings = replace(settings, user_gates=gates)
        verify(self.repository.path(self.model, candidate))

        def begin(state: RolloutState | None) -> RolloutState:
            alone = baseline is None and self.repository.versions(self.model) == [candidate]
            if state is None and alone:
                # Without a state, servers would switch to the next version as soon as it is pushed.
                return first_version(candidate, settings=settings, now_s=time.time(), who=self.who)
            serving = self._newest_other(candidate) if baseline is None else baseline
            begun = start(
                state,
                candidate,
                serving=serving,
                settings=settings,
                now_s=time.time(),
                who=self.who,
            )
            if baseline not in (None, begun.baseline):
                raise UserError(
                    "The baseline of a rollout must be the version that takes the traffic",
                    got=Plain(f"version {baseline}; version {begun.baseline} takes it"),
                    fix=f"Leave --baseline out, or run `stoker rollout rollback {self.model} --to {baseline}` first.",
                )
            folders = [
                self.repository.path(self.model, each) for each in (begun.baseline, candidate)
            ]
            from stoker.rollout.signatures import check_compatible  # imports TensorFlow

            check_compatible(*folders)
            check_fits(*folders, server_bytes=server_bytes)
            check_queries(self.model, begun)
            return begun

        return self.change(begin, what="start", why=why)

    def state(self) -> RolloutState | None:
        """Return the current state; None if the model has no state."""
        stored = self._files.latest()
        return None if stored is None else state_of(stored.content["state"])

    def hold(self, *, why: str) -> int:
        """Create a state if the model has none, so that the next pushed version takes no traffic before its rollout.

        Args:
            why: Reason, for the history.

        Returns:
            The version that takes the traffic; if the model had no state, the newest version.
        """
        newest = max(self.repository.versions(self.model))

        def keep(state: RolloutState | None) -> RolloutState:
            return state or first_version(
                newest, settings=RolloutSettings(), now_s=time.time(), who=self.who
            )

        now = self.state()
        return (now or self.change(keep, what="hold", why=why)).stable

    def change(
        self, operation: Callable[[RolloutState | None], RolloutState], *, what: str, why: str
    ) -> RolloutState:
        """Append the state that an operation returns. If another writer was first, apply the operation to its state.

        Args:
            operation: Returns the new state for the current state, or for None if the model has no state yet.
            what: Name of the change, for the history.
            why: Reason, for the history.

        Raises:
            UserError: the change is not possible, or the operation raises it.
        """
        seen: RolloutState | None = None
        while True:
            stored = self._files.latest()
            before = None if stored is None else state_of(stored.content["state"])
            if seen is not None and stored is not None:
                self._check_unmoved(seen, stored, what=what)
            state = operation(before)
            if state is before:
                return state  # the change has no effect: another operator has already made it
            event = Event(what=what, who=self.who, why=_one_line(why), at_s=time.time())
            try:
                change(self._files, stored, state, event)
            except Conflict:
                seen = before
                continue  # another writer was first: apply the operation to its state
            return state

    def apply(self, operation: Change, *, what: str, why: str) -> RolloutState:
        """Change the state of a model that has one.

        Args:
            operation: Returns the new state for the current state.
            what: Name of the change, for the history.
            why: Reason, for the history.

        Raises:
            UserError: the model has no rollout, or the change is not possible.
        """

        def changed(state: RolloutState | None) -> RolloutState:
            if state is None:
                raise self._no_rollout()
            return operation(state)

        return self.change(changed, what=what, why=why)

    def pause(self, *, why: str) -> RolloutState:
        """Keep the current traffic split until `resume`.

        Raises:
            UserError: no rollout is running.
        """
        return self.apply(
            lambda now: pause(now, reason=why or f"by {self.who}"), what="pause", why=why
        )

    def resume(self, *, why: str) -> RolloutState:
        """Continue after a pause, or leave a stage that waits for an operator.

        Raises:
            UserError: the rollout is neither paused nor in a stage that waits.
        """
        return self.apply(lambda now: resume(now, now_s=time.time()), what="resume", why=why)

    def promote(self, *, full: bool = False, version: int | None = None, why: str) -> RolloutState:
        """Go to the next stage now, or end an A/B test.

        Args:
            full: Whether to go to 100 % immediately.
            version: The arm that takes all traffic, to end an A/B test; None: go to the next stage.
            why: Reason, for the history.

        Raises:
            UserError: the rollout is over, or the version is not an arm of the test.
        """

        def move(now: RolloutState) -> RolloutState:
            if version is not None:
                return end_test(now, version, now_s=time.time())
            return (promote_fully if full else advance)(now, now_s=time.time())

        return self.apply(move, what="promote", why=why)

    def roll_back(self, *, to: int | None, why: str) -> RolloutState:
        """Take all traffic from the candidate immediately.

        Args:
            to: The version that takes the traffic; None: the baseline.
            why: Reason, for the history.

        Raises:
            UserError: the model has no rollout or no such version; the traffic does not change.
            DataError: that version is damaged.
        """

        def back(state: RolloutState) -> RolloutState:
            following = roll_back(state, reason=why or f"by {self.who}", now_s=time.time(), to=to)
            verify(self.repository.path(self.model, following.stable))
            return following

        return self.apply(back, what="rollback", why=why)

    def status(self) -> Rollout:
        """Return the current state of the rollout, with its counts and results.

        Raises:
            UserError: the model has no rollout.
        """
        stored = self._files.latest()
        if stored is None:
            raise self._no_rollout()
        state = state_of(stored.content["state"])
        counts = read_counts(self.folder, rollout=state.rollout)
        # After a rollback to a third version, the counts are not those of the state's baseline.
        is_judged = not (state.is_test or state.previous)
        gates = judge(stage_counts(counts, state), state) if is_judged else []
        gates += read_user_results(self.folder, state)
        return Rollout(state=state, counts=counts, gates=gates)

    def history(self) -> list[tuple[Event, RolloutState]]:
        """Return all states and the changes that led to them, oldest first."""
        return [
            (Event(**stored.content["event"]), state_of(stored.content["state"]))
            for stored in self._files.history()
        ]

    def _check_unmoved(self, seen: RolloutState, stored: Stored, *, what: str) -> None:
        """Refuse a change if the rollout has moved since it was read, so that two operators do not advance it two stages.

        A rollback is never refused.
        """
        now = state_of(stored.content["state"])
        is_same = (seen.rollout, seen.phase, seen.stage) == (now.rollout, now.phase, now.stage)
        if is_same or what in ("start", "rollback"):
            return
        event = Event(**stored.content["event"])
        raise UserError(
            f"{what} must be decided again, because another change came first",
            got=Plain(f"{event.what} by {event.who}: version {now.candidate} {now.phase}"),
            fix=f"See `stoker rollout status {self.model}`.",
        )

    def _newest_other(self, candidate: int) -> int:
        others = [each for each in self.repository.versions(self.model) if each != candidate]
        if not others:
            raise UserError(
                f"{self.model!r} must have a version to compare with",
                got=Plain(f"version {candidate} only"),
                fix="First push a version that the rollout can go back to.",
            )
        older = [each for each in others if each < candidate]
        return max(older or others)

    def _no_rollout(self) -> UserError:
        return UserError(
            f"{self.model!r} has no rollout",
            fix=f"Begin one with `stoker rollout start {self.model} VERSION`.",
        )


def _one_line(text: str) -> str:
    """Remove line breaks and control characters from text for the history."""
    return "".join(each if each.isprintable() else " " for each in text)[:MAX_WHY]


def operator() -> str:
    """Return the user of this process as user@host."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError, ImportError):  # a user in a container may have a number but no name
        user = str(os.getuid())
    return f"{user}@{os.uname().nodename}"
