"""A run's step, compiled: what it is fed, how many steps are one program, and how fast it can be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from stoker.cluster.compile_flags import publish
from stoker.data.feed.calls import Calls
from stoker.data.feed.options import begun_early, with_own_threads
from stoker.data.user_dataset.feed import OwnFeed
from stoker.train.checkpoints.state import TrainingState
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.context import utilization
from stoker.train.context.position import Position
from stoker.train.context.start_position import TrainFeed
from stoker.train.context.utilization import FIXED_STEPS, Ceiling, measure_ceiling
from stoker.train.model.keras_model import adapt_load
from stoker.train.optimizer.deferred_finite_check import all_finite
from stoker.train.optimizer.ema import WeightAverage
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.strategy import Distribution
from stoker.train.setup.whole_batches import WholeFeed, first_share
from stoker.train.step.custom_train_step import has_custom_train_step, make_step
from stoker.train.step.multi_step import make_multi_step, make_run_resident, step_of
from stoker.train.step.one_program import (
    OneProgram,
    max_steps_per_program,
    multi_step_program,
    steps_within_program_time,
)
from stoker.train.step.program import Program
from stoker.train.step.step import StepSettings, suit_kernels
from stoker.train.step.step_input import (
    StepInput,
    group_batches,
    placeholder_input,
    takes_batches_inline,
)
from stoker.train.step.step_totals import StepTotals
from stoker.train.xla.compile_notice import shown


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """The compiled step on a batch in memory."""

    take: Callable[[int], None]
    """Takes so many steps, and returns when they have ended."""

    state: TrainingState
    """Every variable that they change."""


class Compiled:
    """The step of a run; compiled again where it is to be another."""

    def __init__(
        self,
        built: BuiltModel,
        feed: TrainFeed,
        position: Position,
        *,
        config: TrainConfig,
        resolved: ResolvedTraining,
        distribution: Distribution,
        signals: tf.Variable | None,
    ) -> None:
        """Take the first batch; nothing is compiled yet.

        Args:
            built: The model.
            feed: What it is fed.
            position: Where the run is, and what its steps are by now.
            config: What was asked for.
            resolved: What that is on this machine.
            distribution: The strategy.
            signals: As in `StepSettings`.
        """
        self.resolved = resolved
        self._built, self._feed, self._position = built, feed, position
        self._config, self._distribution, self._signals = config, distribution, signals
        self.load = adapt_load(feed.load, built.model, class_weight=config.class_weight)
        self._rows_of_call = resolved.global_batch if feed.whole_calls else None
        self.sample = self._first_element()
        first = self.load(self.sample)
        self.rows_per_step = float(tf.shape(tf.nest.flatten(first)[0])[0])
        self._max_steps_per_program = self._steps_together(first)
        self.average: WeightAverage | None = None
        self.defers_finite_check = False
        self.last_ceiling_s = 0.0
        self._placeholder: Any = None
        self._resident_of: Any = None
        self._run_resident: utilization.RunResident

    def compile(self) -> None:
        """Compile what the settings and the position ask for now."""
        self.program = self._program(
            xla=self.resolved.xla,
            steps_per_program=max(
                1, min(self._position.steps_per_program, self._max_steps_per_program)
            ),
        )

    def _program(self, *, xla: bool, steps_per_program: int = 1) -> Program:
        position = self._position
        settings = StepSettings(
            batch_size=position.batch_size,
            accumulate=position.accumulate,
            xla=xla,
            reduction_dtype=self._config.reduction_dtype,
            reduction_bytes_per_pack=self._config.reduction_bytes_per_pack,
            average=self.average,
            steps_per_program=steps_per_program,
            worker_rows_only=self._feed.shares_rows,
            checks_before_update=not self.defers_finite_check,
            signals=self._signals,
        )
        step = make_step(self._built, self.load, distribution=self._distribution, settings=settings)
        model = self._built.model
        multi_step = make_multi_step(
            step,
            rows_per_step=self._rows_of_call,
            single_step=self.resolved.steps_per_call == 1,
            overlap=not self._distribution.shares_batches,
            check_finite=(lambda: all_finite(model)) if self.defers_finite_check else None,
        )
        return Program(step, multi_step, xla=xla)

    def trace_for_xla(self, step_input: StepInput) -> Program:
        """Trace the same step for XLA without compiling it; the current step stays in use.

        Both update the same variables.

        Args:
            step_input: The run's input.
        """
        try:
            program = self._program(xla=True)
            program.trace(step_input)
        finally:
            suit_kernels(self._built, self._distribution, xla=self.resolved.xla)
        return program

    def use(self, program: Program) -> None:
        """Use this step from now on.

        Args:
            program: From `trace_for_xla`.
        """
        program.compiled_rows.update(self.rows_of_steps)
        self.program = program
        self.resolved = replace(self.resolved, xla=program.xla)
        suit_kernels(self._built, self._distribution, xla=program.xla)

    @property
    def why_xla_is_impossible(self) -> str:
        """Why XLA cannot be tried while the run trains; empty if it can."""
        if self._distribution.replicas > 1:
            return "several replicas train"
        if has_custom_train_step(self._built.model):
            return "the model has a train_step of its own"
        # Any other shape would be compiled while the device waits.
        known = self._fixed if isinstance(self._feed, OwnFeed) else self._fixed_samples
        return "" if known else "batches differ in shape"

    @property
    def rows_of_steps(self) -> list[int]:
        """Rows of a full step, and of an epoch's last step if that is shorter."""
        full = int(self.rows_per_step)
        short = 0 if isinstance(self._feed, OwnFeed | WholeFeed) else self._feed.rows % full
        return [full, short] if short else [full]

    def elements_to_compile(self) -> list[Any]:
        """An element for each number of rows that a step in this run can have."""
        return [
            tf.nest.map_structure(lambda tensor, rows=rows: tensor[:rows], self.sample)
            for rows in self.rows_of_steps
        ]

    @contextmanager
    def showing_compilation(self, report: Callable[[str], None], *, ends: bool) -> Iterator[None]:
        """Context of a call: shows that XLA compiles, if it has to compile first.

        Args:
            report: Takes the line.
            ends: Whether the call ends an epoch; the last step may have fewer rows.
        """
        program = self.program
        wanted = self.rows_of_steps if ends else self.rows_of_steps[:1]
        missing = [rows for rows in wanted if rows not in program.compiled_rows]
        what = ""
        if program.xla and missing:
            rows = " and ".join(map(str, missing))
            what = f"the training step of {self._built.model.name} for {rows} samples, by XLA"
        with shown(report, what):
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
        """Some steps, as `make_multi_step` has it; what they leave is the source's.

        Args:
            step_input: What `step_input` gave.
            steps: How many, at least one.
            check: As in `make_multi_step`.
            ends: Whether an epoch ends with them. Then nothing is taken beyond, where another pass may
                take long to begin or need not come at all.
            program: A form of the step other than the current one.
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
        """As `run`: the last step is told to take what is of no use."""
        before = None
        if steps > 1:
            before = program.call(step_input, step_input.iterator, steps - 1, check=False)
            if int(before.steps) < steps - 1 or int(before.signals[0]):
                return before
        if self._placeholder is None:
            self._placeholder = placeholder_input(self.sample)
        last = program.call(step_input, self._placeholder, 1, check=check)
        step_input.left = ()
        return last if before is None else before.and_then(last)

    def decide_steps_per_program(
        self, state: TrainingState, *, report: Callable[[str], None]
    ) -> None:
        """Decide, once per run, how many steps form one program; the decision is final.

        Before the first step, some steps are timed, but only if several of them can form a program.

        Args:
            state: Every variable that a step updates.
            report: Receives a line while XLA compiles.
        """
        if self._position.steps_per_program:
            return
        step = self.program.step
        groups = isinstance(step, OneProgram) and step.groups
        most = self._max_steps_per_program if groups else 1
        if most == 1:
            self._position.steps_per_program = 1
            return
        with self.showing_compilation(report, ends=False):
            step_s = self.measure_ceiling(
                state, seconds=utilization.CEILING_S / utilization.WINDOWS
            ).step_s
        self._position.steps_per_program = steps_within_program_time(most, step_s)
        if self._position.steps_per_program > 1:
            self.compile()

    def measure_ceiling(self, state: TrainingState, *, seconds: float) -> Ceiling:
        """Time steps on a resident batch, for about this many seconds, and restore the model."""
        sample = first_share(self.sample, self._distribution)
        step = self.program.step
        if self._resident_of is not step:
            self._run_resident = self._make_run_resident(sample)
            self._resident_of = step
        steps_per_program = FIXED_STEPS if self._distribution.workers > 1 else None
        with self._distribution.strategy.scope():
            found = measure_ceiling(
                self._run_resident, sample, state=state, seconds=seconds, steps=steps_per_program
            )
        self.last_ceiling_s = found.step_s
        return found

    def resident(self, state: TrainingState) -> Resident:
        """The compiled step on one batch in memory, to be timed by others."""
        sample = first_share(self.sample, self._distribution)
        run_resident = self._make_run_resident(sample)
        scope = self._distribution.strategy.scope

        def take(steps: int) -> None:
            with scope():
                run_resident(sample, tf.constant(steps, tf.int64)).numpy()

        take(1)
        return Resident(take=take, state=state)

    def _make_run_resident(self, sample: Any) -> utilization.RunResident:
        # The rows of a step that is cut out of those of a call are known only when it runs.
        fixed = self._fixed and not self._feed.whole_calls
        return make_run_resident(self.program.step, sample, fixed=fixed)

    def limit_call_time(self, seconds: float) -> None:
        """Make calls shorter that would take longer than that."""
        most = max(1, int(seconds / max(self.last_ceiling_s, 1e-9)))
        if most < self.resolved.steps_per_call:
            self.resolved = replace(self.resolved, steps_per_call=most)
            self.compile()

    def calls(self, position: Position | None = None) -> Calls:
        """The calls from where the run stands, or from another position, to its end."""
        position = position or self._position
        feed, per_call = self._feed, self.resolved.steps_per_call
        whole = position.per_epoch * self.resolved.global_batch
        per_epoch = -(-position.per_epoch // per_call)
        return Calls(
            # A step of a user's own dataset is one of its batches, whatever its size.
            rows=whole if isinstance(feed, OwnFeed | WholeFeed) else feed.rows,
            batch_size=self.resolved.global_batch,
            steps_per_call=per_call,
            seed=self._config.seed,
            first=position.epoch * per_epoch + position.in_epoch // per_call,
            last=per_epoch * self._config.epochs,
            skipped_steps=position.in_epoch % per_call,
            worker=self._distribution.worker,
            workers=self._distribution.workers,
        )

    def _first_element(self) -> Any:
        # The run's first, wherever it stands: at its end no other is left.
        begin = replace(self._position, step=0)
        with self._feed.shuffled(self.calls(begin)) as batches:
            element = next(iter(batches))
            self._fixed = _has_fixed_shapes(batches, first=1 if self._feed.whole_calls else 0)
            self._fixed_samples = _has_fixed_shapes(batches, first=1)
        return element if self._rows_of_call is None else step_of(element, 0, self._rows_of_call)

    def step_input(self, batches: tf.data.Dataset[Any]) -> StepInput:
        """What `multi_step` reads, of what the feed yields."""
        if not isinstance(self._feed, OwnFeed):
            batches = begun_early(batches)
        program = multi_step_program(self.program.step)
        if program is not None and not self._feed.whole_calls:
            return group_batches(batches, program.steps_per_program)
        spread = self._distribution.spread(batches)
        if isinstance(spread, tf.data.Dataset) and not self._feed.whole_calls:
            endless = isinstance(self._feed, OwnFeed) and self._feed.in_memory
            if takes_batches_inline(spread.element_spec):
                return StepInput(iterator=iter(with_own_threads(spread)), endless=endless)
            return StepInput(iterator=iter(spread), ahead=True, endless=endless)
        return StepInput(iterator=iter(spread))

    def _steps_together(self, first: Any) -> int:
        """Steps that may be one program: full batches of known shapes follow each other."""
        if not self._fixed or self.rows_per_step != self._position.batch_size:
            return 1
        return max_steps_per_program(first, steps_per_call=self.resolved.steps_per_call)


def _has_fixed_shapes(elements: tf.data.Dataset[Any], *, first: int) -> bool:
    """Whether all batches have the shapes of the first one, apart from the axes before `first`."""
    return all(
        isinstance(spec, tf.TensorSpec) and spec.shape[first:].is_fully_defined()
        for spec in tf.nest.flatten(elements.element_spec)
    )
