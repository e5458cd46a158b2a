"""In a server: opens, writes and closes the logs of a model's A/B test."""

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
    """The open logs of one test."""

    rollout: int
    assignments: AssignmentLog
    outcomes: OutcomeLog


class ABTestLogs:
    """The logs of a model's A/B test, if one is running; thread-safe."""

    def __init__(self, folder: Path, *, server: str) -> None:
        """Create the object; `take_up` opens the logs.

        Args:
            folder: Folder of the rollout's state.
            server: Name of this process, unique among all processes that serve the model.
        """
        self._folder, self._server = folder, server
        self._logs: _Logs | None = None

    def take_up(self, state: RolloutState) -> Callable[[bytes], int] | None:
        """Open the logs of the test in a state, and close the logs of the previous test.

        Returns:
            The hash function of the test's keys; None if no test is running.
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
        """Record the arm of an answered request's key, if the running test chose the version.

        Returns:
            True if a test is running or chose the version; the gates then do not count the answer.
        """
        logs = self._logs
        if logs is None:
            return route.test != 0
        if route.key is not None and route.test == logs.rollout:
            logs.assignments.record(route.key, route.version)
        return True

    def refresh(self) -> None:
        """Read the keys of other servers, and flush this server's keys to the disk; called every second."""
        if self._logs is not None:
            # unreadable, or the disk is full: the next call tries again
            with contextlib.suppress(OSError):
                self._logs.assignments.refresh()

    def add_outcomes(self, model: str, outcomes: Sequence[tuple[str, float]]) -> None:
        """Write outcomes, all or none of them.

        Raises:
            ServeError: no test is running, a key did not take part, a value is invalid, or the log is full or
                cannot be written.
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
