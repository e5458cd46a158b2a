"""What a person sees while a stage runs: how far it is, and how long it still takes."""

from __future__ import annotations

import functools
import io
import logging
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from rich.console import Console

from stoker.cli import progress
from stoker.cli.progress import PLAIN_EVERY_S, ConsoleListener
from stoker.telemetry.wall_time import TimeLeft


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Moves when a test moves it."""
    made = Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=made))
    monkeypatch.setattr(progress, "TimeLeft", functools.partial(TimeLeft, made))
    return made


class Log(io.StringIO):
    """What is written to stderr, which is not a terminal."""

    def new_lines(self) -> list[str]:
        """Since the last time."""
        lines = self.getvalue().splitlines()
        self.seek(0)
        self.truncate()
        return lines


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    made = Log()
    monkeypatch.setattr(sys, "stderr", made)
    return made


@pytest.fixture
def listener(clock: Clock, log: Log) -> Iterator[ConsoleListener]:
    """One that has begun to train."""
    del clock
    with ConsoleListener() as made:
        made.stage_began("train")
        assert log.new_lines() == ["  train      ..."]
        yield made


def test_a_warning_of_the_log_is_a_line_without_its_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, root = Log(), logging.getLogger()
    monkeypatch.setattr(sys, "stderr", log)
    held, root.handlers = root.handlers, []
    try:
        with ConsoleListener():
            logging.getLogger("stoker.train.watch").warning("histograms take %.1f s", 0.5)
        assert log.new_lines()[0] == "  histograms take 0.5 s"
        assert root.handlers == []
    finally:
        root.handlers = held


def test_a_line_ends_with_the_time_left_once_it_is_known(
    listener: ConsoleListener, clock: Clock, log: Log
) -> None:
    listener.progress("epoch 1/4", 0.0)
    clock.now_s += 30
    listener.progress("epoch 1/4, step 10/40", 0.25)
    clock.now_s += 30
    listener.progress("epoch 2/4, step 20/40", 0.5)
    clock.now_s += 30
    listener.progress("epoch 4/4, step 40/40", 1.0)

    assert log.new_lines() == [
        "  train       25%  epoch 1/4, step 10/40, 1:30 left",
        "  train       50%  epoch 2/4, step 20/40, 1:00 left",
        "  train      100%  epoch 4/4, step 40/40",
    ]


def test_work_of_unknown_length_has_neither_share_nor_time_left(
    listener: ConsoleListener, clock: Clock, log: Log
) -> None:
    clock.now_s += PLAIN_EVERY_S + 1
    listener.progress("12,000 rows", None)

    assert log.new_lines() == ["  train      12,000 rows"]


def test_a_log_has_a_line_for_every_tenth_or_every_ten_seconds_and_none_between(
    listener: ConsoleListener, clock: Clock, log: Log
) -> None:
    said = {}
    for moment, share in [(0.5, 0.3), (1.5, 0.35), (2.0, 0.5), (3.0, 0.5), (12.0, 0.51)]:
        clock.now_s = 1000.0 + moment
        listener.progress("line", share)
        said[moment] = len(log.new_lines())

    assert said == {0.5: 0, 1.5: 1, 2.0: 0, 3.0: 1, 12.0: 0}
    clock.now_s = 1000.0 + 13.5
    listener.progress("line", 0.52)
    assert len(log.new_lines()) == 1


def test_the_next_stage_has_a_time_left_of_its_own(
    listener: ConsoleListener, clock: Clock, log: Log
) -> None:
    listener.progress("line", 0.0)
    clock.now_s += 50
    listener.progress("line", 0.5)
    listener.stage_began("evaluate")
    clock.now_s += 20
    log.new_lines()
    listener.progress("rows", 0.6)
    clock.now_s += 20
    listener.progress("rows", 0.8)

    assert log.new_lines() == [
        "  evaluate    60%  rows",
        "  evaluate    80%  rows, 0:20 left",
    ]


def test_a_terminal_shows_the_same_next_to_its_bar(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(
        progress,
        "Console",
        lambda **_: Console(file=screen, force_terminal=True, width=200, _environ={}),
    )
    with ConsoleListener() as listener:
        listener.stage_began("train")
        listener.progress("epoch 1/4", 0.0)
        clock.now_s += 30
        listener.progress("epoch 1/4, step 10/40", 0.25)

    assert "epoch 1/4, step 10/40, 1:30 left" in screen.getvalue()
    assert " 25 %" in screen.getvalue()
