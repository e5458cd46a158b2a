"""A callback that raises ends in one line that shows the user's own line."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.user_code import first_line

_LIBRARIES = (
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")),
    Path(__file__).resolve().parents[1],
)
"""Where code lies that is not the user's."""


@contextmanager
def told_as_the_users(what: str) -> Iterator[None]:
    """Turn what a callback raises into one line.

    Args:
        what: The callback's class and the hook, for the message.

    Raises:
        ConfigError: the body raised; with file, line and function of the user's, also where the
            callback is Keras's and only a function of the user's within it failed.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"train.callbacks: {what} must not fail{_line_of_the_user(error)}",
            got=Plain(f"{type(error).__name__}: {first_line(error)}"),
            fix="Run it again with --debug for the whole traceback.",
        ) from error


def _line_of_the_user(error: BaseException) -> str:
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.resolve().is_relative_to(home) for home in _LIBRARIES):
            return f" ({path.name}, line {frame.lineno}, in {frame.name})"
    return ""
