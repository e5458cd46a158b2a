"""A training run in progress."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from stoker.cluster.compile_flags import give_way, used
from stoker.core.errors import Plain, UserError
from stoker.core.user_code import call
from stoker.data.feed.pipeline import Feed
from stoker.data.user_dataset.feed import AnyFeed
from stoker.internals.keras_internals import compute_loss
from stoker.telemetry.catalogue import training as catalogue
from stoker.train.callbacks.callbacks import Callbacks
from stoker.train.checkpoints.state import TrainingState
from stoker.train.checkpoints.store import VerifiedCheckpoint
from stoker.train.checkpoints.writer import CheckpointWriter
from stoker.train.config import ResolvedTraining
from stoker.train.context import utilization
from stoker.train.context.monitor import (
    finite_of,
    is_better,
    require_monitored,
    validation_class_weights,
)
from stoker.train.context.position import Position, Timing
from stoker.train.context.run_context import Progress, RunSetup
from stoker.train.context.start_position import RunStart
from stoker.train.context.utilization import Ceiling, RunCeiling
from stoker.train.loop.run_health import RunHealth
from stoker.train.loop.saving import RunCheckpoints
from stoker.train.loop.validation import (
    EvalBatches,
    ValidationAbortedError,
    agreed_metrics,
    make_validate,
    results,
)
from stoker.train.model.keras_model import (
    adapt_load,
    extra_optimizers,
    unwrap_user_errors,
)
from stoker.train.optimizer.loss_scaling import CHECK_EVERY_STEPS, may_defer_finite_check
from stoker.train.optimizer.settings import prepare_optimizer
from stoker.train.step.compiled import Resident, StepSource, build_step, open_step_source
from stoker.train.step.custom_train_step import (
    FirstPass,
    check_custom_train_step,
    first_pass,
    has_custom_train_step,
)
from stoker.train.step.elastic_checks import require_elastic_model
from stoker.train.step.multi_step import step_of
from stoker.train.step.one_program import steps_within_program_time
from stoker.train.step.oom import Split, is_out_of_memory
from stoker.train.step.program import StepInput
from stoker.train.step.step import loss_arguments, unscaled_losses
from stoker.train.step.step_totals import StepTotals
from stoker.train.step.xla_trial import CallPlan, XlaTrial

_LOG = logging.getLogger(__name__)

EVAL_BATCHES = 4
"""A validation batch is this many times as large as a training batch, because it needs no gradients."""

AVERAGE = "ema"
"""Group of a checkpoint's variables that contains the moving average of the weights."""


