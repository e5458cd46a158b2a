"""Suggests a known name for an unknown one. Needs no YAML, so the client can use it alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ABBREVIATION = 3
"""Shortest beginning of a name that counts as an abbreviation: `acc` is `accuracy`, not `auc`."""


def nearest(name: str, known: Iterable[str]) -> str:
    """The next action for an unknown name: the nearest known one, else all of them."""
    names = sorted(known)
    longer = [each for each in names if len(name) >= _ABBREVIATION and each.startswith(name)]
    close = longer if len(longer) == 1 else difflib.get_close_matches(name, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names)}." if names else "There are none."
