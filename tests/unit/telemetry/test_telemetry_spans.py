"""Spans of time, and the timeline that they make."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.telemetry.spans import Spans


class Clock:
    """Nanoseconds that pass when they are told to."""

    def __init__(self, now_ns: int = 10**15) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


def test_a_span_is_what_the_clock_says_and_so_is_its_timeline(tmp_path: Path) -> None:
    clock = Clock()
    spans = Spans(clock=clock)
    clock.now_ns += 5_000
    with spans.span("step", number=3, last=True):
        clock.now_ns += 1_000
        with spans.span("wait for input"):
            clock.now_ns += 2_500
        clock.now_ns += 500

    inner, outer = spans.kept()
    assert (inner.name, outer.name) == ("wait for input", "step")
    assert inner.seconds == pytest.approx(2.5e-6)
    assert outer.seconds == pytest.approx(4e-6)
    assert outer.facts == {"number": 3, "last": True}

    spans.write(tmp_path / "trace.json")
    told = json.loads((tmp_path / "trace.json").read_text())
    thread, *events = told["traceEvents"]
    assert (thread["ph"], thread["args"]) == ("M", {"name": threading.current_thread().name})
    # By their beginning, which is what a viewer nests by; in microseconds.
    assert [(e["ph"], e["name"], e["ts"], e["dur"], e["args"]) for e in events] == [
        ("X", "step", 5.0, 4.0, {"number": 3, "last": True}),
        ("X", "wait for input", 6.0, 2.5, {}),
    ]
    assert {e["tid"] for e in events} == {thread["tid"]} == {threading.get_native_id()}


def test_what_raises_is_recorded_too() -> None:
    spans = Spans()

    with pytest.raises(KeyError), spans.span("fails"):
        raise KeyError

    (span,) = spans.kept()
    assert span.name == "fails"
    assert span.ended_ns >= span.began_ns


@given(newest=st.integers(1, 9), recorded=st.integers(0, 30))
def test_the_newest_are_kept_and_the_others_counted(newest: int, recorded: int) -> None:
    spans = Spans(newest=newest, clock=Clock())
    for number in range(recorded):
        spans.add(f"{number}", began_ns=number, ended_ns=number + 1)

    kept = [span.name for span in spans.kept()]

    assert kept == [f"{number}" for number in range(recorded)][-newest:]
    assert spans.forgotten == recorded - len(kept)
    assert spans.trace()["otherData"] == {"forgotten": recorded - len(kept)}


def test_threads_record_side_by_side_and_none_is_lost() -> None:
    spans = Spans(newest=10_000)
    together = threading.Barrier(4)

    def work(name: str) -> None:
        together.wait()
        for number in range(1000):
            with spans.span(name, number=number):
                pass
            if number % 100 == 0:
                spans.trace()

    threads = [
        threading.Thread(target=work, args=(f"work {n}",), name=f"thread {n}") for n in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert spans.forgotten == 0
    for n, thread in enumerate(threads):
        own = [span for span in spans.kept() if span.name == f"work {n}"]
        assert [span.facts["number"] for span in own] == list(range(1000))
        assert {(span.thread, span.thread_name) for span in own} == {
            (thread.native_id, thread.name)
        }


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one"):
        Spans(newest=0)
    spans = Spans()
    with pytest.raises(ValueError, match="ended before it began"):
        spans.add("backwards", began_ns=2, ended_ns=1)
    with spans.span("a loss", value=float("nan")):
        pass
    with pytest.raises(ValueError, match="JSON"):
        spans.write(tmp_path / "trace.json")
    assert not (tmp_path / "trace.json").exists()
