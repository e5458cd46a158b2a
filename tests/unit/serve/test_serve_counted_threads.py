"""How much work waits for a thread."""

from __future__ import annotations

import threading

import pytest

from stoker.serve.runtime.counted_threads import CountedThreads


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
