"""Sorts errors of a training step: for the user to fix, for the launcher to try again, or a bug of Stoker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.user_code import (
    failure_of_user_code,
    first_line,
    is_of_user_code,
    user_place,
)
from stoker.train.step.oom import is_out_of_memory, what_did_not_fit

_PEER_IS_GONE = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
)
"""Error types of a failed exchange between workers; a user error on another worker has another type."""


@contextmanager
def steps_are_the_users(*, workers: int) -> Iterator[None]:
    """Turn an error of the user's model, data or code into a ConfigError; other errors are raised unchanged.

    Args:
        workers: Number of processes that train together.

    Raises:
        ConfigError: the step failed because of the user's data, model or code, during tracing or execution.
        tf.errors.OpError: another worker is gone; the launcher should start the workers again.
    """
    try:
        yield
    except tf.errors.OpError as error:
        exchange = isinstance(error, tf.errors.InternalError) and "ollective" in error.message
        if workers > 1 and (exchange or isinstance(error, _PEER_IS_GONE)):
            raise
        if is_out_of_memory(error):
            raise ConfigError(
                "a training step must fit in memory",
                got=Plain(f"out of memory: {what_did_not_fit(error)}"),
                fix="Lower train.batch_size, or use train.remat. With train.strategy: parameter_server, train.on_oom "
                "does not reduce the batch.",
            ) from error
        raise ConfigError(
            f"a training step failed{user_place(error)}",
            got=Plain(_message(error)),
            fix=f"{_advice(error)}Run it again with --debug for the whole traceback.",
        ) from error
    except UserError:
        raise
    except Exception as error:
        if not is_of_user_code(error):
            raise
        raise failure_of_user_code("a training step", error) from error


_ASSERTED = re.compile(r"assertion failed: \[(.*?)\](?:\s|$)", re.DOTALL)
"""Matches the message of an assertion; the text around it only says where in the graph the assertion is."""


def _message(error: tf.errors.OpError) -> str:
    asserted = _ASSERTED.search(error.message)
    return asserted[1].replace("\\'", "'") if asserted else first_line(error)


def _advice(error: tf.errors.OpError) -> str:
    # The message of an error raised in Python is clear without changes.
    if _ASSERTED.search(error.message) or "Traceback (most recent call last)" in error.message:
        return ""
    if "was expected to contain" in error.message:
        return "A dataset must yield as many batches in every pass as when it was analyzed. "
    return "An id may lie outside its Embedding, or a label outside the classes. "
