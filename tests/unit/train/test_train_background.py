"""Work that a thread does while the main thread does something else."""

from __future__ import annotations

import threading

import pytest

from stoker.core.errors import ConfigError
from stoker.train.context.run_context import BackgroundCall


def test_work_begins_at_once_in_another_thread_and_gives_its_result() -> None:
    begun, main = threading.Event(), threading.get_ident()

    def work() -> int:
        begun.set()
        return threading.get_ident()

    ahead = BackgroundCall(work, name="work")

    assert begun.wait(60)
    assert ahead.result() not in (None, main)


def test_an_error_of_the_work_is_raised_where_its_result_is_read() -> None:
    def work() -> None:
        raise ConfigError("the data must be there", got=3)

    ahead = BackgroundCall(work, name="work")
    ahead.wait()

    with pytest.raises(ConfigError, match="the data must be there"):
        ahead.result()
