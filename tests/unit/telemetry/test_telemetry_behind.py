"""Pieces of work that a thread does in their order."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from stoker.telemetry.writers.tensorboard import Behind


def test_pieces_are_done_in_their_order_by_one_other_thread() -> None:
    behind, done = Behind("test"), []

    def note(number: int) -> None:
        done.append((number, threading.get_ident()))

    for number in range(100):
        behind.do(partial(note, number))

    behind.wait()

    assert [number for number, _ in done] == list(range(100))
    assert {thread for _, thread in done}.isdisjoint({threading.get_ident()})
    behind.close()


def test_closing_does_what_waits_and_nothing_is_taken_after_it() -> None:
    behind, done, go = Behind("test"), [], threading.Event()
    behind.do(lambda: done.append(go.wait(60)))
    behind.do(lambda: done.append(True))
    go.set()

    behind.close()
    behind.close()

    assert done == [True, True]
    with pytest.raises(ValueError, match="closed"):
        behind.do(lambda: None)


def test_what_a_piece_raises_is_raised_by_the_next_one() -> None:
    behind, done = Behind("test"), []

    def fail() -> None:
        raise RuntimeError("a bug")

    behind.do(fail)
    with pytest.raises(RuntimeError, match="a bug"):
        behind.wait()
    behind.do(lambda: done.append(1))
    behind.close()

    assert done == [1]
