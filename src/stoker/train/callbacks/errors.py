"""Converts an exception of a callback into one line that shows the user's own line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stoker.core.errors import UserError
from stoker.core.user_code import failure_of_user_code


@contextmanager
def user_callback_errors(what: str) -> Iterator[None]:
    """Convert an exception of a callback into one line.

    Args:
        what: The callback's class and the hook, for the message.

    Raises:
        ConfigError: The body failed; with the user's file, line and function, even if a callback of
            Keras called them.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise failure_of_user_code(f"train.callbacks: {what}", error) from error
