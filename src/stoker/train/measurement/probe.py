"""Measures windows of a training run: of its step, its calls and its input.

All windows read from the same iterator, so only one input pipeline exists at a time. Nothing is validated,
and no checkpoint is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import tensorflow as tf

from stoker.data.feed.calls import Calls
from stoker.data.feed.pipeline import PREFETCHED, Feed
from stoker.data.feed.stages import StageCost, dataset_stages, measure_stages
from stoker.data.user_dataset.feed import OwnFeed
from stoker.train.context.start_position import RunStart
from stoker.train.loop.run import Run
from stoker.train.measurement.measured_run import Kind, Window
from stoker.train.measurement.step_costs import (
    MachineSpeed,
    checkpoint_s,
    communication_s,
    prefetched_elements,
    transfer_s,
)
from stoker.train.step.program import StepInput

LEAD_SHARE = 0.25
"""Training runs for this share of a window before the window is timed, so that all threads are active."""

MAX_LEAD_S = 2.0
"""Maximum time to use up elements that were prefetched before a window, seconds. If some are left after
that, they are too few per second to matter."""

MIN_LEAD = 16
"""Number of elements that are taken before the number of prefetched elements is read again. After fewer elements, a
pause of the step could hide the decrease of that number."""

WAITED_SHARE = 0.1
"""If a call waits for input for more than this share of its time, no prefetched elements are left. This is
used if TensorFlow does not report prefetched elements."""

FALLEN_SHARE = 0.05
"""If the number of prefetched elements decreases by at most this share of the taken ones, the input keeps
up with the step."""

LONGEST_CALL_S = 1.0
"""Target for the maximum time of a call, seconds: longer calls are split, because a window has whole calls."""

IDLE_SHARE, IDLE_POLL_S, MAX_IDLE_S = 0.1, 0.02, 3.0
"""A window of the step starts when the process uses less than this share of a core: an input that fills its
buffers uses more. The use is measured in this interval, and the window starts at the latest after this time,
seconds."""

HIDDEN_PREFETCHES = 3
"""For Stoker's own feeds, whose prefetched elements TensorFlow does not report: number of batches to take
before a window, in prefetch depths. Three empty the buffer if the input is at most 2/3 as fast as the step;
a faster input leaves a few batches."""

STAGE_BATCHES, STAGE_SAMPLES = 32, 256
"""Number of batches of a user-defined dataset, or of samples of the shards, that are read to measure the
cost of the input's stages."""

FIRST_PASS_S = 20.0
"""Maximum time of the first pass over a user-defined dataset, seconds: the first pass may fill a cache, so
later passes differ from it."""


