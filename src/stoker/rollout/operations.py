"""What an operator does with a model's rollout: each operation is one change of its state."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.registry.repository import Repository, verify
from stoker.rollout.controller import Event, change
from stoker.rollout.counts import Counts, read_counts, stage_counts
from stoker.rollout.gates import BUILT_IN, GateResult, judge
from stoker.rollout.router import FOLDER
from stoker.rollout.shadow_counts import ShadowSummary, summary
from stoker.rollout.state import RolloutSettings, RolloutState, roll_back, start, state_of
from stoker.rollout.state_files import Conflict, StateFiles

Change = Callable[[RolloutState], RolloutState]
"""One change of the state; raises UserError where it is not possible."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """The rollout of a model, as it stands now."""

    state: RolloutState
    counts: Counts
    gates: list[GateResult]

    def shadow_stages(self) -> dict[int, ShadowSummary]:
        """Stage -> the figures of each shadow stage so far."""
        found = {stage: summary(each, self.state) for stage, each in sorted(self.counts.items())}
        return {stage: figures for stage, figures in found.items() if figures is not None}


class ModelRollouts:
    """The rollouts of one model of a repository."""

    def __init__(self, root: Path, model: str) -> None:
        """Open them; nothing is written before the first operation.

        Raises:
            UserError: the repository has no such model.
        """
        self._repository, self._model = Repository(root), model
        self._folder = self._repository.base(model) / FOLDER
        self._files = StateFiles(self._folder)
        if not self._repository.versions(model):
            raise UserError(
                f"{root} must hold the model {model!r}",
                got=Plain(f"models {', '.join(self._repository.models()) or 'none'}"),
                fix="Push it first, or name another repository with --models.",
            )

    def start(
        self, candidate: int, settings: RolloutSettings, *, why: str, baseline: int | None = None
    ) -> RolloutState:
        """Begin the rollout of a version.

        Args:
            candidate: the version.
            settings: of the rollout.
            why: for the history.
            baseline: the version to compare with, of a model without a state; None: the newest other one.

        Raises:
            ConfigError: a gate of `dry_run` is unknown.
            UserError: another rollout is under way, there is no such version, or clients of the
                baseline could not call it.
            DataError: the candidate is damaged.
        """
        from stoker.rollout.signatures import check_compatible

        unknown = sorted(set(settings.dry_run) - set(BUILT_IN))
        if unknown:
            raise ConfigError(
                f"{unknown[0]!r} is not a gate", got=unknown[0], fix=nearest(unknown[0], BUILT_IN)
            )
        verify(self._repository.path(self._model, candidate))

        def begin(state: RolloutState | None) -> RolloutState:
            serving = self._newest_other(candidate) if baseline is None else baseline
            begun = start(
                state,
                candidate,
                serving=serving,
                settings=settings,
                now_s=time.time(),
                who=operator(),
            )
            check_compatible(
                self._repository.path(self._model, begun.baseline),
                self._repository.path(self._model, candidate),
            )
            return begun

        return self._change(begin, what="start", why=why)

    def apply(self, operation: Change, *, what: str, why: str) -> RolloutState:
        """Change the state of a model that has one.

        Args:
            operation: the change.
            what: its name, for the history.
            why: for the history.

        Raises:
            UserError: there is no rollout, or the change is not possible.
        """

        def changed(state: RolloutState | None) -> RolloutState:
            if state is None:
                raise self._no_rollout()
            return operation(state)

        return self._change(changed, what=what, why=why)

    def roll_back(self, *, to: int | None, why: str) -> RolloutState:
        """Take all traffic off the candidate at once.

        Args:
            to: the version that takes it; None: the baseline.
            why: for the history.

        Raises:
            UserError: there is no rollout, or no such version to go back to; the traffic stays as it is.
            DataError: that version is damaged.
        """

        def back(state: RolloutState) -> RolloutState:
            following = roll_back(state, reason=why or f"by {operator()}", now_s=time.time(), to=to)
            verify(self._repository.path(self._model, following.stable))
            return following

        return self.apply(back, what="rollback", why=why)

    def status(self) -> Rollout:
        """Where it stands.

        Raises:
            UserError: there is no rollout.
        """
        stored = self._files.latest()
        if stored is None:
            raise self._no_rollout()
        state = state_of(stored.content["state"])
        counts = read_counts(self._folder, rollout=state.rollout)
        gates = judge(stage_counts(counts, state), state, gates=len(BUILT_IN))
        return Rollout(state=state, counts=counts, gates=gates)

    def history(self) -> list[tuple[Event, RolloutState]]:
        """All changes, oldest first."""
        return [
            (Event(**stored.content["event"]), state_of(stored.content["state"]))
            for stored in self._files.history()
        ]

    def _change(
        self, operation: Callable[[RolloutState | None], RolloutState], *, what: str, why: str
    ) -> RolloutState:
        while True:
            stored = self._files.latest()
            state = operation(None if stored is None else state_of(stored.content["state"]))
            event = Event(what=what, who=operator(), why=why, at_s=time.time())
            try:
                change(self._files, stored, state, event)
            except Conflict:
                continue  # another operator was first: decide again from what they left
            return state

    def _newest_other(self, candidate: int) -> int:
        others = [each for each in self._repository.versions(self._model) if each != candidate]
        if not others:
            raise UserError(
                f"{self._model!r} must have a version to compare with",
                got=Plain(f"version {candidate} only"),
                fix="The first version of a model needs no rollout: serve it.",
            )
        older = [each for each in others if each < candidate]
        return max(older or others)

    def _no_rollout(self) -> UserError:
        return UserError(
            f"{self._model!r} has no rollout",
            fix=f"Begin one with `stoker rollout start {self._model} VERSION`.",
        )


def operator() -> str:
    """Who runs this process: user@host."""
    return f"{getpass.getuser()}@{os.uname().nodename}"
