"""The choice of the run to continue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """The choice of the run to continue."""

    run: str | None = None
    """ID of the run; None: the newest unfinished run with equal inputs, otherwise a new run."""

    accept_change: bool = False
    """Continue although configuration, code, data or versions have changed since the start."""


NEWEST = Resume()
"""Continue the newest unfinished run, or start a new one."""
