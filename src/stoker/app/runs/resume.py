"""Which run is gone on with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Resume:
    """Which run is gone on with."""

    run: str | None = None
    """Its id; None: the newest unfinished one of equal inputs, else a new one."""

    accept_change: bool = False
    """Go on where configuration, code, data or versions have changed since it began."""


NEWEST = Resume()
"""Go on with what was left unfinished, or begin."""
