"""The operations on a model's A/B tests: start, report an outcome, show the result."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from stoker.core.errors import Plain, UserError
from stoker.registry.repository import verify
from stoker.rollout.ab.assignments import logs_of
from stoker.rollout.ab.outcomes import Outcome, add_from_command
from stoker.rollout.counts.counts import read_failures
from stoker.rollout.memory import check_fits
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.split import TrafficSplit
from stoker.rollout.state.ab_settings import ABTestSettings
from stoker.rollout.state.changes import begin_test
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import RolloutState, state_of

if TYPE_CHECKING:
    from stoker.rollout.ab.result import ABResult


class ABTests:
    """The A/B tests of one model; they use the same state files as its rollouts."""

    def __init__(self, rollouts: ModelRollouts) -> None:
        """Args: rollouts: The rollouts of the model."""
        self._rollouts = rollouts

    def start(
        self,
        test: ABTestSettings,
        settings: RolloutSettings,
        *,
        why: str,
        server_bytes: int | None = None,
    ) -> RolloutState:
        """Start an A/B test of two or more versions.

        Args:
            test: The arms of the test.
            settings: Its `key` identifies the user.
            why: Reason, for the history.
            server_bytes: Memory of a server, bytes; None: the memory of this machine.

        Raises:
            UserError: a rollout or a test is running, a version does not exist, clients of the
                baseline could not call it, or the versions do not fit in memory.
            DataError: a version is damaged.
        """
        paths = {
            version: self._rollouts.repository.path(self._rollouts.model, version)
            for version in test.shares
        }
        for path in paths.values():
            verify(path)

        def begin(state: RolloutState | None) -> RolloutState:
            begun = begin_test(
                state, test, settings=settings, now_s=time.time(), who=self._rollouts.who
            )
            from stoker.rollout.signatures import check_compatible  # imports TensorFlow

            for version in paths.keys() - {test.baseline}:
                check_compatible(paths[test.baseline], paths[version])
            check_fits(*paths.values(), server_bytes=server_bytes)
            return begun

        return self._rollouts.change(begin, what="ab", why=why)

    def newest(self) -> tuple[RolloutState, ABTestSettings]:
        """Return the newest state of the newest A/B test, even if the test has ended.

        Raises:
            UserError: the model never had an A/B test.
        """
        for stored in reversed(list(StateFiles(self._rollouts.folder).history())):
            state = state_of(stored.content["state"])
            if state.test is not None:
                return state, state.test
        raise UserError(
            f"{self._rollouts.model!r} has no A/B test",
            fix=f"Begin one with `stoker rollout ab {self._rollouts.model} --arms 1=50,2=50 --key x-user`.",
        )

    def result(self) -> tuple[RolloutState, ABTestSettings, ABResult]:
        """Return the newest state of the newest A/B test, its settings and its current result.

        Raises:
            UserError: the model never had an A/B test.
        """
        from stoker.rollout.ab.result import result_of  # imports Arrow

        state, test = self.newest()
        shares = TrafficSplit(test.shares, salt=state.salt(self._rollouts.model)).shares()
        found = result_of(logs_of(self._rollouts.folder, state.rollout), test, shares=shares)
        failed = [
            f"Version {version} cannot be loaded by a server: {why}"
            for version, why in read_failures(self._rollouts.folder, rollout=state.rollout).items()
            if version in test.shares
        ]
        return state, test, replace(found, warnings=failed + found.warnings)

    def add_outcome(self, outcome: Outcome) -> None:
        """Write the outcome of a key that took part in the running A/B test.

        Raises:
            UserError: no test is running, or the outcome is invalid.
        """
        state, test = self.newest()
        if not state.is_test:
            raise UserError(
                f"{self._rollouts.model!r} must be in an A/B test",
                got=Plain(f"{state.phase} since the test of rollout {state.rollout}"),
                fix="Outcomes are accepted until a test ends; see `stoker rollout result`.",
            )
        add_from_command(logs_of(self._rollouts.folder, state.rollout), test, [outcome])