class Run:
    """A training run in progress: its compiled step, its variables and its position."""

    def __init__(self, setup: RunSetup, opened: RunStart, writer: CheckpointWriter | None) -> None:
        """Open the input, and build everything that a step changes.

        Args:
            setup: The model, the settings and the devices of the run.
            opened: The data and the position of the run.
            writer: Writes the checkpoints; None if this process writes no checkpoints.
        """
        self.position = position = opened.position
        resolved = setup.resolved
        if resolved.xla_trial and position.xla is not None:
            # An earlier process of this run has decided about XLA; the decision stays valid.
            setup = replace(setup, resolved=replace(resolved, xla=position.xla))
        self.built, self.config, self.context = setup.built, setup.config, setup.context
        self.distribution = setup.distribution
        self._feed, self._eval_feed = opened.feed, opened.held_out
        self._watch = self.context.watch
        self._time = self.context.run_time.wall.within
        self._ceiling = RunCeiling(
            position, lambda share: self.fitting(lambda: self.measure_ceiling(share))
        )
        self.last_ceiling_s = 0.0
        """Time of a step on the resident batch (T_ceil) in the newest measurement, seconds."""
        with self._time("data"):
            source = open_step_source(setup, self._feed, position)
        first = self._build_variables(setup, source)
        self._run_health = RunHealth(setup)
        self._run_health.check_model(first)
        self._defers_finite_check = may_defer_finite_check(
            self.built.model, self.config, setup.resolved
        )
        self._unchecked_steps = 0
        self._build_step(setup, source)
        self.xla_trial = XlaTrial(
            lambda: self.compiled,
            position,
            wanted=setup.resolved.xla_trial and position.xla is None and writer is not None,
        )
        self._make_observers(setup, writer)
        self._in_epoch = position.in_epoch > 0 or not position.validated
        self._was_over = position.over
        self._calls_timed, self._first_counts = 0, False
        self._saves_after_epoch = False
        self.agreement: dict[str, Any] | None = None
        self.measures_ceiling = True
        """Whether T_ceil is measured between calls; False for a measured run, whose probe measures it."""

    def _build_variables(self, setup: RunSetup, source: StepSource) -> FirstPass:
        """Create all variables: run a first batch through the model, and prepare the optimizer."""
        model = self.built.model
        if has_custom_train_step(model):
            check_custom_train_step(model, self.config, setup.resolved)
        with self.distribution.strategy.scope():
            first: FirstPass = call(
                first_pass,
                self.built,
                source.load(source.sample),
                what="a first batch through the model and its loss",
            )
            self._average = prepare_optimizer(model, self.config, setup.resolved)
            if setup.resolved.virtual_workers:
                require_elastic_model(self.built, source.load(source.sample), self.distribution)
            if not has_custom_train_step(model):
                # Check this now, before an epoch is trained.
                require_monitored(self.config.monitor, ["val_loss", *results(model, "val_")])
        return first

    def _build_step(self, setup: RunSetup, source: StepSource) -> None:
        self.compiled = build_step(
            setup,
            source,
            self.position,
            average=self._average,
            defers_finite_check=self._defers_finite_check,
        )

    def _make_observers(self, setup: RunSetup, writer: CheckpointWriter | None) -> None:
        """Create the objects for validation, callbacks and checkpoints."""
        model, position = self.built.model, self.position
        self._validate = make_validate(
            self.built,
            adapt_load(
                self._eval_feed.load,
                model,
                class_weight=validation_class_weights(model, self.config),
            ),
            distribution=self.distribution,
            should_abort=lambda: self._ends_alone() and not position.over,
        )
        self._callbacks = Callbacks(
            model,
            self.context.callbacks,
            steps=position.per_epoch,
            epochs=self.config.epochs,
            is_chief=self.distribution.is_chief,
        )
        extras = {} if self._average is None else {AVERAGE: self._average.variables}
        for name, optimizer in extra_optimizers(model).items():
            extras[f"optimizer.{name}"] = optimizer.variables
        self._state = TrainingState(model, extras=extras)
        self._checkpoints = RunCheckpoints(
            self._state, self._callbacks, self._run_health, position, setup, writer
        )

    def begin(self, found: VerifiedCheckpoint | None) -> None:
        """Restore the state of the checkpoint, or write the first one."""
        self.context.heartbeat.enter("train")
        if found is not None:
            with self._time("checkpoints"):
                self._checkpoints.restore(found)
            if self.distribution.is_chief:
                step, steps = self.position.step, self.position.steps
                _LOG.warning("continues from step %s of %s: %s", step, steps, found.path.name)
        else:
            # Remove metrics of a process that was killed before its first checkpoint.
            self.context.writer.rewind(0)
        self.context.run_time.begin(self.position.step)
        with self._time("tensorboard"):
            self._watch.begin(
                self.built.model,
                self.position.step,
                per_epoch=self.position.per_epoch,
                loss_of=self._loss_of_sample,
                inputs=self.input_specs,
            )
        with self._time("callbacks"):
            self._callbacks.on_train_begin()
        if found is None:
            # This first checkpoint shows early whether the disk is writable, and a rollback can return to
            # it. The first steps do not wait until it is written.
            self._save()
        with self._time("compile" if self.compiled.program.xla else "measuring"):
            while self.fitting(self._decide_steps_per_program) is None:
                continue

    def _decide_steps_per_program(self) -> bool:
        """Decide how many steps form one XLA program; the decision is made only once per run.

        If several steps can form a program, some steps are timed first.
        """
        position, step = self.position, self.compiled
        if position.steps_per_program:
            return True
        most = step.max_steps_per_program
        if most > 1:
            with step.showing_compilation(self.context.on_wait, ends=False):
                step_s = self.measure_ceiling(1 / utilization.WINDOWS).step_s
            most = steps_within_program_time(most, step_s)
        position.steps_per_program = most
        if most > 1:
            self._build_step(step.setup, step.source)
        return True

    def measure_ceiling(self, share: float = 1.0) -> Ceiling:
        """Measure the time of steps on the resident batch, and restore the model.

        Args:
            share: Share of the usual measuring time.
        """
        found = self.compiled.measure_ceiling(self._state, seconds=share * utilization.CEILING_S)
        self.last_ceiling_s = found.step_s
        return found

    def limit_call_time(self, seconds: float) -> None:
        """Reduce the steps per call so that a call takes at most this many seconds."""
        most, setup = max(1, int(seconds / max(self.last_ceiling_s, 1e-9))), self.compiled.setup
        if most < setup.resolved.steps_per_call:
            resolved = replace(setup.resolved, steps_per_call=most)
            self._build_step(replace(setup, resolved=resolved), self.compiled.source)

    def ceiling_step_s(self) -> float:
        """Return T_ceil, the mean of all windows; missing windows are measured now."""
        with self._time("measuring"):
            self._ceiling.complete(trained=self._calls_timed > 0)
        assert self._ceiling.step_s is not None
        return self._ceiling.step_s

    def _window(self) -> bool:
        """Measure T_ceil if it is due. Return whether memory ran out; the step was then compiled again."""
        if not self.measures_ceiling:
            return False
        if not self._ceiling.due(self.compiled.resolved.steps_per_call):
            return False
        with self._time("measuring"):
            return not self._ceiling.take()

    def _compile(self) -> None:
        """Compile the step again, and start to measure its T_ceil from the beginning."""
        self.xla_trial.drop("not used, because the step was replaced by a smaller one")
        self._build_step(self.compiled.setup, self.compiled.source)
        self._watch.step_changed(stays=True)
        self._ceiling.restart()

    def _save(self, *, now: bool = False) -> None:
        with self._time("checkpoints"):
            self._checkpoints.save(now=now)

    def resident(self) -> Resident:
        """Return the step on a batch in memory; see `CompiledStep.resident`."""
        return self.compiled.resident(self._state)

    def skip_steps(self, steps: int) -> None:
        """Advance the position by some steps that were not trained; an epoch ends without validation."""
        self.position.step += steps
        if not self.position.validated or self.position.step % self.position.per_epoch == 0:
            self.skip_validation()

    @contextmanager
    def from_first_step(self) -> Iterator[None]:
        """Set the position to the first step of the run for a `with` block, and restore it afterwards."""
        position = self.position
        before, validated = position.step, position.validated
        position.step, position.validated = 0, True
        try:
            yield
        finally:
            position.step, position.validated = before, validated

    def skip_validation(self) -> None:
        """End the epoch without validation."""
        self.position.validated, self._in_epoch = True, False

    def begin_epoch(self) -> None:
        """At the start of an epoch, reset the values that are counted per epoch, and call the callbacks."""
        if self._in_epoch:
            return
        self._in_epoch = True
        self.position.loss_sum = self.position.rows = 0.0
        self.built.model.reset_metrics()
        with self._time("callbacks"):
            self._callbacks.on_epoch_begin(self.position.epoch)

    def ends_epoch(self) -> bool:
        """Return whether the next call is the last one of its epoch."""
        position = self.position
        planned = position.next_steps(self.compiled.resolved.steps_per_call)
        return position.in_epoch + planned >= position.per_epoch

    def one_call(self, step_input: StepInput) -> bool:
        """Run some steps, report their results, and write a checkpoint if one is due.

        Returns:
            Whether the input must be opened again at the new position: after a rollback, after the step
            was replaced by a smaller one, or after a call that used only a part of its rows.
        """
        position, context, preemption = self.position, self.context, self.context.preemption
        planned = position.next_steps(self.compiled.resolved.steps_per_call)
        if planned == 0:
            return False
        self._apply_xla_decision()
        plan = self._plan_call(step_input, planned)
        steps = plan.steps
        self._callbacks.on_train_batch_begin(position.in_epoch)
        preemption.save_after_call(self._checkpoints.due(after=steps))
        is_new = self.compiled.program.traced is None
        with (
            self._run_health.placements() as placements,
            self._time("compile" if is_new else "steps"),
        ):
            check = self._checks_after(steps) or plan.compared
            ends = position.in_epoch + steps >= position.per_epoch
            with self.compiled.showing_compilation(context.on_wait, ends=ends):
                ran = self.fitting(
                    lambda: self._with_ceiling_traced(plan, step_input).run(
                        lambda: self.compiled.run(
                            step_input, steps, check=check, ends=ends, program=plan.program
                        )
                    )
                )
        if ran is None:
            self._go_back("fit in memory")
            return True
        totals, wall_s = ran
        done, signals = int(totals.steps), np.asarray(totals.signals)
        if not bool(totals.finite):
            at = position.step + done
            self.context.run_time.stepped(done, wall_s, step=at, wait_s=0.0, first=is_new)
            self._handle_bad_call(position.step + done, loss=float(totals.last_loss))
            return True
        self._report_call(plan, totals, wall_s, placements=placements, is_new=is_new)
        if signals[0] and not self._callbacks.stop_training:
            self._end_early()
        if signals[1] and position.validated:
            self._save()
        elif signals[1]:
            # The call ends an epoch, so the checkpoint is written after the validation.
            self._saves_after_epoch = True
        return self._window() or (steps < planned and self._feed.whole_calls)

    def _report_call(
        self,
        plan: CallPlan,
        totals: StepTotals,
        wall_s: float,
        *,
        placements: Sequence[Any],
        is_new: bool,
    ) -> None:
        """Count the steps of a call, and report them to health checks, TensorBoard and callbacks."""
        position, done = self.position, int(totals.steps)
        # Run the health checks before the results of the call are visible anywhere.
        self.context.preemption.has_work = True
        self._count(totals, done, wall_s, is_new=is_new)
        self.xla_trial.record_call(plan, done, wall_s)
        if self._calls_timed == 1:
            self._run_health.check_step(self.compiled.program.traced, placements)
            with self._time("tensorboard"):
                self._watch.graph(self.compiled.program.traced.graph)
        with self._time("tensorboard"):
            self._watch.after(position.step, steps=done)
        position.validated = position.step % position.per_epoch != 0
        if self._callbacks.reads_batch_logs:
            last = (position.step - 1) % position.per_epoch
            with self._time("callbacks"):
                self._callbacks.on_train_batch_end(last, self._logs())
        if self._callbacks.stop_training:
            # A callback requested a stop: as in `fit`, the epoch ends here and is validated.
            position.validated, position.over = False, True

    def _plan_call(self, step_input: StepInput, planned: int) -> CallPlan:
        steps = self._watch.next_steps(self.position.step, planned)
        plan = self.xla_trial.plan_call(step_input, steps, whole=self._feed.whole_calls)
        if plan.program is not None:
            self._watch.step_changed(stays=False)
        return plan

    def _with_ceiling_traced(self, plan: CallPlan, step_input: StepInput) -> CallPlan:
        """Return the plan of a call; during a process's first call, also trace the step on a resident batch."""
        step = self.compiled
        if self._calls_timed or not self.measures_ceiling or not step.may_trace_meanwhile:
            return plan
        # Trace the step now: two threads must not trace the user's layers at the same time.
        step.program.trace(step_input)
        return replace(plan, meanwhile=step.trace_resident)

    def _apply_xla_decision(self) -> None:
        """Record the decision of the XLA trial; if XLA will be used, write a checkpoint first."""
        decision, position = self.xla_trial.decision, self.position
        if decision is None or position.xla is not None:
            return
        position.xla, position.xla_why = decision.xla, decision.why
        if decision.xla:
            # From this checkpoint on, XLA compiles the step: its times, also T_ceil, are measured again.
            position.timing = Timing()
            self._ceiling.restart()
            self._save()
            self.compiled = self.xla_trial.adopted()
            self._watch.step_changed(stays=True)
            self._run_health.update_settings(self.compiled.resolved)

    def _checks_after(self, steps: int) -> bool:
        """Return whether to check all variables for values that are not finite after a call of `steps` steps.

        All workers must make the same decision.
        """
        position = self.position
        self._unchecked_steps += steps
        looks = (
            self._unchecked_steps >= CHECK_EVERY_STEPS
            or position.in_epoch + steps >= position.per_epoch
            or self.distribution.workers > 1
            # Callbacks with batch hooks may end the epoch or read the weights after any call.
            or self._callbacks.has_batch_hooks
            or bool(position.skipped)
        )
        if looks:
            self._unchecked_steps = 0
        return looks

    def fitting(self, work: Callable[[], Any]) -> Any:
        """Call a function that runs the compiled step; if memory runs out, compile a smaller step.

        Returns:
            The function's result; None if memory ran out, so that a smaller step was compiled. The
            variables may then have the values of any step of the call.
        """
        position = self.position
        try:
            with unwrap_user_errors():
                return work()
        except (tf.errors.OpError, MemoryError) as error:
            if give_way(error):
                return None
            if self.xla_trial.in_progress and is_out_of_memory(error):
                with self._time("compile"):
                    self.xla_trial.give_up("not used, memory ran out during the trial", wait=True)
                return None
            split = Split(batch_size=position.batch_size, accumulate=position.accumulate)
            split = self._run_health.out_of_memory(error, split)
        position.batch_size, position.accumulate = split.batch_size, split.accumulate
        self._compile()
        return None

    def _handle_bad_call(self, step: int, *, loss: float) -> None:
        """Handle a call in which the loss or a weight was no longer finite, at `step` (counted from 0) or earlier.

        If checks were deferred, the step itself is unknown: go back, and check each step from now on.
        """
        if not self._defers_finite_check:
            self._handle_bad_step(step, loss=loss)
            return
        self.xla_trial.give_up("not used, a step was not finite during the trial")
        self._defers_finite_check = False
        self._compile()
        self._go_back()
        _LOG.warning(
            "a loss or a weight is not finite at step %s: training resumes from step %s and checks each step",
            step + 1,
            self.position.step,
        )

    def _handle_bad_step(self, step: int, *, loss: float) -> None:
        """Explain why a step, counted from 0, is not finite; then stop, or roll back and skip the step."""
        position, batch = self.position, self.compiled.resolved.global_batch
        at = replace(position, step=step)
        with self._feed.shuffled(self.compiled.calls(at)) as batches:
            element = next(iter(batches))
        if self._feed.whole_calls:
            element = step_of(element, 0, batch)
        rows = range(at.in_epoch * batch, min((at.in_epoch + 1) * batch, self._feed.rows))
        first = at.epoch * self._feed.rows
        self._run_health.bad_step(
            self.compiled.source.load(element),
            step=step + 1,
            positions=range(first + rows.start, first + rows.stop),
            rows=self._feed.rows_at(at.epoch, rows.start, rows.stop, seed=self.config.seed),
            loss=loss,
        )
        position.skipped.append(step)
        self._go_back()

    def _go_back(self, must: str = "give finite numbers") -> None:
        """Restore the last checkpoint; decisions that were made after it stay valid.

        Args:
            must: What the steps after the checkpoint must do, and did not do, for the error message.
        """
        found = self._checkpoints.newest()
        if found is None:
            # A measured run writes no checkpoints.
            raise UserError(
                f"measured steps must {must}",
                got=Plain(f"a step after step {self.position.step} that does not"),
                fix="Run `stoker train`, which names the step and the layer.",
            )
        position = self.position
        before = Position.from_json(found.facts["position"])
        decided = {
            "skipped": position.skipped,
            "batch_size": position.batch_size,
            "accumulate": position.accumulate,
            "steps": position.steps,
            "steps_per_program": position.steps_per_program,
            "xla": position.xla,
            "xla_why": position.xla_why,
        }
        # Keep T_ceil: it belongs to the compiled step, not to the position.
        now = position.timing
        timing = replace(before.timing, ceiling_s=now.ceiling_s, ceiling_steps=now.ceiling_steps)
        for name, value in (before.to_json() | decided | {"timing": timing}).items():
            setattr(position, name, value)
        with self._time("checkpoints"):
            self._checkpoints.restore(found, decided=False)
        self.context.run_time.went_back(position.step)
        self._in_epoch = position.in_epoch > 0 or not position.validated

    def _count(self, totals: StepTotals, done: int, wall_s: float, *, is_new: bool) -> None:
        position, context = self.position, self.context
        loss_sum, rows = float(totals.loss_sum), float(totals.rows)
        wait_s = position.timing.wait_of_call(float(totals.wait_s), wall_s=wall_s)
        position.step += done
        context.run_time.stepped(done, wall_s, step=position.step, wait_s=wait_s, first=is_new)
        position.loss_sum += loss_sum
        position.rows += rows
        self._calls_timed += 1
        # The first call of a process includes tracing, so its time counts only if it is the run's only call.
        if self._calls_timed == 2 and self._first_counts:
            position.timing = Timing()
        if self._calls_timed == 1:
            self._first_counts = position.timing.steps == 0
        follows_window = self._ceiling.follows_window()
        if (self._calls_timed > 1 or self._first_counts) and not (
            follows_window and position.timing.steps
        ):
            position.timing.add(steps=done, rows=rows, wall_s=wall_s, wait_s=wait_s)
        if self._calls_timed > 1:
            self._checkpoints.trained(done, wall_s)
        context.heartbeat.beat(position.step)
        self._run_health.update(position.step, loss_sum / rows)
        scalars = {
            "loss": loss_sum / rows,
            catalogue.STEP_TIME_S.tensorboard: wall_s / done,
            catalogue.SAMPLES_PER_S.tensorboard: rows / wall_s,
            catalogue.INPUT_WAIT.tensorboard: min(1.0, wait_s / wall_s),
            **self._watch.scalars(rows / wall_s),
        }
        if (ceiling_s := self._ceiling.step_s) is not None:
            busy_fraction = (ceiling_s / self.compiled.source.rows_per_step) / (wall_s / rows)
            scalars[catalogue.BUSY_FRACTION.tensorboard] = busy_fraction
        if (scale := self._run_health.loss_scale) is not None:
            scalars[catalogue.LOSS_SCALE.tensorboard] = scale
        with self._time("tensorboard"):
            context.writer.write(position.step, scalars)
        # Report the loss of the epoch, and no speed, because the call is shorter than usual.
        whole = done == self.compiled.resolved.steps_per_call or self._calls_timed == 1
        self._report_progress(
            (scalars if whole else {}) | {"loss": position.loss_sum / position.rows}
        )

    def end_epoch(self, eval_batches: EvalBatches) -> None:
        """Validate, call the callbacks, and keep the state if it is the best one so far."""
        position = self.position
        # A callback may have stopped the epoch before its last step.
        epoch = -(-position.step // position.per_epoch)
        if self._in_epoch and position.rows:
            position.metrics = self._logs()
            # With 0 rows, a run that repeats an aborted validation keeps these metrics: the validation has
            # overwritten the variables of the metrics.
            position.rows = 0.0
        position.metrics = metrics = position.metrics | self._validated(eval_batches)
        self._run_health.check_traces(self.compiled.program.multi_step)
        better = is_better(metrics, position, epoch=epoch, config=self.config)
        with self._time("callbacks"):
            metrics = self._callbacks.on_epoch_end(epoch - 1, metrics)
        position.validated, self._in_epoch = True, False
        stopped = position.over or self._callbacks.stop_training
        if stopped and position.step < position.steps and self.distribution.is_chief:
            _LOG.warning("a callback ends training after epoch %s", epoch)
        position.over = stopped or position.step >= position.steps
        if better:
            position.best_epoch, position.best_metrics = epoch, finite_of(metrics)
            self._keep_best(metrics)
        goodput = self.context.run_time.goodput
        times = {} if goodput is None else {catalogue.GOODPUT.tensorboard: goodput}
        with self._time("tensorboard"):
            times[catalogue.EPOCH.tensorboard] = float(epoch)
            self.context.writer.write(position.step, metrics | times)
        self._report_progress(metrics)
        if self._ends_alone() and not position.over:
            self._end_early()
        if self._saves_after_epoch:
            self._saves_after_epoch = False
            if not position.over:
                self._save()

    def _keep_best(self, metrics: Mapping[str, float]) -> None:
        with self._time("checkpoints"):
            self._checkpoints.keep_best(metrics[self.config.monitor])

    def _validated(self, eval_batches: EvalBatches) -> dict[str, float]:
        self.context.heartbeat.enter("validate")
        try:
            with (
                self._time("validation"),
                self._average.in_place() if self._average else nullcontext(),
                unwrap_user_errors(),
            ):
                validated = self._validate(eval_batches, self._callbacks)
        except ValidationAbortedError:
            self._end_early()
        self.context.heartbeat.enter("train")
        return validated

    def end(self, eval_batches: EvalBatches) -> None:
        """Call the callbacks' end hooks, and write the last checkpoint.

        If a callback such as EarlyStopping changes the weights at the end, the new weights are validated,
        too, and kept if they are better than those of the best epoch.
        """
        position = self.position
        self.xla_trial.give_up("not used, the training ended before XLA could be compared")
        if position.xla is None and (decision := self.xla_trial.decision) is not None:
            # A decision for XLA comes too late here, because no step has used XLA. A new run tries it again.
            position.xla, position.xla_why = False, decision.why
        changed = self._end_callbacks()
        if changed:
            metrics = position.metrics | self._validated(eval_batches)
            epoch = -(-position.step // position.per_epoch)
            if is_better(metrics, position, epoch=epoch, config=self.config):
                position.best_epoch, position.best_metrics = epoch, finite_of(metrics)
                self._keep_best(metrics)
        with self._time("validation"):
            self._compare_decoders()
        if changed or not self._was_over:
            self._save(now=True)

    def _end_callbacks(self) -> bool:
        """Call the callbacks' end hooks; return whether one of them changed the weights."""
        with self._time("callbacks"):
            if not self.context.callbacks:
                self._callbacks.on_train_end(self.position.metrics)
                return False
            before = self._state.capture()
            self._callbacks.on_train_end(self.position.metrics)
            after = self._state.capture()
        names = [name for name in before if name.startswith("model/")]
        return not all(np.array_equal(before[name], after[name]) for name in names)

    def _compare_decoders(self) -> None:
        """Validate the best weights with serving's image decoder, if validation used a faster one.

        With several workers this is skipped, because each of them would have to read every row.
        """
        held_out = self._eval_feed
        has_quicker = isinstance(held_out, Feed) and held_out.by_reference() is not None
        if self.distribution.workers > 1 or not has_quicker or not self.built.outputs_of_classes:
            return
        self.context.heartbeat.enter("validate")
        last, position = self._state.capture(), self.position
        with self.distribution.strategy.scope():
            self._state.restore(self._checkpoints.best_arrays())
        with self._average.in_place() if self._average else nullcontext():
            position.best_metrics, self.agreement = agreed_metrics(
                self.built,
                held_out,
                position.best_metrics,
                batch_size=EVAL_BATCHES * self.compiled.resolved.batch_size,
                validate=self._validate_feed,
            )
        with self.distribution.strategy.scope():
            self._state.restore(last)
        self.context.heartbeat.enter("train")

    def _validate_feed(self, feed: AnyFeed) -> dict[str, float]:
        """Validate with another feed of the eval split, without the user's callbacks; return the metrics."""
        weights = validation_class_weights(self.built.model, self.config)
        load = adapt_load(feed.load, self.built.model, class_weight=weights)
        validate = make_validate(self.built, load, distribution=self.distribution)
        with feed.in_order(batch_size=EVAL_BATCHES * self.compiled.resolved.batch_size) as batches:
            return validate(batches, Callbacks(self.built.model, [], steps=1, epochs=1))

    def close(self) -> None:
        """Close callbacks and watchers if the run ends early."""
        self._watch.close(self.position.step)
        self._callbacks.close()

    def _ends_alone(self) -> bool:
        """Return whether to stop now; with several workers, a worker stops only inside a step."""
        return self.context.preemption.requested and self.distribution.workers == 1

    def _end_early(self) -> NoReturn:
        self._save(now=True)
        raise self.context.preemption.end_error(step=self.position.step, steps=self.position.steps)

    def _loaded_sample(self) -> Any:
        most = self.position.batch_size
        return self.compiled.source.load(
            tf.nest.map_structure(lambda tensor: tensor[:most], self.compiled.source.sample)
        )

    def input_specs(self) -> Any:
        """Return the model's inputs as nested `tf.TensorSpec`s; None if an input is not a dense tensor."""
        specs = tf.nest.map_structure(
            tf.type_spec_from_value, self.built.adapt(self._loaded_sample()[0])
        )
        dense = all(isinstance(each, tf.TensorSpec) for each in tf.nest.flatten(specs))
        return specs if dense else None

    def _loss_of_sample(self) -> tf.Tensor:
        """Return the loss of a pass over the run's first batch, as in a step."""
        model, batch = self.built.model, self._loaded_sample()
        with unscaled_losses():
            outputs = model(self.built.adapt(batch[0]), training=True)
            return compute_loss(model, loss_arguments(batch, outputs), training=True)

    def _logs(self) -> dict[str, float]:
        loss = self.position.loss_sum / self.position.rows
        return {"loss": loss} | results(self.built.model)

    def _report_progress(self, scalars: Mapping[str, float]) -> None:
        position = self.position
        self.context.on_progress(
            Progress(
                step=position.step,
                steps=position.steps,
                epoch=position.step // position.per_epoch,
                scalars=scalars,
            )
        )

    def xla(self) -> dict[str, Any]:
        """Whether XLA compiles the step and why, as JSON values."""
        resolved, cache = self.compiled.resolved, used()
        return {
            "used": resolved.xla,
            "why": (resolved.xla_trial and self.position.xla_why) or resolved.why.get("xla", ""),
            "cache": None if cache is None else asdict(cache),
        }

    @property
    def resolved(self) -> ResolvedTraining:
        """The value of each `auto` in the current step."""
        resolved, why = self.compiled.resolved, self.xla()["why"]
        return replace(resolved, why={**resolved.why, "xla": why}) if why else resolved

    def health(self) -> dict[str, Any]:
        """Return findings and actions as JSON values."""
        return self._run_health.record()