class Probe:
    """A training run that is measured."""

    def __init__(self, run: Run, opened: RunStart, *, step_input: StepInput, element: Any) -> None:
        """Store the arguments and compile the resident step; see `open_probe`."""
        self.run = run
        self._feed, self._step_input = opened.feed, step_input
        self._memory = run.compiled.step_input(tf.data.Dataset.from_tensors(element).repeat())
        self._resident = run.resident()
        self._take: Any = None
        self._machine_speed: MachineSpeed | None = None
        self._unseen = HIDDEN_PREFETCHES * (run.config.feed.prefetch or PREFETCHED)

    @property
    def made_here(self) -> bool:
        """Whether this process prepares each batch when it is needed, without a cache or a data service."""
        feed = self._feed
        if isinstance(feed, OwnFeed):
            return not feed.in_memory
        return isinstance(feed, Feed) and not feed.keeps_features

    def window(self, kind: Kind, seconds: float) -> Window:
        """Measure a window of this kind and length.

        Raises:
            UserError: A step is not finite, or does not fit in memory.
        """
        if kind == "resident":
            return self._resident_window(seconds)
        once = {"called": self._called, "real": self._called_real, "input": self._taken}[kind]
        if kind == "called":
            _await_idle()
            self._fill(once, LEAD_SHARE * seconds)
        else:
            self._drain(once, LEAD_SHARE * seconds)
        return self._fill(once, seconds, kind=kind)

    def machine_speed(self, seconds: float) -> float | None:
        """Measure the machine's own speed for this many seconds; see `MachineSpeed.measure`."""
        if self._machine_speed is None:
            self._machine_speed = MachineSpeed()
        return self._machine_speed.measure(seconds)

    def compile(self) -> float:
        """Compile the step and its calls; return the wall time of a call, seconds."""
        self.run.measure_ceiling()
        for _ in range(2):
            self._called_real()
        begun_s = time.monotonic()
        self._called_real()
        return time.monotonic() - begun_s

    def make_first_pass(self) -> None:
        """Read a first pass over a user-defined dataset, for at most `FIRST_PASS_S`."""
        feed, position = self._feed, self.run.position
        if not isinstance(feed, OwnFeed):
            return
        begun_s = time.monotonic()
        while position.step < position.per_epoch:
            self._taken()
            if time.monotonic() - begun_s > FIRST_PASS_S:
                return

    def spans(self, calls: int) -> list[dict[str, Any]]:
        """Run some calls of training, one after the other.

        Returns:
            For each call: start and end, seconds since the start of the first call; number of steps; and
            time that it waited for input, seconds.
        """
        found, zero_s = [], time.monotonic()
        for _ in range(calls):
            begun_s = time.monotonic() - zero_s
            steps, rows, wait_s = self._called_real()
            found.append(
                {"begin_s": begun_s, "end_s": time.monotonic() - zero_s, "wait_s": wait_s}
                | {"steps": steps, "rows": rows}
            )
        return found

    def stages(self) -> tuple[StageCost, ...]:
        """Return the cost of each stage of the input; empty if batches are cached or prepared elsewhere."""
        feed, run = self._feed, self.run
        if isinstance(feed, OwnFeed):
            # Do not measure to the end of a pass: TensorFlow's model then no longer contains the generator.
            most = max(1, run.position.per_epoch // 2)
            return dataset_stages(feed.watched(), elements=min(STAGE_BATCHES, most))
        if not isinstance(feed, Feed) or feed.keeps_features:
            return ()
        size = run.compiled.resolved.global_batch
        return measure_stages(feed.stages(batch_size=size, samples=STAGE_SAMPLES, seed=0))

    def checkpoint_s(self) -> float:
        """Return the time by which checkpoints delay a step on average, seconds."""
        return checkpoint_s(self.run, self._resident.state)

    def communication_s(self) -> float:
        """Return the time that a step needs to sum gradients over the replicas, seconds."""
        return communication_s(self.run)

    def transfer_s(self) -> float:
        """Return the time to copy a batch to the first GPU, seconds; 0 without a GPU."""
        return transfer_s(self.run)

    def _drain(self, once: Callable[[], tuple[int, float, float]], least_s: float) -> None:
        """Use up elements that were prefetched before the window, because they would distort it.

        It stops when no prefetched elements are left, or when their number no longer decreases, because
        the input keeps up with the step.
        """
        begun_s, taken, before = (
            time.monotonic(),
            0.0,
            prefetched_elements(self._step_input.iterator),
        )
        while (spent_s := time.monotonic() - begun_s) < MAX_LEAD_S:
            call_s = time.monotonic()
            steps, _, wait_s = once()
            call_s = time.monotonic() - call_s
            taken += 1 if self._feed.whole_calls else steps / self._step_input.group
            if spent_s + call_s < least_s:
                continue
            if before is None:
                if taken >= self._unseen or wait_s > WAITED_SHARE * call_s:
                    return
            elif taken >= MIN_LEAD:
                ready = prefetched_elements(self._step_input.iterator) or 0.0
                if ready < 1.0 or before - ready <= FALLEN_SHARE * taken:
                    return
                taken, before = 0.0, ready

    def _fill(
        self, once: Callable[[], tuple[int, float, float]], seconds: float, *, kind: Kind = "real"
    ) -> Window:
        steps, rows, wait_s = 0, 0.0, 0.0
        cpu_s, begun_s = time.process_time(), time.monotonic()
        while steps == 0 or time.monotonic() - begun_s < seconds:
            more = once()
            steps, rows, wait_s = steps + more[0], rows + more[1], wait_s + more[2]
        wall_s = time.monotonic() - begun_s
        return Window(
            kind=kind,
            steps=steps,
            rows=rows,
            wall_s=wall_s,
            wait_s=wall_s if kind == "input" else wait_s,
            cpu_s=time.process_time() - cpu_s,
        )

    def _resident_window(self, seconds: float) -> Window:
        _await_idle()
        steps = max(1, int(seconds / max(self.run.last_ceiling_s, 1e-9)))
        saved = self._resident.state.capture()
        try:
            cpu_s, begun_s = time.process_time(), time.monotonic()
            self._resident.take(steps)
            wall_s = time.monotonic() - begun_s
            cpu_s = time.process_time() - cpu_s
        finally:
            self._resident.state.restore(saved)
        rows = steps * self.run.compiled.source.rows_per_step
        return Window(
            kind="resident", steps=steps, rows=rows, wall_s=wall_s, wait_s=0.0, cpu_s=cpu_s
        )

    def _called_real(self) -> tuple[int, float, float]:
        return self._one_call(self._step_input)

    def _called(self) -> tuple[int, float, float]:
        """Run a call of full length on the batch in memory."""
        with self.run.from_first_step():
            return self._one_call(self._memory)

    def _one_call(self, step_input: StepInput) -> tuple[int, float, float]:
        run, position = self.run, self.run.position
        before = (position.step, position.timing.rows, position.timing.wait_s)
        run.begin_epoch()
        run.one_call(step_input)
        steps = position.step - before[0]
        if not position.validated:
            run.skip_validation()
        timing = position.timing
        return steps, timing.rows - before[1], timing.wait_s - before[2]

    def _taken(self) -> tuple[int, float, float]:
        """Read and drop the batches of a call, in the graph, as the step reads them."""
        if self._take is None:
            self._take = _take_some
        position, whole = self.run.position, self._feed.whole_calls
        planned = position.next_steps(self.run.compiled.resolved.steps_per_call)
        group = self._step_input.group
        elements = 1 if whole else -(-planned // group)
        rows = self._take(self._step_input.iterator, tf.constant(elements, tf.int64), group > 1)
        self.run.skip_steps(planned)
        return planned if whole else elements * group, float(rows), 0.0


@contextmanager
def open_probe(run: Run, opened: RunStart) -> Iterator[Probe]:
    """Yield a probe of a run from `open_measured_run`; long calls are shortened.

    Raises:
        UserError: Training with these settings would fail.
    """
    run.limit_call_time(LONGEST_CALL_S)
    with _reading(run, opened) as probe:
        call_s = probe.compile()
        if call_s <= 2 * LONGEST_CALL_S:
            probe.make_first_pass()
            yield probe
            return
    # Calls take longer than their steps, because they wait for input: use fewer steps per call.
    run.limit_call_time(
        LONGEST_CALL_S * run.last_ceiling_s * run.compiled.resolved.steps_per_call / call_s
    )
    with _reading(run, opened) as probe:
        probe.compile()
        probe.make_first_pass()
        yield probe


@contextmanager
def _reading(run: Run, opened: RunStart) -> Iterator[Probe]:
    with ExitStack() as at_end:
        batches = at_end.enter_context(opened.feed.shuffled(run.compiled.calls(run.position)))
        with opened.feed.shuffled(_first_of(run.compiled.calls(run.position))) as first:
            element = next(iter(first))
        yield Probe(run, opened, step_input=run.compiled.step_input(batches), element=element)


@tf.function(reduce_retracing=True)
def _take_some(iterator: Any, elements: tf.Tensor, groups: bool) -> tf.Tensor:
    """Take and drop some elements; return their number of rows.

    Args:
        iterator: Yields the elements.
        elements: Number of elements, int64.
        groups: Whether an element contains the batches of several steps.
    """
    rows, done = tf.constant(0, tf.int64), tf.constant(0, tf.int64)
    while done < elements:
        tf.autograph.experimental.set_loop_options(parallel_iterations=1)
        element = next(iterator)
        first = tf.nest.flatten(element)[0]
        if isinstance(first, tf.RaggedTensor):
            rows += first.nrows(tf.int64)
        else:
            rows += tf.reduce_prod(tf.shape(first, tf.int64)[: 2 if groups else 1])
        done += 1
    return rows


def _first_of(calls: Calls) -> Calls:
    return replace(calls, first=0, skipped_steps=0)


def _await_idle() -> None:
    """Wait until the input has filled its buffers: until then, it uses CPU time."""
    end_s = time.monotonic() + MAX_IDLE_S
    while time.monotonic() < end_s:
        cpu_s, begun_s = time.process_time(), time.monotonic()
        time.sleep(IDLE_POLL_S)  # tf.data does not report when its buffer is full
        if time.process_time() - cpu_s < IDLE_SHARE * (time.monotonic() - begun_s):
            return
