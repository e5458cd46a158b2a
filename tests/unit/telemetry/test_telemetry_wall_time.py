"""The parts of a training's wall time always add up to its total."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.telemetry.wall_time import (
    NAMES,
    PARTS,
    WallTime,
    goodput,
    largest_other,
    process_age_s,
)

SECONDS = st.floats(0, 100, allow_nan=False)

ACTS = st.recursive(
    st.one_of(SECONDS, st.sampled_from(NAMES)),
    lambda inner: st.tuples(st.sampled_from(NAMES), st.lists(inner, max_size=4), st.booleans()),
    max_leaves=20,
)
"""Time passes; a part is entered; or other acts happen within a part, which may raise at its end."""


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Stopped(Exception):
    pass


def play(wall: WallTime, clock: Clock, act: object) -> None:
    if isinstance(act, float):
        clock.now_s += act
    elif isinstance(act, str):
        wall.enter(act)
    elif isinstance(act, tuple):
        part, inner, raises = act
        try:
            with wall.within(part):
                for each in inner:
                    play(wall, clock, each)
                if raises:
                    raise Stopped
        except Stopped:
            pass


@given(st.lists(ACTS, max_size=8), st.sampled_from(NAMES), SECONDS)
def test_parts_add_up_to_the_wall_time(acts: list[object], part: str, moved_s: float) -> None:
    clock = Clock()
    wall = WallTime(clock=clock)
    for act in acts:
        play(wall, clock, act)
    wall.move(part, "repeated", moved_s)

    parts = wall.parts()

    assert sum(parts.values()) == pytest.approx(clock.now_s - 1000.0)
    assert set(parts) == set(NAMES)
    assert all(seconds >= 0 for seconds in parts.values())


def test_what_lies_within_a_part_is_counted_once_and_the_part_goes_on() -> None:
    clock = Clock()
    wall = WallTime(clock=clock, began_s=990.0)
    with wall.within("validation"):
        clock.now_s += 1
        with wall.within("callbacks"):
            clock.now_s += 2
        clock.now_s += 4

    parts = wall.parts()

    assert (parts["start"], parts["validation"], parts["callbacks"]) == (10.0, 5.0, 2.0)


def test_another_thread_changes_no_part() -> None:
    clock = Clock()
    wall = WallTime(clock=clock)

    def elsewhere() -> None:
        with wall.within("validation"):
            clock.now_s += 3
        wall.enter("callbacks")

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()

    assert wall.parts()["start"] == 3.0


def test_a_name_that_is_not_a_part_is_refused() -> None:
    with pytest.raises(ValueError, match="not a part of a training's wall time: stepz"):
        WallTime().within("stepz")


def test_goodput_leaves_the_other_stages_out_and_names_the_largest_part() -> None:
    parts = dict.fromkeys(NAMES, 0.0) | {
        "other_stages": 1000.0,
        "steps": 60.0,
        "start": 10.0,
        "compile": 30.0,
    }

    assert goodput(parts) == 0.6
    assert largest_other(parts).name == "compile"
    assert goodput(dict.fromkeys(NAMES, 0.0)) is None


def test_each_part_says_what_makes_it_shorter() -> None:
    assert all(part.label and part.advice for part in PARTS)
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="Linux says when a process began")
def test_a_process_knows_how_long_ago_it_was_started_whatever_its_name() -> None:
    code = (
        "import ctypes, time; ctypes.CDLL(None).prctl(15, b'a) 7 (b', 0, 0, 0);"
        "from stoker.telemetry.wall_time import process_age_s;"
        "time.sleep(0.3); print(process_age_s())"
    )
    begun_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    took_s = time.monotonic() - begun_s

    assert 0.29 <= float(done.stdout) <= took_s + 0.02
    assert process_age_s() > 0
