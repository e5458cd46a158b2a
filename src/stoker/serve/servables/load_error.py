"""Why a version does not serve, in a form for clients: without paths of this machine."""

from __future__ import annotations

import re
from pathlib import Path

from stoker.core.errors import Plain, UserError
from stoker.registry.exported_model import first_line
from stoker.serve.errors import ServeError

_MAX_CHARS = 1000
"""Longest reason: a foreign exception may have any text."""

_ABSOLUTE = re.compile(r"(?<![\w.)\]}>-])(?:file:)?/+(?:[^\s/'\",;:<>()]+/+)*([^\s/'\",;:<>()]*)")
"""An absolute path up to its last part; `a/b` is not one, it may be the name of a node."""


def reason_of(error: Exception, folder: Path) -> str:
    """The reason, as one line.

    Args:
        error: What a load raised.
        folder: The version's. It is shown by its name; files in it are shown relative to the model's folder.
    """
    if isinstance(error, UserError):
        got = error.got
        if isinstance(got, str):  # before shortening: half a path is also a path
            shown = without_paths(got, folder)
            got = Plain(shown) if isinstance(got, Plain) else shown
        rule, fix = without_paths(error.rule, folder), without_paths(error.fix, folder)
        said = UserError(rule, got=got, fix=fix).line()
    elif isinstance(error, ServeError):
        said = without_paths(str(error), folder)
    else:
        said = f"{type(error).__name__}: {without_paths(first_line(error), folder)}"
    return said if len(said) <= _MAX_CHARS else said[:_MAX_CHARS] + "..."


def without_paths(text: str, folder: Path) -> str:
    """Replace the folder by its name, and every other absolute path by its last part."""
    places = {str(folder), str(folder.absolute()), str(folder.resolve())}
    for place in sorted(places, key=len, reverse=True):
        text = text.replace(place, folder.name)
    return _ABSOLUTE.sub(lambda found: found[1] or "/", text)
