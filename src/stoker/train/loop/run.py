"""A training run that is under way, and the parts of its order."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from stoker.cluster.compile_flags import give_way, used
from stoker.core.errors import Plain, UserError
from stoker.core.user_code import call
from stoker.data.feed.pipeline import Feed
from stoker.data.user_dataset.feed import AnyFeed
from stoker.telemetry import catalogue
from stoker.train.callbacks.callbacks import Callbacks
from stoker.train.checkpoints.state import TrainingState
from stoker.train.checkpoints.store import VerifiedCheckpoint
from stoker.train.checkpoints.writer import CheckpointWriter
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.context import utilization
from stoker.train.context.monitor import (
    finite_of,
    is_better,
    require_monitored,
    validation_class_weights,
)
from stoker.train.context.position import Position, Timing
from stoker.train.context.run_context import Progress, RunContext
from stoker.train.context.start_position import TrainFeed
from stoker.train.context.utilization import Ceiling
from stoker.train.loop.ceiling import RunCeiling
from stoker.train.loop.decoder_agreement import agreed_metrics
from stoker.train.loop.run_health import RunHealth
from stoker.train.loop.saving import RunCheckpoints
from stoker.train.loop.validation import EvalBatches, ValidationAbortedError, make_validate, results
from stoker.train.model.keras_model import (
    adapt_load,
    extra_optimizers,
    loss_of,
    unwrap_user_errors,
)
from stoker.train.optimizer.deferred_finite_check import CHECK_EVERY_STEPS, may_defer_finite_check
from stoker.train.optimizer.settings import prepare_optimizer
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.strategy import Distribution
from stoker.train.step.compiled import Compiled, Resident
from stoker.train.step.custom_train_step import (
    check_custom_train_step,
    first_pass,
    has_custom_train_step,
)
from stoker.train.step.multi_step import step_of
from stoker.train.step.oom import Split, is_out_of_memory
from stoker.train.step.step import loss_arguments, unscaled_losses
from stoker.train.step.step_input import StepInput
from stoker.train.step.step_totals import StepTotals
from stoker.train.step.xla_trial import CallPlan, XlaTrial

_LOG = logging.getLogger(__name__)

EVAL_BATCHES = 4
"""A validation batch in training batches: no gradients are kept, so it may be larger."""

AVERAGE = "ema"
"""Group of a checkpoint's variables that holds the moving average of the weights."""


