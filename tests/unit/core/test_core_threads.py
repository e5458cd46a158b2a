"""What is replaced for a while is there again afterwards, however threads come and go."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from stoker.core.threads import Replaced


def test_threads_that_go_crosswise_leave_what_they_found() -> None:
    """The second one comes in before the first one goes out, as a strategy's replicas do."""
    owner = SimpleNamespace(value="theirs", other=1)
    ours = Replaced(owner, value="ours")
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        first.submit(ours.__enter__).result()
        second.submit(ours.__enter__).result()
        first.submit(ours.__exit__, None, None, None).result()
        assert owner.value == "ours", "the second one is still inside"
        second.submit(ours.__exit__, None, None, None).result()
    assert vars(owner) == {"value": "theirs", "other": 1}


def test_an_error_inside_puts_back_too() -> None:
    owner = SimpleNamespace(value="theirs")
    ours = Replaced(owner, value="ours")
    for _ in range(2):
        with pytest.raises(ValueError, match="ours"), ours:
            raise ValueError(owner.value)
        assert owner.value == "theirs"
