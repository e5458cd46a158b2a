"""The compiled step of a run: its input, its program, and the measurement of its ceiling."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from stoker.cluster.compile_flags import publish
from stoker.data.feed.calls import Calls
from stoker.data.feed.options import begun_early, with_own_threads
from stoker.data.user_dataset.feed import OwnFeed
from stoker.train.checkpoints.state import TrainingState
from stoker.train.config import ResolvedTraining
from stoker.train.context.position import Position
from stoker.train.context.run_context import RunSetup
from stoker.train.context.start_position import TrainFeed
from stoker.train.context.utilization import FIXED_STEPS, Ceiling, RunResident, measure_ceiling
from stoker.train.model.keras_model import adapt_load
from stoker.train.optimizer.ema import WeightAverage
from stoker.train.optimizer.loss_scaling import all_finite
from stoker.train.setup.whole_batches import WholeFeed, first_share
from stoker.train.step.custom_train_step import has_custom_train_step, make_step
from stoker.train.step.multi_step import make_multi_step, make_run_resident, step_of
from stoker.train.step.one_program import (
    OneProgram,
    max_steps_per_program,
    multi_step_program,
)
from stoker.train.step.program import (
    Program,
    StepInput,
    group_batches,
    placeholder_input,
    takes_batches_inline,
)
from stoker.train.step.step import StepSettings, suit_kernels
from stoker.train.step.step_totals import StepTotals


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """The compiled step on a batch in memory, which is the same for all steps."""

    take: Callable[[int], None]
    """Runs this many steps, and returns when they have ended."""

    state: TrainingState
    """All variables that the steps change."""


@dataclass(frozen=True, kw_only=True)
class StepSource:
    """The feed of a run's steps, and what its first element shows about all elements."""

    feed: TrainFeed
    load: Callable[[Any], Any]
    """Converts an element of the feed to a batch in the form that the model's loss needs."""

    sample: Any
    """The element of the run's first step."""

    fixed: bool
    """Whether all elements have the same shapes."""

    fixed_samples: bool
    """Whether all samples have the same shapes; the number of rows may differ."""

    max_steps_per_program: int
    """Maximum number of steps in a program, if XLA compiles the whole step."""

    rows_per_step: float
    """Number of rows of a full step on this worker."""

    @property
    def rows_of_steps(self) -> list[int]:
        """Numbers of rows of a full step, and of an epoch's last step if it is shorter."""
        full = int(self.rows_per_step)
        short = 0 if isinstance(self.feed, OwnFeed | WholeFeed) else self.feed.rows % full
        return [full, short] if short else [full]

    def elements_to_compile(self) -> list[Any]:
        """Return an element for each number of rows that a step of this run can have."""
        return [
            tf.nest.map_structure(lambda tensor, rows=rows: tensor[:rows], self.sample)
            for rows in self.rows_of_steps
        ]


def open_step_source(setup: RunSetup, feed: TrainFeed, position: Position) -> StepSource:
    """Read the run's first element.

    Args:
        setup: The run.
        feed: The training split.
        position: The position of the run.
    """
    # Read the first element of the run, at any position: at the end of a run no later element is left.
    with feed.shuffled(_calls(setup, feed, replace(position, step=0))) as batches:
        element = next(iter(batches))
        fixed = _has_fixed_shapes(batches, first=1 if feed.whole_calls else 0)
        fixed_samples = _has_fixed_shapes(batches, first=1)
    if feed.whole_calls:
        element = step_of(element, 0, setup.resolved.global_batch)
    load = adapt_load(feed.load, setup.built.model, class_weight=setup.config.class_weight)
    first = load(element)
    rows = float(tf.shape(tf.nest.flatten(first)[0])[0])
    # Several steps can form a program only if all their batches are full and have known shapes.
    groups = fixed and rows == position.batch_size
    per_call = setup.resolved.steps_per_call
    return StepSource(
        feed=feed,
        load=load,
        sample=element,
        fixed=fixed,
        fixed_samples=fixed_samples,
        max_steps_per_program=max_steps_per_program(first, steps_per_call=per_call)
        if groups
        else 1,
        rows_per_step=rows,
    )


