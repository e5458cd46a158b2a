"""The identity of a run, which must be unchanged to resume from a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.core.errors import Plain, UserError

Identity = Mapping[str, Mapping[str, Any]]
"""Part (configuration, code, data, versions) -> name in this part -> value or fingerprint, as JSON."""

_NAMED = 4
"""Maximum number of differences in a message."""

_SHOWN_CHARS = 24
"""Maximum number of characters of a value in a message; longer ones, such as hashes, are cut."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdentityChange:
    """A difference between a checkpoint and this process."""

    part: str
    """One of configuration, code, data, versions."""

    name: str
    """Name of the setting, function, column or library that changed."""

    before: Any
    """Its value in the checkpoint; None if it was not there."""

    now: Any
    """Its current value; None if it does not exist any more."""

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
    """Return all differences, ordered by name."""
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
    """Refuse to resume a run whose identity has changed.

    Args:
        before: The identity in the checkpoint.
        now: The identity of this process.
        accept_change: Whether the user accepted the change.

    Returns:
        The differences, to be recorded.

    Raises:
        UserError: There are differences, which the error names, and the user has not accepted them.
    """
    found = changes(before, now)
    if found and not accept_change:
        named = "; ".join(map(str, found[:_NAMED]))
        more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
        raise UserError(
            "a resumed run must have the configuration, code, data and versions that it started with",
            got=Plain(named + more),
            fix="Undo the change, or resume with --accept-change, which is recorded in the run.",
        )
    return found
