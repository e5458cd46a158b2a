"""How an attempt to train with several processes ended."""

from __future__ import annotations

from dataclasses import dataclass

from stoker.core.errors import EXIT_CHECK, EXIT_USER


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a group ended before its work was done."""

    rank: int
    """Of the process that caused it, or of the first of several."""

    name: str
    """Name of the process, or names of several."""

    reason: str
    """A clause, e.g. `was killed by SIGKILL`."""

    code: int | None
    """Its exit code, negative for a signal; None if it hung."""

    tail: tuple[str, ...]
    """The last lines that it printed."""

    @property
    def is_final(self) -> bool:
        """Whether another attempt would end in the same way: only the user can fix it."""
        return self.code in (EXIT_USER, EXIT_CHECK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an attempt ended."""

    failure: Failure | None
    """None if all work was done, or if this process was asked to end."""

    asked: bool
    """Whether this process was asked to end."""

    preempted: bool
    """Whether a worker was taken away before the work was done."""

    began: bool
    """Whether a worker had begun to train."""

    step: int
    """The newest step of all heartbeats."""