class Run:
    """A training run that is under way: its compiled step, its variables, and where it stands."""

    def __init__(
        self,
        built: BuiltModel,
        feeds: tuple[TrainFeed, AnyFeed],
        position: Position,
        *,
        config: TrainConfig,
        resolved: ResolvedTraining,
        distribution: Distribution,
        context: RunContext,
        writer: CheckpointWriter | None,
    ) -> None:
        self.built, self.position = built, position
        self.config = config
        self.distribution, self.context = distribution, context
        self._feed, self._held_out = feeds
        self._watch = context.watch
        if resolved.xla_trial and position.xla is not None:
            # The run's decision applies to everything after its checkpoint.
            resolved = replace(resolved, xla=position.xla)
        self._time = context.run_time.wall.within
        self._ceiling = RunCeiling(
            position, lambda share: self.fitting(lambda: self.measure_ceiling(share))
        )
        with self._time("data"):
            self.compiled = compiled = Compiled(
                built,
                self._feed,
                position,
                config=config,
                resolved=resolved,
                distribution=distribution,
                signals=context.preemption.signals,
            )
        if has_custom_train_step(built.model):
            check_custom_train_step(built.model, config, resolved)
        with distribution.strategy.scope():
            answers = call(
                first_pass,
                built,
                compiled.load(compiled.sample),
                what="a first batch through the model and its loss",
            )
            self._average = prepare_optimizer(built.model, config, resolved)
            if not has_custom_train_step(built.model):
                # Known before an epoch has been trained.
                names = results(built.model, "val_")
                require_monitored(config.monitor, ["val_loss", *names])
        compiled.average = self._average
        compiled.defers_finite_check = may_defer_finite_check(built.model, config, resolved)
        self._unchecked_steps = 0
        self._run_health = RunHealth(
            built, config=config, resolved=resolved, distribution=distribution
        )
        self._run_health.check_model(answers)
        compiled.compile()
        self.xla_trial = XlaTrial(
            compiled,
            position,
            wanted=resolved.xla_trial and position.xla is None and writer is not None,
        )
        self._validate = make_validate(
            built,
            adapt_load(
                self._held_out.load,
                built.model,
                class_weight=validation_class_weights(built.model, config),
            ),
            distribution=distribution,
            should_abort=lambda: self._ends_alone() and not position.over,
        )
        self._callbacks = Callbacks(
            built.model,
            context.callbacks,
            steps=position.per_epoch,
            epochs=config.epochs,
            is_chief=distribution.is_chief,
        )
        extras = {} if self._average is None else {AVERAGE: self._average.variables}
        for name, optimizer in extra_optimizers(built.model).items():
            extras[f"optimizer.{name}"] = optimizer.variables
        self._state = TrainingState(built.model, extras=extras)
        self._checkpoints = RunCheckpoints(
            self._state,
            self._callbacks,
            self._run_health,
            position,
            distribution=distribution,
            context=context,
            writer=writer,
        )
        self._in_epoch = position.in_epoch > 0 or not position.validated
        self._was_over = position.over
        self._calls_timed, self._first_counts = 0, False
        self._saves_after_epoch = False
        self.agreement: dict[str, Any] | None = None
        self.measures_ceiling = True
        """Whether the ceiling is measured between calls; not if others measure the run."""

    def begin(self, found: VerifiedCheckpoint | None) -> None:
        """Put everything back to where the run was left, or write down where it begins."""
        self.context.heartbeat.enter("train")
        if found is not None:
            with self._time("checkpoints"):
                self._checkpoints.restore(found)
            if self.distribution.is_chief:
                step, steps = self.position.step, self.position.steps
                _LOG.warning("going on from step %s of %s: %s", step, steps, found.path.name)
        else:
            # What a process wrote that was killed before its first checkpoint.
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
            # A rollback can go back to it, and it shows early whether the disk accepts checkpoints.
            # The first steps do not wait for it.
            self._save()
        with self._time("compile" if self.compiled.program.xla else "measuring"):
            while self.fitting(self._decided) is None:
                continue

    def _decided(self) -> bool:
        self.compiled.decide_steps_per_program(self._state, report=self.context.on_wait)
        return True

    def measure_ceiling(self, share: float = 1.0) -> Ceiling:
        """Time steps on a resident batch, for a share of the usual time, and restore the model."""
        return self.compiled.measure_ceiling(self._state, seconds=share * utilization.CEILING_S)

    def ceiling_step_s(self) -> float:
        """T_ceil, the mean of all windows; missing windows are measured now."""
        with self._time("measuring"):
            self._ceiling.complete(trained=self._calls_timed > 0)
        assert self._ceiling.step_s is not None
        return self._ceiling.step_s

    def _window(self) -> bool:
        """Measure the ceiling if it is due; return whether the step had to be recompiled for it."""
        if not self.measures_ceiling:
            return False
        if not self._ceiling.due(self.compiled.resolved.steps_per_call):
            return False
        with self._time("measuring"):
            return not self._ceiling.take()

    def _compile(self) -> None:
        """Compile what the settings and the position require; the ceiling is measured again."""
        self.xla_trial.drop("not used, the step became a smaller one")
        self.compiled.compile()
        self._watch.step_changed(stays=True)
        self._ceiling.restart()

    def _save(self, *, now: bool = False) -> None:
        with self._time("checkpoints"):
            self._checkpoints.save(now=now)

    def resident(self) -> Resident:
        """As `Compiled.resident`."""
        return self.compiled.resident(self._state)

    def skip_validation(self) -> None:
        """Go on with the next epoch without validating this one."""
        self.position.validated, self._in_epoch = True, False

    def begin_epoch(self) -> None:
        """Reset what is counted by epoch, where one begins."""
        if self._in_epoch:
            return
        self._in_epoch = True
        self.position.loss_sum = self.position.rows = 0.0
        self.built.model.reset_metrics()
        with self._time("callbacks"):
            self._callbacks.on_epoch_begin(self.position.epoch)

    def ends_epoch(self) -> bool:
        """Whether the next call is the last one of its epoch."""
        position = self.position
        planned = position.next_steps(self.compiled.resolved.steps_per_call)
        return position.in_epoch + planned >= position.per_epoch

    def one_call(self, step_input: StepInput) -> bool:
        """Some steps, what is told of them, and a checkpoint where one is due.

        Returns:
            Whether the data has to be read from elsewhere: the run went back, or took a part only of
            the rows of a call.
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
                    lambda: plan.run(
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
        # Before anybody can see that there is some.
        preemption.has_work = True
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
            # As in `fit` the epoch ends here, and is validated.
            position.validated, position.over = False, True
        elif signals[0]:
            self._end_early()
        if signals[1] and position.validated:
            self._save()
        elif signals[1]:
            # The call ends an epoch: the checkpoint is written after the validation.
            self._saves_after_epoch = True
        return self._window() or (steps < planned and self._feed.whole_calls)

    def _plan_call(self, step_input: StepInput, planned: int) -> CallPlan:
        steps = self._watch.next_steps(self.position.step, planned)
        plan = self.xla_trial.plan_call(step_input, steps, whole=self._feed.whole_calls)
        if plan.program is not None:
            self._watch.step_changed(stays=False)
        return plan

    def _apply_xla_decision(self) -> None:
        """Record the decision of the XLA trial; if XLA will be used, write a checkpoint first."""
        decision, position = self.xla_trial.decision, self.position
        if decision is None or position.xla is not None:
            return
        position.xla, position.xla_why = decision.xla, decision.why
        if decision.xla:
            # The step changes with this checkpoint: its time and its ceiling are measured again.
            position.timing = Timing()
            self._ceiling.restart()
            self._save()
            self.xla_trial.adopt()
            self._watch.step_changed(stays=True)
            self._run_health.update_settings(self.compiled.resolved)

    def _checks_after(self, steps: int) -> bool:
        """Whether the variables are looked at when a call of so many steps has ended.

        Of several workers all look alike.
        """
        position = self.position
        self._unchecked_steps += steps
        looks = (
            self._unchecked_steps >= CHECK_EVERY_STEPS
            or position.in_epoch + steps >= position.per_epoch
            or self.distribution.workers > 1
            # Who may end the epoch, or is shown what there is, after any call.
            or self._callbacks.has_batch_hooks
            or bool(position.skipped)
        )
        if looks:
            self._unchecked_steps = 0
        return looks

    def fitting(self, work: Callable[[], Any]) -> Any:
        """Do what runs the compiled step; where it does not fit in memory, compile a smaller one.

        Returns:
            What it returned; None where the step is a smaller one now, and variables may be at any
            step of the call.
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
                    self.xla_trial.give_up("not used, memory ran out while it was tried", wait=True)
                return None
            split = Split(batch_size=position.batch_size, accumulate=position.accumulate)
            split = self._run_health.out_of_memory(error, split)
        position.batch_size, position.accumulate = split.batch_size, split.accumulate
        self._compile()
        return None

    def _handle_bad_call(self, step: int, *, loss: float) -> None:
        """A step, counted from 0, was not finite; of steps that update at once, it or one before."""
        if not self.compiled.defers_finite_check:
            self._handle_bad_step(step, loss=loss)
            return
        self.xla_trial.give_up("not used, a step was not finite while it was tried")
        self.compiled.defers_finite_check = False
        self._compile()
        self._go_back()
        _LOG.warning(
            "a loss or a weight is not finite by step %s: on from step %s, looking at each step",
            step + 1,
            self.position.step,
        )

    def _handle_bad_step(self, step: int, *, loss: float) -> None:
        """A step, counted from 0, was not finite: say why and end, or go back and skip it."""
        position, batch = self.position, self.compiled.resolved.global_batch
        at = replace(position, step=step)
        with self._feed.shuffled(self.compiled.calls(at)) as batches:
            element = next(iter(batches))
        if self._feed.whole_calls:
            element = step_of(element, 0, batch)
        rows = range(at.in_epoch * batch, min((at.in_epoch + 1) * batch, self._feed.rows))
        first = at.epoch * self._feed.rows
        self._run_health.bad_step(
            self.compiled.load(element),
            step=step + 1,
            positions=range(first + rows.start, first + rows.stop),
            rows=self._feed.rows_at(at.epoch, rows.start, rows.stop, seed=self.config.seed),
            loss=loss,
        )
        position.skipped.append(step)
        self._go_back()

    def _go_back(self, must: str = "give finite numbers") -> None:
        """Be again where the last checkpoint is, but for what has been decided since.

        Args:
            must: What the steps that are gone back did not.
        """
        found = self._checkpoints.newest()
        if found is None:
            # Of one that is only measured nothing is saved.
            raise UserError(
                f"steps that are measured must {must}",
                got=Plain(f"one of those after step {self.position.step} does not"),
                fix="`stoker train` finds the step and the layer.",
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
        # The ceiling is the step's, wherever the run is: `restart` forgets it with the step.
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
        # A process's first call holds tracing and the input's start; it counts where it is alone.
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
            catalogue.STEP_TIME_S.name: wall_s / done,
            catalogue.SAMPLES_PER_S.name: rows / wall_s,
            catalogue.INPUT_WAIT.name: min(1.0, wait_s / wall_s),
            **self._watch.scalars(rows / wall_s),
        }
        if (ceiling_s := self._ceiling.step_s) is not None:
            busy_fraction = (ceiling_s / self.compiled.rows_per_step) / (wall_s / rows)
            scalars[catalogue.BUSY_FRACTION.name] = busy_fraction
        with self._time("tensorboard"):
            context.writer.write(position.step, scalars)
        # What a person sees: the epoch's loss, and no speed of a call that is only an epoch's rest.
        whole = done == self.compiled.resolved.steps_per_call or self._calls_timed == 1
        self._report_progress(
            (scalars if whole else {}) | {"loss": position.loss_sum / position.rows}
        )

    def end_epoch(self, eval_batches: EvalBatches) -> None:
        """Validate, tell the callbacks, and keep the state where it is the best."""
        position = self.position
        # A callback may have stopped it before its last step.
        epoch = -(-position.step // position.per_epoch)
        if self._in_epoch and position.rows:
            position.metrics = self._logs()
            # A validation that is given up is begun anew, and has used the metrics' variables.
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
        times = {} if goodput is None else {catalogue.GOODPUT.name: goodput}
        with self._time("tensorboard"):
            times[catalogue.EPOCH.name] = float(epoch)
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
        """The last word to the callbacks, and the last checkpoint.

        Weights that a callback has changed at the end, such as EarlyStopping's or an average of its
        own, are validated too, and are what is kept where they are better than the best epoch's.
        """
        position = self.position
        self.xla_trial.give_up("not used, the training ended before XLA could be compared")
        if position.xla is None and (decision := self.xla_trial.decision) is not None:
            # Not used by any step: what it would have been is for the next run to find out.
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
        """Tell the callbacks of the end; return whether one of them has changed the weights."""
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
        """Where validation went by a quicker decoder than serving does: do the best weights agree?

        Not with several workers, of which each would have to look at every row.
        """
        held_out = self._held_out
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
        """The metrics of another feed of the eval split; the user's callbacks have had their end."""
        weights = validation_class_weights(self.built.model, self.config)
        load = adapt_load(feed.load, self.built.model, class_weight=weights)
        validate = make_validate(self.built, load, distribution=self.distribution)
        with feed.in_order(batch_size=EVAL_BATCHES * self.compiled.resolved.batch_size) as batches:
            return validate(batches, Callbacks(self.built.model, [], steps=1, epochs=1))

    def close(self) -> None:
        """Close what callbacks and watchers hold open, where the run ends before its end."""
        self._watch.close(self.position.step)
        self._callbacks.close()

    def _ends_alone(self) -> bool:
        """Whether this process may end here; of several workers none does outside of a step."""
        return self.context.preemption.requested and self.distribution.workers == 1

    def _end_early(self) -> NoReturn:
        self._save(now=True)
        raise self.context.preemption.end_error(step=self.position.step, steps=self.position.steps)

    def _loaded_sample(self) -> Any:
        most = self.position.batch_size
        return self.compiled.load(
            tf.nest.map_structure(lambda tensor: tensor[:most], self.compiled.sample)
        )

    def input_specs(self) -> Any:
        """What the model is called with in a step, nested `tf.TensorSpec`s; None if not all are dense."""
        specs = tf.nest.map_structure(
            tf.type_spec_from_value, self.built.adapt(self._loaded_sample()[0])
        )
        dense = all(isinstance(each, tf.TensorSpec) for each in tf.nest.flatten(specs))
        return specs if dense else None

    def _loss_of_sample(self) -> tf.Tensor:
        """The loss of one pass over the resident batch, as in a step."""
        model, batch = self.built.model, self._loaded_sample()
        with unscaled_losses():
            outputs = model(self.built.adapt(batch[0]), training=True)
            return loss_of(model, loss_arguments(batch, outputs), training=True)

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
        """What every `auto` is in the step that is used now."""
        resolved, why = self.compiled.resolved, self.xla()["why"]
        return replace(resolved, why={**resolved.why, "xla": why}) if why else resolved

    def health(self) -> dict[str, Any]:
        """What was found and done, as JSON values."""
        return self._run_health.record()
