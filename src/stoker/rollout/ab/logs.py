"""Inside a server: the logs of a model's A/B test, from its start to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.core.errors import Plain, UserError
from stoker.rollout.ab.assignments import AssignmentLog, logs_of
from stoker.rollout.ab.outcomes import Outcome, OutcomeLog, UnknownKey
from stoker.rollout.state.state import RolloutState
from stoker.serve.errors import Code, ServeError
from stoker.serve.routing import Route


@dataclass(frozen=True, kw_only=True, slots=True)
class _Logs:
    """The logs of one test."""

    rollout: int
    assignments: AssignmentLog
    outcomes: OutcomeLog


class ABTestLogs:
    """The logs of the test that a model is under, if it is under one; may be used by many threads."""

    def __init__(self, folder: Path, *, server: str) -> None:
        """Open no logs until `take_up`.

        Args:
            folder: of the rollout's state.
            server: name of this process, unique among all that serve the model.
        """
        self._folder, self._server = folder, server
        self._logs: _Logs | None = None

    def take_up(self, state: RolloutState) -> Callable[[bytes], int] | None:
        """Open the logs of the test that a state names, and close those of the previous test.

        Returns:
            The hash function of the test's keys; None without a test.
        """
        test = state.test if state.is_test else None
        logs = self._logs
        if logs is not None and (test is None or state.rollout != logs.rollout):
            self._logs = None
            logs.assignments.close()
            logs.outcomes.close()
        if test is None:
            return None
        if self._logs is None:
            folder = logs_of(self._folder, state.rollout)
            self._logs = _Logs(
                rollout=state.rollout,
                assignments=AssignmentLog(folder, server=self._server, max_keys=test.max_keys),
                outcomes=OutcomeLog(folder, test, name=self._server),
            )
        return test.key_hash()

    def record(self, route: Route) -> bool:
        """Note the arm of the key of an answered request, if the running test chose it.

        Returns:
            Whether a test is running, or chose the version, so no gate counts the answer.
        """
        logs = self._logs
        if logs is None:
            return route.test != 0
        if route.key is not None and route.test == logs.rollout:
            logs.assignments.record(route.key, route.version)
        return True

    def refresh(self) -> None:
        """Read the keys of other servers, and flush this one's to the disk; called every second."""
        if self._logs is not None:
            with contextlib.suppress(OSError):  # unreadable, or the disk is full: tried again later
                self._logs.assignments.refresh()

    def add_outcomes(self, model: str, outcomes: Sequence[tuple[str, float]]) -> None:
        """Write outcomes, all or none of them.

        Raises:
            ServeError: no test is running, a key did not take part, a value is invalid, the log is full or cannot
                be written.
        """
        logs = self._logs
        if logs is None:
            raise ServeError(Code.NOT_FOUND, f"{model!r} has no A/B test under way")
        given = [Outcome(key=key, value=value) for key, value in outcomes]
        try:
            logs.outcomes.add(given, unknown=logs.assignments.unknown)
        except UnknownKey as error:
            raise ServeError(Code.NOT_FOUND, error.line()) from error
        except UserError as error:
            raise ServeError(Code.INVALID_ARGUMENT, error.line()) from error
        except OSError as error:
            unwritten = UserError(
                "The outcomes must be written to the model repository",
                got=Plain(error.strerror or type(error).__name__),
                fix="Make it writable for the server, or use `stoker rollout outcome`.",
            )
            raise ServeError(Code.UNAVAILABLE, unwritten.line()) from error
