"""Which of several workers is slow, by its time between two all-reduces."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
import tensorflow as tf

from stoker.train.context.local_step import MIN_STEPS, WINDOW, LocalStepTime
from stoker.train.watch import stragglers
from stoker.train.watch.stragglers import Stragglers, ratios


class Clock:
    """Seconds that a test moves, as an operation of a graph."""

    def __init__(self) -> None:
        self.now_s = tf.Variable(tf.constant(0.0, tf.float64))

    def __call__(self) -> tf.Tensor:
        return self.now_s.read_value()


def steps(local: LocalStepTime, clock: Clock, *, local_s: float, reduce_s: float) -> None:
    """A window of steps in a compiled loop, as training runs them."""

    @tf.function(autograph=False)
    def run() -> tf.Tensor:
        def one(step: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([clock.now_s.assign_add(local_s)]):
                gradient = tf.identity(step)
            local.before_reduction([gradient, None])
            with tf.control_dependencies([clock.now_s.assign_add(reduce_s)]):
                local.after_reduction(tf.identity(gradient))
            return step + 1

        return tf.while_loop(lambda step: step < WINDOW, one, [0], parallel_iterations=1)[0]

    run()


def test_only_the_time_before_the_all_reduce_counts_and_only_that_of_the_newest_steps() -> None:
    clock = Clock()
    clock.now_s.assign(1e9)
    local = LocalStepTime(clock)
    assert local.median_s() is None

    steps(local, clock, local_s=0.25, reduce_s=4.0)
    assert local.median_s() == pytest.approx(0.25)
    # A pause between two calls, such as a validation, is one step of many.
    clock.now_s.assign_add(1000.0)
    steps(local, clock, local_s=0.5, reduce_s=0.1)

    assert local.median_s() == pytest.approx(0.5)


def test_the_first_step_has_no_all_reduce_before_it() -> None:
    clock = Clock()
    clock.now_s.assign(1e9)
    local = LocalStepTime(clock)
    for _ in range(MIN_STEPS):
        assert local.median_s() is None
        local.before_reduction([tf.constant(1.0)])
        clock.now_s.assign_add(1.0)
        local.after_reduction(tf.constant(1.0))
        clock.now_s.assign_add(0.125)
    local.before_reduction([tf.constant(1.0)])

    assert local.median_s() == pytest.approx(0.125)


def test_a_worker_is_compared_with_the_others_only() -> None:
    assert ratios({"0": 1.0, "1": 1.3}) == {"0": 1 / 1.3, "1": 1.3}
    assert ratios({"0": 1.0, "1": 2.0, "2": 3.0, "3": 30.0})["3"] == 15.0
    assert ratios({"0": 1.0}) == ratios({}) == {}


def test_workers_find_the_slow_one_by_their_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stragglers, "EVERY_S", 0.01)
    slow_s = [0.3]

    def worker(rank: int, seconds: list[float]) -> Stragglers:
        folder = tmp_path / "steps"
        return Stragglers(folder, rank=rank, median_s=lambda: seconds[0], reads=rank == 0)

    with caplog.at_level(logging.WARNING), worker(0, [0.1]) as chief, worker(1, slow_s):
        give_up_s = time.monotonic() + 60
        while not chief.line():
            assert time.monotonic() < give_up_s
            time.sleep(0.01)
        assert chief.line() == "worker 1 slow 3.0x"
        assert chief.medians_s == {"0": 0.1, "1": 0.3}
        slow_s[0] = 0.1
        while chief.line():
            assert time.monotonic() < give_up_s
            time.sleep(0.01)

    assert chief.facts() == [{"worker": "1", "ratio": pytest.approx(3.0)}]
    assert [record.getMessage() for record in caplog.records] == [
        "worker 1 is slow: 300 ms between two all-reduces, 3.0 times the median of the others"
    ]
    assert not (tmp_path / "steps").exists()
