"""Describes to clients why a version cannot be loaded, without paths of this machine."""

from __future__ import annotations

import re
from pathlib import Path

from stoker.core.errors import Plain, UserError
from stoker.registry.exported_model import first_line
from stoker.serve.errors import ServeError

_MAX_CHARS = 1000
"""Maximum number of characters of a reason: the text of an exception may be long."""

_ABSOLUTE = re.compile(r"(?<![\w.)\]}>-])(?:file:)?/+(?:[^\s/'\",;:<>()]+/+)*([^\s/'\",;:<>()]*)")
"""Matches an absolute path; the group is its last part. `a/b` does not match, because it may be the name of a node."""


def reason_of(error: Exception, folder: Path) -> str:
    """Return the reason as one line.

    Args:
        error: The exception of the load.
        folder: The version's folder. Its path, also at the beginning of other paths, is replaced by its name.
    """
    if isinstance(error, UserError):
        got = error.got
        # Replace paths before `line` shortens the text: a truncated path would not be recognized.
        if isinstance(got, str):
            shown = without_paths(got, folder)
            got = Plain(shown) if isinstance(got, Plain) else shown
        rule, fix = without_paths(error.rule, folder), without_paths(error.fix, folder)
        reason = UserError(rule, got=got, fix=fix).line()
    elif isinstance(error, ServeError):
        reason = without_paths(str(error), folder)
    else:
        reason = f"{type(error).__name__}: {without_paths(first_line(error), folder)}"
    return reason if len(reason) <= _MAX_CHARS else reason[:_MAX_CHARS] + "..."


def without_paths(text: str, folder: Path) -> str:
    """Replace the folder by its name, and every other absolute path by its last part."""
    places = {str(folder), str(folder.absolute()), str(folder.resolve())}
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, folder.name)
    return _ABSOLUTE.sub(lambda found: found[1] or "/", text)
