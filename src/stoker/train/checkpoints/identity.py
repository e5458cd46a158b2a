"""What a run must still be to go on from a checkpoint, and what of it has changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.core.errors import Plain, UserError

Identity = Mapping[str, Mapping[str, Any]]
"""Part (configuration, code, data, versions) -> name in it -> its value or fingerprint, as JSON."""

_NAMED = 4
"""Most differences that one line names."""

_SHOWN_CHARS = 24
"""Longest value that is worth showing: a hash is not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdentityChange:
    """One thing that is not what it was when the checkpoint was written."""

    part: str
    """configuration, code, data, versions."""

    name: str
    """Which setting, function, column or library."""

    before: Any
    """Its value in the checkpoint, None where it had none."""

    now: Any
    """Its value now, None where it has none."""

    def __str__(self) -> str:
        what = f"{self.part} {self.name}"
        if self.before is None:
            return f"{what} is new"
        if self.now is None:
            return f"{what} is gone"
        if max(len(str(self.before)), len(str(self.now))) > _SHOWN_CHARS:
            return f"{what} has changed"
        return f"{what} was {self.before} and is {self.now}"


def changes(before: Identity, now: Identity) -> tuple[IdentityChange, ...]:
    """Everything that differs, in the order of the names."""
    return tuple(
        IdentityChange(part=part, name=name, before=old.get(name), now=new.get(name))
        for part in sorted({*before, *now})
        for old, new in [(before.get(part, {}), now.get(part, {}))]
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    )


def require_same(
    before: Identity, now: Identity, *, accept_change: bool
) -> tuple[IdentityChange, ...]:
    """Refuse to go on as another run than the one that was begun.

    Args:
        before: The identity that the checkpoint was written with.
        now: This process's.
        accept_change: The user has said that the change is meant.

    Returns:
        What has changed, to be recorded; empty where nothing has.

    Raises:
        UserError: something differs, and nobody accepted it; names what, and how to go on.
    """
    found = changes(before, now)
    if found and not accept_change:
        named = "; ".join(map(str, found[:_NAMED]))
        more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise UserError(
            "a run goes on with the configuration, code, data and versions that it began with",
            got=Plain(named + more),
            fix="Put it back, or go on with --accept-change, which is recorded in the run.",
        )
    return found
