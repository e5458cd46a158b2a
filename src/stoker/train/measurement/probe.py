"""Measure a training without training: windows of its step, of its calls and of its input.

One iterator serves all windows, so one pipeline is alive at a time. What a window changes of the
model is put back, nothing is validated, and no checkpoint is written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import tensorflow as tf

from stoker.data.feed.calls import Calls
from stoker.data.feed.dataset_stages import dataset_stages
from stoker.data.feed.pipeline import PREFETCHED, Feed
from stoker.data.feed.stages import StageCost, measure_stages
from stoker.data.user_dataset.feed import OwnFeed
from stoker.train.context.start_position import RunStart
from stoker.train.loop.run import Run
from stoker.train.measurement.machine_speed import MachineSpeed
from stoker.train.measurement.prefetch_depth import prefetched_elements
from stoker.train.measurement.step_costs import checkpoint_s, communication_s, transfer_s
from stoker.train.measurement.window import Kind, Window
from stoker.train.step.step_input import StepInput

LEAD_SHARE = 0.25
"""Of a window, how long it runs at least before it is timed: threads are awake."""

LEAD_MOST_S = 2.0
"""Longest that elements are awaited which were made before a window, until they are used up; those
that are left then are too few a second to tell."""

LEAD_LEAST = 16
"""Elements after which it shows whether fewer lie ready than before: a stall of the step by other
processes makes up for a few."""

WAITED_SHARE = 0.1
"""Of a call, how long it has waited for input where nothing lies ready any more; where TensorFlow
keeps a model of the input, that says it."""

FALLEN_SHARE = 0.05
"""Of what was taken, by how much less may lie ready where the input keeps up with the step."""

LONGEST_CALL_S = 1.0
"""A call that takes longer is cut into shorter ones, so that windows keep their length."""

IDLE_SHARE, IDLE_POLL_S, IDLE_MOST_S = 0.1, 0.02, 3.0
"""A window of the step begins when the rest of the process uses less than this share of a core, as
input that fills its buffers does, or when this has been waited for, seconds."""

HIDDEN_PREFETCHES = 3
"""How many times what is made ahead is taken of Stoker's own feeds, of which TensorFlow keeps no model:
that uses up those that lie ready where the input is slower than two thirds of the step, and few are left of a
faster one."""

STAGE_BATCHES, STAGE_SAMPLES = 32, 256
"""How much is read of a dataset of the user's own, or of the shards, to know what its stages cost."""

FIRST_PASS_S = 20.0
"""Longest that a first pass over a dataset of the user's own is awaited, seconds: it may fill a
cache, and is not what the other passes cost."""


