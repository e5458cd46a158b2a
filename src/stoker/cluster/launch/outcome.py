"""How an attempt of several processes ended."""

from __future__ import annotations

import signal
from dataclasses import dataclass

from stoker.core.errors import EXIT_CHECK, EXIT_USER


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a group ended before its work was done."""

    rank: int
    """Of the process whose fault it is, or of the first of several."""

    name: str
    """How a person calls it, or all of them."""

    reason: str
    """A clause, e.g. `was killed by SIGKILL`."""

    code: int | None
    """Its exit code, negative for a signal; None where it hung."""

    tail: tuple[str, ...]
    """The last lines that it said."""

    @property
    def is_final(self) -> bool:
        """Whether another attempt would end in the same way: it is the user's to mend."""
        return self.code in (EXIT_USER, EXIT_CHECK)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How an attempt ended."""

    failure: Failure | None
    """None where all work was done, or where the end was asked for."""

    asked: bool
    """Whether this process was asked to end meanwhile."""

    preempted: bool
    """Whether a worker had to go, and the work is not done."""

    began: bool
    """Whether a worker had got past its start."""

    step: int
    """The newest step that was heard of."""


def how_it_ended(code: int) -> str:
    """A clause about an exit code; below 0 it is that of a signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