def build_step(
    setup: RunSetup,
    source: StepSource,
    position: Position,
    *,
    average: WeightAverage | None,
    defers_finite_check: bool,
) -> CompiledStep:
    """Compile the step that settings and position require.

    Args:
        setup: The run.
        source: The input of the run's steps.
        position: Its batch size, passes and steps per program are used, as decided so far.
        average: Moving average of the weights; None: no average.
        defers_finite_check: Whether weights are updated without a check of every gradient before.
    """
    settings = StepSettings(
        batch_size=position.batch_size,
        accumulate=position.accumulate,
        virtual_workers=setup.resolved.virtual_workers,
        xla=setup.resolved.xla,
        reduction_dtype=setup.config.reduction_dtype,
        reduction_bytes_per_pack=setup.config.reduction_bytes_per_pack,
        average=average,
        steps_per_program=max(1, min(position.steps_per_program, source.max_steps_per_program)),
        worker_rows_only=source.feed.shares_rows,
        checks_before_update=not defers_finite_check,
        signals=setup.context.preemption.signals,
        local_step=setup.context.local_step,
    )
    program = _make_program(setup, source, settings)
    return CompiledStep(setup=setup, source=source, settings=settings, program=program)


def _make_program(setup: RunSetup, source: StepSource, settings: StepSettings) -> Program:
    model, distribution = setup.built.model, setup.distribution
    step = make_step(setup.built, source.load, distribution=distribution, settings=settings)
    multi_step = make_multi_step(
        step,
        rows_per_step=setup.resolved.global_batch if source.feed.whole_calls else None,
        single_step=setup.resolved.steps_per_call == 1,
        overlap=not distribution.shares_batches,
        check_finite=None if settings.checks_before_update else lambda: all_finite(model),
    )
    return Program(step, multi_step, xla=settings.xla)


@dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """The step of a run in a compiled form; `build_step` creates such a form."""

    setup: RunSetup
    source: StepSource
    settings: StepSettings
    program: Program

    @property
    def resolved(self) -> ResolvedTraining:
        """The resolved settings of this step."""
        return self.setup.resolved

    def trace_for_xla(self, step_input: StepInput) -> Program:
        """Trace the same step for XLA without compiling it; this form of the step stays in use.

        Both forms update the same variables.

        Args:
            step_input: The run's input.
        """
        settings = replace(self.settings, xla=True, steps_per_program=1)
        try:
            program = _make_program(self.setup, self.source, settings)
            program.trace(step_input)
        finally:
            self._suit_kernels(xla=self.settings.xla)
        return program

    def with_program(self, program: Program) -> CompiledStep:
        """Return this step with another program, and configure the model's kernels for the program.

        Args:
            program: The result of `trace_for_xla`, compiled.
        """
        program.compiled_rows.update(self.source.rows_of_steps)
        self._suit_kernels(xla=program.xla)
        resolved = replace(self.resolved, xla=program.xla)
        return replace(
            self,
            setup=replace(self.setup, resolved=resolved),
            settings=replace(self.settings, xla=program.xla),
            program=program,
        )

    def _suit_kernels(self, *, xla: bool) -> None:
        suit_kernels(self.setup.built, self.setup.distribution, xla=xla)

    @property
    def why_xla_is_impossible(self) -> str:
        """Why XLA cannot be tried while the run trains; empty if XLA can be tried."""
        if self.setup.distribution.replicas > 1:
            return "several replicas train"
        if has_custom_train_step(self.setup.built.model):
            return "the model has a train_step of its own"
        # If shapes were not known before, XLA would compile a new shape while the device waits.
        source = self.source
        known = source.fixed if isinstance(source.feed, OwnFeed) else source.fixed_samples
        return "" if known else "batches differ in shape"

    @property
    def max_steps_per_program(self) -> int:
        """Maximum number of steps in a program."""
        step = self.program.step
        groups = isinstance(step, OneProgram) and step.groups
        return self.source.max_steps_per_program if groups else 1

    @contextmanager
    def showing_compilation(self, report: Callable[[str], None], *, ends: bool) -> Iterator[None]:
        """During a call in the `with` block, show a line while XLA compiles, if the call has to compile something.

        Args:
            report: Called with the line.
            ends: Whether the call ends an epoch, whose last step may have fewer rows.
        """
        program = self.program
        wanted = self.source.rows_of_steps if ends else self.source.rows_of_steps[:1]
        missing = [rows for rows in wanted if rows not in program.compiled_rows]
        what = ""
        if program.xla and missing:
            rows = " and ".join(map(str, missing))
            what = f"the training step of {self.setup.built.model.name} for {rows} samples, by XLA"
        with show_compilation(report, what):
            yield
        program.compiled_rows.update(missing)
        if what:
            publish()

    def run(
        self,
        step_input: StepInput,
        steps: int,
        *,
        check: bool,
        ends: bool,
        program: Program | None = None,
    ) -> StepTotals:
        """Run some steps; see `make_multi_step`. Unused input is kept in `step_input`.

        Args:
            step_input: The result of the method `step_input`.
            steps: Number of steps, at least one.
            check: As in `make_multi_step`.
            ends: Whether an epoch ends with these steps. Then no later input is read, because the next
                pass may start slowly, or may not be needed.
            program: The form of the step to use; None: the current one.
        """
        program = program or self.program
        if not step_input.ahead:
            return program.call(step_input, step_input.iterator, steps, check=check)
        waited_s = step_input.take_first()
        if ends and not step_input.endless:
            totals = self._run_to_epoch_end(program, step_input, steps, check=check)
        else:
            totals = program.call(step_input, step_input.iterator, steps, check=check)
        return totals._replace(wait_s=totals.wait_s + waited_s) if waited_s else totals

    def _run_to_epoch_end(
        self, program: Program, step_input: StepInput, steps: int, *, check: bool
    ) -> StepTotals:
        """Run the steps up to the end of an epoch: the last step prefetches a placeholder, not real input."""
        before = None
        if steps > 1:
            before = program.call(step_input, step_input.iterator, steps - 1, check=False)
            if int(before.steps) < steps - 1 or int(before.signals[0]):
                return before
        last = program.call(step_input, self._placeholder, 1, check=check)
        step_input.left = ()
        return last if before is None else before.and_then(last)

    @cached_property
    def _placeholder(self) -> Any:
        return placeholder_input(self.source.sample)

    def measure_ceiling(self, state: TrainingState, *, seconds: float) -> Ceiling:
        """Measure the time of steps on a resident batch for about this many seconds; restore the model."""
        distribution = self.setup.distribution
        sample = first_share(self.source.sample, distribution)
        steps = FIXED_STEPS if distribution.workers > 1 else None
        with distribution.strategy.scope():
            return measure_ceiling(
                self._run_resident, sample, state=state, seconds=seconds, steps=steps
            )

    @property
    def may_trace_meanwhile(self) -> bool:
        """Whether a thread may trace the resident step while another thread runs the first call.

        On a GPU, the first call mostly waits for cuDNN's search for algorithms, and a later trace between
        two calls would keep the device idle. On a CPU, both threads would need the same cores.
        """
        on_gpu = bool(tf.config.list_logical_devices("GPU"))
        return on_gpu and self.setup.distribution.replicas == 1

    def trace_resident(self) -> None:
        """Trace the function that `measure_ceiling` runs; nothing is computed."""
        function: Any = self._run_resident
        with self.setup.distribution.strategy.scope():
            function.get_concrete_function()

    def resident(self, state: TrainingState) -> Resident:
        """Return the step on one batch in memory, for other measurements."""
        distribution, run_resident = self.setup.distribution, self._run_resident
        sample = first_share(self.source.sample, distribution)

        def take(steps: int) -> None:
            with distribution.strategy.scope():
                run_resident(sample, tf.constant(steps, tf.int64)).numpy()

        take(1)
        return Resident(take=take, state=state)

    @cached_property
    def _run_resident(self) -> RunResident:
        sample = first_share(self.source.sample, self.setup.distribution)
        # If an element contains the rows of a whole call, the rows of a step are known only at run time.
        fixed = self.source.fixed and not self.source.feed.whole_calls
        return make_run_resident(self.program.step, sample, fixed=fixed)

    def calls(self, position: Position) -> Calls:
        """Return the calls from a position to the end of the run."""
        return _calls(self.setup, self.source.feed, position)

    def step_input(self, batches: tf.data.Dataset[Any]) -> StepInput:
        """Return the input of `multi_step` for the batches of the feed."""
        if not isinstance(self.source.feed, OwnFeed):
            batches = begun_early(batches)
        program = multi_step_program(self.program.step)
        if program is not None and not self.source.feed.whole_calls:
            return group_batches(batches, program.steps_per_program)
        spread = self.setup.distribution.spread(batches)
        if isinstance(spread, tf.data.Dataset) and not self.source.feed.whole_calls:
            endless = isinstance(self.source.feed, OwnFeed) and self.source.feed.in_memory
            if takes_batches_inline(spread.element_spec):
                return StepInput(iterator=iter(with_own_threads(spread)), endless=endless)
            return StepInput(iterator=iter(spread), ahead=True, endless=endless)
        return StepInput(iterator=iter(spread))


