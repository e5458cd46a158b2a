"""Suggests a known name for an unknown one. Needs no YAML, so the client can use it alone."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_ABBREVIATION = 3
"""Minimum length of a name's beginning that is accepted as an abbreviation: `acc` means `accuracy`, not `auc`."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return what to do about an unknown name: use the most similar known name, or one of all known names."""
    names = sorted(known)
    longer = [each for each in names if len(name) >= _ABBREVIATION and each.startswith(name)]
    close = longer if len(longer) == 1 else difflib.get_close_matches(name, names, n=1)
    if close:
        return f"Did you mean {close[0]!r}?"
    return f"Known: {', '.join(names)}." if names else "There are none."