class Probe:
    """A training that is measured."""

    def __init__(self, run: Run, opened: RunStart, *, step_input: StepInput, element: Any) -> None:
        """Begin; see `open_probe`."""
        self.run = run
        self._feed, self._step_input = opened.feed, step_input
        self._memory = run.compiled.step_input(tf.data.Dataset.from_tensors(element).repeat())
        self._resident = run.resident()
        self._take: Any = None
        self._machine_speed: MachineSpeed | None = None
        self._unseen = HIDDEN_PREFETCHES * (run.config.feed.prefetch or PREFETCHED)
        self.first_pass_s: float | None = None
        """Wall time of a dataset's first pass, where one was made to its end."""

    @property
    def made_here(self) -> bool:
        """Whether this process makes batches as they are needed: none are kept, nobody else does."""
        feed = self._feed
        if isinstance(feed, OwnFeed):
            return not feed.in_memory
        return isinstance(feed, Feed) and not feed.keeps_features

    def window(self, kind: Kind, seconds: float) -> Window:
        """Measure for so long.

        Raises:
            UserError: a step is not finite, or does not fit in memory.
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
        """How quick the machine itself is just now; see `MachineSpeed.measure`."""
        if self._machine_speed is None:
            self._machine_speed = MachineSpeed()
        return self._machine_speed.measure(seconds)

    def compile(self) -> float:
        """Compile the step and its calls; wall time of a call of training, seconds."""
        self.run.measure_ceiling()
        for _ in range(2):
            self._called_real()
        begun_s = time.monotonic()
        self._called_real()
        return time.monotonic() - begun_s

    def make_first_pass(self) -> None:
        """Make a first pass over a dataset of the user's own, as far as time allows."""
        feed, position = self._feed, self.run.position
        if not isinstance(feed, OwnFeed):
            return
        begun_s = time.monotonic()
        while position.step < position.per_epoch:
            self._taken()
            if time.monotonic() - begun_s > FIRST_PASS_S:
                return
        self.first_pass_s = time.monotonic() - begun_s

    def spans(self, calls: int) -> list[dict[str, Any]]:
        """Some calls of training, one after the other.

        Returns:
            Begin and end of each, seconds from the first, its steps, and how long of it was waited
            for input.
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
        """What each stage of the input costs; none where samples lie ready, or are made elsewhere."""
        feed, run = self._feed, self.run
        if isinstance(feed, OwnFeed):
            # Where a pass ends, TensorFlow's model forgets the generator that has ended.
            most = max(1, run.position.per_epoch // 2)
            return dataset_stages(feed.watched(), elements=min(STAGE_BATCHES, most))
        if not isinstance(feed, Feed) or feed.keeps_features:
            return ()
        size = run.compiled.resolved.global_batch
        return measure_stages(feed, batch_size=size, samples=STAGE_SAMPLES)

    def checkpoint_s(self) -> float:
        """What a checkpoint holds the step up for, by step, seconds."""
        return checkpoint_s(self.run, self._resident.state)

    def communication_s(self) -> float:
        """What summing gradients over the replicas takes of a step, seconds."""
        return communication_s(self.run)

    def transfer_s(self) -> float:
        """What copying a batch to the first GPU takes, seconds; 0 without a GPU."""
        return transfer_s(self.run)

    def _drain(self, once: Callable[[], tuple[int, float, float]], least_s: float) -> None:
        """Take what was made while nothing was measured: a window of it would be too fast.

        It ends when nothing lies ready any more, or no less than some elements before: the input
        keeps up with what takes them.
        """
        begun_s, taken, before = (
            time.monotonic(),
            0.0,
            prefetched_elements(self._step_input.iterator),
        )
        while (spent_s := time.monotonic() - begun_s) < LEAD_MOST_S:
            call_s = time.monotonic()
            steps, _, wait_s = once()
            call_s = time.monotonic() - call_s
            taken += 1 if self._feed.whole_calls else steps / self._step_input.group
            if spent_s + call_s < least_s:
                continue
            if before is None:
                if taken >= self._unseen or wait_s > WAITED_SHARE * call_s:
                    return
            elif taken >= LEAD_LEAST:
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
        """A call on the batch in memory, from where every call of full length begins."""
        position = self.run.position
        before, validated = position.step, position.validated
        position.step, position.validated = 0, True
        try:
            return self._one_call(self._memory)
        finally:
            position.step, position.validated = before, validated

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
        """Batches of a call, taken by the graph as the step does it."""
        if self._take is None:
            self._take = _take_some
        position, whole = self.run.position, self._feed.whole_calls
        planned = position.next_steps(self.run.compiled.resolved.steps_per_call)
        group = self._step_input.group
        elements = 1 if whole else -(-planned // group)
        rows = self._take(self._step_input.iterator, tf.constant(elements, tf.int64), group > 1)
        position.step += planned
        if not position.validated or position.step % position.per_epoch == 0:
            self.run.skip_validation()
        return planned if whole else elements * group, float(rows), 0.0


@contextmanager
def open_probe(run: Run, opened: RunStart) -> Iterator[Probe]:
    """Be ready to measure what `open_measured_run` has opened; calls that are long are made shorter.

    Raises:
        UserError: what would have ended training.
    """
    run.limit_call_time(LONGEST_CALL_S)
    with _reading(run, opened) as probe:
        call_s = probe.compile()
        if call_s <= 2 * LONGEST_CALL_S:
            probe.make_first_pass()
            yield probe
            return
    # Of a step that waits for its input, so many fewer.
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
    """Rows of so many elements, of which nothing else is done; `groups`: batches of some steps each."""
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
    """Let the input fill its buffers first: it would take the CPU from what is measured."""
    end_s = time.monotonic() + IDLE_MOST_S
    while time.monotonic() < end_s:
        cpu_s, begun_s = time.process_time(), time.monotonic()
        time.sleep(IDLE_POLL_S)  # how long is looked at
        if time.process_time() - cpu_s < IDLE_SHARE * (time.monotonic() - begun_s):
            return