def _calls(setup: RunSetup, feed: TrainFeed, position: Position) -> Calls:
    per_call, size = setup.resolved.steps_per_call, setup.resolved.global_batch
    per_epoch = -(-position.per_epoch // per_call)
    return Calls(
        # A step of a user-defined dataset is one batch of the dataset, of any size.
        rows=position.per_epoch * size if isinstance(feed, OwnFeed | WholeFeed) else feed.rows,
        batch_size=size,
        steps_per_call=per_call,
        seed=setup.config.seed,
        first=position.epoch * per_epoch + position.in_epoch // per_call,
        last=per_epoch * setup.config.epochs,
        skipped_steps=position.in_epoch % per_call,
        worker=setup.distribution.worker,
        workers=setup.distribution.workers,
        share_rows=setup.resolved.virtual_workers
        * setup.resolved.batch_size
        // setup.distribution.workers,
    )


def _has_fixed_shapes(elements: tf.data.Dataset[Any], *, first: int) -> bool:
    """Whether all batches have the same shapes; axes before the axis `first` may differ."""
    return all(
        isinstance(spec, tf.TensorSpec) and spec.shape[first:].is_fully_defined()
        for spec in tf.nest.flatten(elements.element_spec)
    )


SILENT_S = 2.0
"""A compilation is shown only after this time, seconds."""

EVERY_S = 1.0
"""Interval between two updates of the line, seconds."""

PUBLISH_EVERY_S = 10.0
"""Interval at which results of XLA's autotuning are published to other processes, seconds: on a GPU, a
compilation can take minutes, and a process that is killed during it would otherwise lose all results."""


@contextmanager
def show_compilation(report: Callable[[str], None], what: str) -> Iterator[None]:
    """In the `with` block, show what is being compiled, and for how long: `compiling, 0:35: ...`.

    Args:
        report: Called with the line, from another thread, because this thread is inside TensorFlow.
        what: What is being compiled; empty: nothing is shown.

    Yields:
        Nothing.
    """
    if not what:
        yield
        return
    begun_s = time.monotonic()
    ended = threading.Event()

    def repeat() -> None:
        wait_s, published_s = SILENT_S, begun_s
        while not ended.wait(wait_s):
            passed = round(time.monotonic() - begun_s)
            report(f"compiling, {passed // 60}:{passed % 60:02}: {what}")
            wait_s = EVERY_S
            if time.monotonic() - published_s >= PUBLISH_EVERY_S:
                publish()
                published_s = time.monotonic()

    reporter = threading.Thread(target=repeat, name="stoker-compiling", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()
