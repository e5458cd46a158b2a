"""How much work waits for a thread."""

from __future__ import annotations

import threading
import time

import pytest

from stoker.serve.runtime.counted_threads import CountedThreads, take_waited_s


def test_work_is_counted_until_it_begins_or_is_cancelled() -> None:
    changes: list[float] = []
    began, go = threading.Event(), threading.Event()
    pool = CountedThreads(1, "test", on_change=changes.append)

    def block() -> int:
        began.set()
        go.wait(30)
        return 7

    assert changes == [0.0]
    running = pool.submit(block)
    assert began.wait(30)
    waiting, cancelled = pool.submit(int, "8"), pool.submit(int, "9")
    assert sum(changes) == 2
    assert cancelled.cancel()
    assert sum(changes) == 1
    go.set()
    assert (running.result(30), waiting.result(30)) == (7, 8)
    with pytest.raises(ValueError, match="invalid literal"):
        pool.submit(int, "x").result(30)
    assert sum(changes) == 0

    go.clear()
    began.clear()
    pool.submit(block)
    assert began.wait(30)
    pool.submit(int, "1")
    pool.shutdown(wait=False, cancel_futures=True)
    assert sum(changes) == 0
    go.set()
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(int, "1")
    assert sum(changes) == 0


def test_work_knows_once_how_long_it_waited_for_its_thread() -> None:
    pool = CountedThreads(1, "test", on_change=lambda _: None)
    pool.submit(time.sleep, 0.05)  # the work before it

    waited_s = pool.submit(take_waited_s)

    assert 0.03 < waited_s.result(30) < 30
    assert pool.submit(lambda: (take_waited_s(), take_waited_s())).result(30)[1] == 0
    assert take_waited_s() == 0
    pool.shutdown()
