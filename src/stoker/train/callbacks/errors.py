"""A callback that raises ends in one line that shows the user's own line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from stoker.core.errors import UserError
from stoker.core.user_code import failure_of_user_code


@contextmanager
def user_callback_errors(what: str) -> Iterator[None]:
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
        raise failure_of_user_code(f"train.callbacks: {what}", error) from error
