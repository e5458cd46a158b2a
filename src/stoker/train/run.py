"""A training run that is under way, and the parts of its order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.errors import Plain, UserError
from stoker.core.user_code import call
from stoker.data.feed.calls import Calls
from stoker.data.feed.pipeline import Feed
from stoker.data.feed.service.reading import ServiceFeed
from stoker.data.own.features import AnyTransform
from stoker.data.own.feed import AnyFeed, OwnFeed
from stoker.data.own.opening import AnyDataset
from stoker.telemetry import catalogue
from stoker.train.agreement import agreed_metrics
from stoker.train.at_once import LOOK_EVERY, are_sound, may_update_at_once
from stoker.train.busy import FIXED_STEPS, measure_ceiling
from stoker.train.callbacks import Callbacks
from stoker.train.checkpoints.identity import require_same
from stoker.train.checkpoints.store import Found, best, newest_good
from stoker.train.checkpoints.writer import CheckpointWriter
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.fed import make_run_fed, make_run_resident, step_of
from stoker.train.feeds import open_feeds
from stoker.train.goal import better_mode, finite_of, is_better, require_monitored
from stoker.train.guard import Guard
from stoker.train.keras_model import (
    as_the_model_takes,
    loss_of,
    of_the_user,
    own_optimizers,
)
from stoker.train.model import BuiltModel
from stoker.train.one_program import TOGETHER_S, OneProgram, steps_together
from stoker.train.oom import Split
from stoker.train.optimizer import prepare_optimizer
from stoker.train.outcome import Sums
from stoker.train.own_step import check_own_step, first_pass, has_own_step, make_step
from stoker.train.position import Position, Timing
from stoker.train.seeds import host_seeds, restore_host_seeds
from stoker.train.state import TrainingState
from stoker.train.step import StepSettings, losses_are_means, told
from stoker.train.strategy import Distribution
from stoker.train.surroundings import Progress, Surroundings
from stoker.train.validation import GivenUpError, make_validate, results
from stoker.train.whole_batches import WholeFeed, handed, whole_steps

_LOG = logging.getLogger(__name__)

TrainFeed = AnyFeed | ServiceFeed | WholeFeed
"""What training reads."""

EVAL_BATCHES = 4
"""A validation batch in training batches: no gradients are kept, so it may be larger."""

AVERAGE = "ema"
"""Group of a checkpoint's variables that holds the moving average of the weights."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The data of a run, and where an earlier process left off."""

    feed: TrainFeed
    """The training split."""

    held_out: AnyFeed
    """The eval split."""

    found: Found | None
    """The newest good checkpoint, None for a new run."""

    position: Position
    """Where the run goes on, or begins."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resident:
    """The compiled step on a batch in memory."""

    take: Callable[[int], None]
    """Takes so many steps, and returns when they have ended."""

    state: TrainingState
    """Every variable that they change."""


def open_run(
    dataset: AnyDataset,
    transform: AnyTransform,
    *,
    config: TrainConfig,
    resolved: ResolvedTraining,
    around: Surroundings,
) -> Opened:
    """Open the data, and find where to go on.

    Raises:
        UserError: the data cannot be fed, no checkpoint of several is good, or they are another
            run's.
    """
    local, held_out = open_feeds(
        dataset,
        transform,
        augment=config.augment,
        seed=config.seed,
        memory_bytes=around.memory_bytes,
        service=around.service,
        work_dir=around.work_dir,
        config=config.feed,
    )
    feed = whole_steps(local, resolved) if resolved.strategy == "tpu" else local
    found = newest_good(around.checkpoints)
    position = _start_position(found, feed, config=config, resolved=resolved, around=around)
    return Opened(feed=feed, held_out=held_out, found=found, position=position)


def checkpoint_writer(
    found: Found | None, *, config: TrainConfig, around: Surroundings
) -> CheckpointWriter:
    """Whoever writes the checkpoints of a run; one process may."""
    return CheckpointWriter(
        around.checkpoints,
        config=config.checkpoint,
        identity=around.identity,
        better=better_mode(config.monitor, config.monitor_mode),
        after=found,
    )


def _start_position(
    found: Found | None,
    feed: TrainFeed,
    *,
    config: TrainConfig,
    resolved: ResolvedTraining,
    around: Surroundings,
) -> Position:
    per_epoch = feed.steps(resolved.global_batch)
    if found is None:
        return Position(
            per_epoch=per_epoch,
            steps=per_epoch * config.epochs,
            batch_size=resolved.batch_size,
            accumulate=resolved.accumulate,
        )
    require_same(found.identity, around.identity, accept_change=around.accept_change)
    position = Position.from_json(found.facts["position"])
    if position.per_epoch != per_epoch:
        raise UserError(
            "a run goes on with epochs of as many steps as it began with",
            got=Plain(f"{per_epoch} steps an epoch; they were {position.per_epoch}"),
            fix="Put the data and the batch size back, or train in a new run.",
        )
    if position.steps != per_epoch * config.epochs:
        # More epochs, or fewer: else a run that a callback had stopped stays so.
        position.steps = per_epoch * config.epochs
        position.over = position.step >= position.steps
    return position


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
        around: Surroundings,
        writer: CheckpointWriter | None,
    ) -> None:
        self.built, self.position = built, position
        self.config, self.resolved = config, resolved
        self.distribution, self.around = distribution, around
        self._feed, self._held_out = feeds
        self._writer, self._watch = writer, around.watch
        self._load = as_the_model_takes(
            self._feed.load, built.model, class_weight=config.class_weight
        )
        self._rows_a_step = resolved.global_batch if self._feed.whole_calls else None
        self._sample = self._first_element()
        first = self._load(self._sample)
        self._rows = float(tf.shape(tf.nest.flatten(first)[0])[0])
        self._most_together = self._steps_together(first)
        if has_own_step(built.model):
            check_own_step(built.model, config, resolved)
        with distribution.strategy.scope():
            answers = call(
                first_pass, built, first, what="a first batch through the model and its loss"
            )
            self._average = prepare_optimizer(built.model, config, resolved)
            if not has_own_step(built.model):
                # Known before an epoch has been trained.
                names = results(built.model, "val_")
                require_monitored(config.monitor, ["val_loss", *names])
        self._traced: Any = None
        self._at_once = may_update_at_once(built.model, config, resolved)
        self._unlooked = 0
        self._guard = Guard(built, config=config, resolved=resolved, distribution=distribution)
        self._guard.look_at_model(answers)
        self._compile()
        self._validate = make_validate(
            built,
            as_the_model_takes(self._held_out.load, built.model),
            distribution=distribution,
            gives_up=lambda: self._ends_alone() and not position.over,
        )
        self._callbacks = Callbacks(
            built.model,
            around.callbacks,
            steps=position.per_epoch,
            epochs=config.epochs,
            is_chief=distribution.is_chief,
        )
        extras = {} if self._average is None else {AVERAGE: self._average.variables}
        for name, optimizer in own_optimizers(built.model).items():
            extras[f"optimizer.{name}"] = optimizer.variables
        self._state = TrainingState(built.model, extras=extras)
        self._best: tuple[dict[str, NDArray[Any]], dict[str, Any], int, float] | None = None
        self._in_epoch = position.in_epoch > 0 or not position.validated
        self._was_over = position.over
        self._calls_timed, self._first_counts = 0, False
        self.agreement: dict[str, Any] | None = None
        self._ceiling_s = 0.0

    def begin(self, found: Found | None) -> None:
        """Put everything back to where the run was left, or write down where it begins."""
        self.around.heartbeat.enter("train")
        if found is not None:
            self._restore(found)
            if self.distribution.is_chief:
                step, steps = self.position.step, self.position.steps
                _LOG.warning("going on from step %s of %s: %s", step, steps, found.path.name)
        else:
            # What a process wrote that was killed before its first checkpoint.
            self.around.writer.rewind(0)
        self._watch.begin(
            self.built.model,
            self.position.step,
            per_epoch=self.position.per_epoch,
            loss_of=self._loss_of_sample,
        )
        self._callbacks.on_train_begin()
        if found is None:
            # What a rollback goes back to, and the first to know that the disk takes them.
            self._save(now=True)

    def ceiling_s(self) -> float:
        """Seconds a step on a resident batch; a new run learns by it how many are one program."""
        self._ceiling_s = self._measured_ceiling_s()
        if self.position.together == 0:
            groups = isinstance(self._step, OneProgram) and self._step.groups
            most = self._most_together if groups else 1
            self.position.together = most if most * self._ceiling_s <= TOGETHER_S else 1
            if self.position.together > 1:
                self._compile()
                self._ceiling_s = self._measured_ceiling_s()
        return self._ceiling_s

    def _measured_ceiling_s(self) -> float:
        sample = handed(self._sample, self.distribution)
        run_resident = make_run_resident(self._step, sample)
        together = FIXED_STEPS if self.distribution.workers > 1 else None
        with self.distribution.strategy.scope():
            return measure_ceiling(run_resident, sample, state=self._state, steps=together)

    @property
    def last_ceiling_s(self) -> float:
        """What `ceiling_s` last said."""
        return self._ceiling_s

    @property
    def sample(self) -> Any:
        """The element of one step that is kept in memory."""
        return self._sample

    def resident(self) -> Resident:
        """The compiled step on one batch in memory, to be timed by others."""
        sample = handed(self._sample, self.distribution)
        run_resident = make_run_resident(self._step, sample)
        scope = self.distribution.strategy.scope

        def take(steps: int) -> None:
            with scope():
                run_resident(sample, tf.constant(steps, tf.int64)).numpy()

        take(1)
        return Resident(take=take, state=self._state)

    def call_at_most(self, seconds: float) -> None:
        """Make calls shorter that would take longer than that."""
        most = max(1, int(seconds / max(self._ceiling_s, 1e-9)))
        if most < self.resolved.steps_per_call:
            self.resolved = replace(self.resolved, steps_per_call=most)
            self._compile()

    def pass_over_epoch(self) -> None:
        """Go on with the next epoch without validating this one."""
        self.position.validated, self._in_epoch = True, False

    def calls(self, position: Position | None = None) -> Calls:
        """The calls from where the run stands, or from another position, to its end."""
        position = position or self.position
        feed, per_call = self._feed, self.resolved.steps_per_call
        whole = position.per_epoch * self.resolved.global_batch
        per_epoch = -(-position.per_epoch // per_call)
        return Calls(
            # A step of a user's own dataset is one of its batches, whatever its size.
            rows=whole if isinstance(feed, OwnFeed | WholeFeed) else feed.rows,
            batch_size=self.resolved.global_batch,
            steps_per_call=per_call,
            seed=self.config.seed,
            first=position.epoch * per_epoch + position.in_epoch // per_call,
            last=per_epoch * self.config.epochs,
            skipped_steps=position.in_epoch % per_call,
            worker=self.distribution.worker,
            workers=self.distribution.workers,
        )

    def begin_epoch(self) -> None:
        """Reset what is counted by epoch, where one begins."""
        if self._in_epoch:
            return
        self._in_epoch = True
        self.position.loss_sum = self.position.rows = 0.0
        self.built.model.reset_metrics()
        self._callbacks.on_epoch_begin(self.position.epoch)

    def one_call(self, iterator: Any) -> bool:
        """Some steps, what is told of them, and a checkpoint where one is due.

        Returns:
            Whether the data has to be read from elsewhere: the run went back, or took a part only of
            the rows of a call.
        """
        position, ending = self.position, self.around.ending
        planned = position.next_steps(self.resolved.steps_per_call)
        if planned == 0:
            return False
        steps = self._watch.next_steps(position.step, planned)
        self._callbacks.on_train_batch_begin(position.in_epoch)
        ending.save_after_call(self._writer is not None and self._writer.due(position.step))
        begun_s = time.monotonic()
        with self._guard.placements() as placements:
            look = tf.constant(self._looks_after(steps))
            asked = (iterator, tf.constant(steps, tf.int64), look)
            # What is traced is called by itself: TensorFlow's look for it costs a tenth of a millisecond.
            sums = self.fitting(lambda: (self._traced or self._run_fed)(*asked))
        if sums is None:
            self._go_back()
            return True
        done, signals = int(sums.steps), np.asarray(sums.signals)
        wall_s = time.monotonic() - begun_s
        if not bool(sums.finite):
            self._gone_wrong(position.step + done, loss=float(sums.last_loss))
            return True
        # Before anybody can see that there is some.
        ending.has_work = True
        self._count(sums, done, wall_s)
        if self._traced is None:
            self._traced = self._run_fed.get_concrete_function(*asked)
        if self._calls_timed == 1:
            self._guard.look_at_step(self._traced, placements)
            self._watch.graph(self._traced.graph)
        self._watch.after(position.step, steps=done)
        position.validated = position.step % position.per_epoch != 0
        if self._callbacks.reads_batch_logs:
            last = (position.step - 1) % position.per_epoch
            self._callbacks.on_train_batch_end(last, self._logs())
        if self._callbacks.stop_training:
            # As in `fit` the epoch ends here, and is validated.
            position.validated, position.over = False, True
        elif signals[0]:
            self._end_early()
        if signals[1] and position.validated:
            self._save()
        return steps < planned and self._rows_a_step is not None

    def _looks_after(self, steps: int) -> bool:
        """Whether the variables are looked at when a call of so many steps has ended.

        Of several workers all look alike.
        """
        position = self.position
        self._unlooked += steps
        looks = (
            self._unlooked >= LOOK_EVERY
            or position.in_epoch + steps >= position.per_epoch
            or self.distribution.workers > 1
            # Who may end the epoch, or is shown what there is, after any call.
            or self._callbacks.has_batch_hooks
            or bool(position.skipped)
        )
        if looks:
            self._unlooked = 0
        return looks

    def fitting(self, work: Callable[[], Any]) -> Any:
        """Do what runs the compiled step; where it does not fit in memory, compile a smaller one.

        Returns:
            What it returned; None where the step is a smaller one now, and variables may be at any
            step of the call.
        """
        position = self.position
        try:
            with of_the_user():
                return work()
        except (tf.errors.OpError, MemoryError) as error:
            split = Split(batch_size=position.batch_size, accumulate=position.accumulate)
            split = self._guard.out_of_memory(error, split)
        position.batch_size, position.accumulate = split.batch_size, split.accumulate
        self._compile()
        return None

    def _gone_wrong(self, step: int, *, loss: float) -> None:
        """A step, counted from 0, was not finite; of steps that update at once, it or one before."""
        if not self._at_once:
            self._look_into(step, loss=loss)
            return
        self._at_once = False
        self._compile()
        self._go_back()
        _LOG.warning(
            "a loss or a weight is not finite by step %s: on from step %s, looking at every "
            "gradient before its update",
            step + 1,
            self.position.step,
        )

    def _look_into(self, step: int, *, loss: float) -> None:
        """A step, counted from 0, was not finite: say why and end, or go back and skip it."""
        position, batch = self.position, self.resolved.global_batch
        at = replace(position, step=step)
        with self._feed.shuffled(self.calls(at)) as batches:
            element = next(iter(batches))
        if self._rows_a_step is not None:
            element = step_of(element, 0, self._rows_a_step)
        rows = range(at.in_epoch * batch, min((at.in_epoch + 1) * batch, self._feed.rows))
        first = at.epoch * self._feed.rows
        self._guard.bad_step(
            self._load(element),
            step=step + 1,
            positions=range(first + rows.start, first + rows.stop),
            rows=self._feed.rows_at(at.epoch, rows.start, rows.stop, seed=self.config.seed),
            loss=loss,
        )
        position.skipped.append(step)
        self._go_back()

    def _go_back(self) -> None:
        """Be again where the last checkpoint is, but for what has been decided since."""
        if self._writer is not None:
            self._writer.wait()
        if self.distribution.workers > 1:
            # All of them meet here: the chief's checkpoint is on the disk.
            self._state.capture()
        found = newest_good(self.around.checkpoints)
        if found is None:
            # Of one that is only measured nothing is saved.
            raise UserError(
                "steps that are measured must give finite numbers, and fit in memory",
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
            "together": position.together,
        }
        for name, value in (before.to_json() | decided | {"timing": before.timing}).items():
            setattr(position, name, value)
        self._restore(found, decided=False)
        self._best = None
        self._in_epoch = position.in_epoch > 0 or not position.validated

    def _restore(self, found: Found, *, decided: bool = True) -> None:
        arrays = found.arrays()
        with self.distribution.strategy.scope():
            self._state.restore(arrays)
        restore_host_seeds(found.facts["host_seeds"])
        self._callbacks.set_state(found.facts["callbacks"], arrays)
        self._guard.restore(found.facts["guard"], decided=decided)
        self.around.writer.rewind(self.position.step, validated=self.position.validated)

    def _count(self, sums: Sums, done: int, wall_s: float) -> None:
        position, around = self.position, self.around
        loss_sum, rows = float(sums.loss_sum), float(sums.rows)
        wait_s = position.timing.waited(float(sums.wait_s), wall_s=wall_s)
        position.step += done
        position.loss_sum += loss_sum
        position.rows += rows
        self._calls_timed += 1
        # A process's first call holds tracing and the input's start; it counts where it is alone.
        if self._calls_timed == 2 and self._first_counts:
            position.timing = Timing()
        if self._calls_timed == 1:
            self._first_counts = position.timing.steps == 0
        if self._calls_timed > 1 or self._first_counts:
            position.timing.add(steps=done, rows=rows, wall_s=wall_s, wait_s=wait_s)
        if self._calls_timed > 1 and self._writer is not None:
            self._writer.trained(done, wall_s)
        around.heartbeat.beat(position.step)
        self._guard.watch(position.step, loss_sum / rows)
        scalars = {
            "loss": loss_sum / rows,
            catalogue.STEP_TIME_S.name: wall_s / done,
            catalogue.SAMPLES_PER_S.name: rows / wall_s,
            catalogue.INPUT_WAIT.name: min(1.0, wait_s / wall_s),
            catalogue.BUSY_FRACTION.name: (self._ceiling_s / self._rows) / (wall_s / rows),
        }
        around.writer.write(position.step, scalars)
        # What a person sees: the epoch's loss, and no speed of a call that is only an epoch's rest.
        whole = done == self.resolved.steps_per_call or self._calls_timed == 1
        self._tell((scalars if whole else {}) | {"loss": position.loss_sum / position.rows})

    def end_epoch(self, eval_batches: tf.data.Dataset[Any]) -> None:
        """Validate, tell the callbacks, and keep the state where it is the best."""
        position = self.position
        # A callback may have stopped it before its last step.
        epoch = -(-position.step // position.per_epoch)
        if self._in_epoch and position.rows:
            position.metrics = self._logs()
            # A validation that is given up is begun anew, and has used the metrics' variables.
            position.rows = 0.0
        position.metrics = metrics = position.metrics | self._validated(eval_batches)
        self._guard.look_at_traces(self._run_fed)
        better = is_better(metrics, position, epoch=epoch, config=self.config)
        metrics = self._callbacks.on_epoch_end(epoch - 1, metrics)
        position.validated, self._in_epoch = True, False
        stopped = position.over or self._callbacks.stop_training
        if stopped and position.step < position.steps and self.distribution.is_chief:
            _LOG.warning("a callback ends training after epoch %s", epoch)
        position.over = stopped or position.step >= position.steps
        if better:
            position.best_epoch, position.best_metrics = epoch, finite_of(metrics)
            self._best = (*self._captured(), position.step, metrics[self.config.monitor])
        self.around.writer.write(position.step, metrics | {catalogue.EPOCH.name: float(epoch)})
        self._tell(metrics)
        if self._ends_alone() and not position.over:
            self._end_early()

    def _validated(self, eval_batches: tf.data.Dataset[Any]) -> dict[str, float]:
        self.around.heartbeat.enter("validate")
        try:
            with self._average.in_place() if self._average else nullcontext(), of_the_user():
                validated = self._validate(eval_batches, self._callbacks)
        except GivenUpError:
            self._end_early()
        self.around.heartbeat.enter("train")
        return validated

    def end(self, eval_batches: tf.data.Dataset[Any]) -> None:
        """The last word to the callbacks, and the last checkpoint.

        Weights that a callback has changed at the end, such as EarlyStopping's or an average of its
        own, are validated too, and are what is kept where they are better than the best epoch's.
        """
        position, before = self.position, self._state.capture()
        self._callbacks.on_train_end(position.metrics)
        after = self._state.capture()
        names = [name for name in before if name.startswith("model/")]
        changed = not all(np.array_equal(before[name], after[name]) for name in names)
        if changed:
            metrics = position.metrics | self._validated(eval_batches)
            epoch = -(-position.step // position.per_epoch)
            if is_better(metrics, position, epoch=epoch, config=self.config):
                position.best_epoch, position.best_metrics = epoch, finite_of(metrics)
                self._best = (*self._captured(), position.step, metrics[self.config.monitor])
        self._hold_to_reference()
        if changed or not self._was_over:
            self._save(now=True)

    def _hold_to_reference(self) -> None:
        """Where validation went by a quicker decoder than serving does: do the best weights agree?

        Not with several workers, of which each would have to look at every row.
        """
        held_out = self._held_out
        has_quicker = isinstance(held_out, Feed) and held_out.by_reference() is not None
        if self.distribution.workers > 1 or not has_quicker or not self.built.outputs_of_classes:
            return
        self.around.heartbeat.enter("validate")
        last, position = self._state.capture(), self.position
        with self.distribution.strategy.scope():
            self._state.restore(self._best_arrays())
        with self._average.in_place() if self._average else nullcontext():
            position.best_metrics, self.agreement = agreed_metrics(
                self.built,
                held_out,
                position.best_metrics,
                batch_size=EVAL_BATCHES * self.resolved.batch_size,
                validate=self._validated_by,
            )
        with self.distribution.strategy.scope():
            self._state.restore(last)
        self.around.heartbeat.enter("train")

    def _best_arrays(self) -> dict[str, NDArray[Any]]:
        if self._best is not None:
            return self._best[0]
        if self._writer is not None:
            self._writer.wait()
        return best(self.around.checkpoints).arrays()

    def _validated_by(self, feed: AnyFeed) -> dict[str, float]:
        """The metrics of another feed of the eval split; the user's callbacks have had their end."""
        load = as_the_model_takes(feed.load, self.built.model)
        validate = make_validate(self.built, load, distribution=self.distribution)
        with feed.in_order(batch_size=EVAL_BATCHES * self.resolved.batch_size) as batches:
            return validate(batches, Callbacks(self.built.model, [], steps=1, epochs=1))

    def close(self) -> None:
        """Close what callbacks and watchers hold open, where the run ends before its end."""
        self._watch.close(self.position.step)
        self._callbacks.close()

    def _ends_alone(self) -> bool:
        """Whether this process may end here; of several workers none does outside of a step."""
        return self.around.ending.asked and self.distribution.workers == 1

    def _end_early(self) -> NoReturn:
        self._save(now=True)
        raise self.around.ending.end(step=self.position.step, steps=self.position.steps)

    def _save(self, *, now: bool = False) -> None:
        """Write the best state, where it is not on the disk yet, and this one."""
        begun_s = time.monotonic()
        best, self._best = self._best, None
        if best is not None and best[2] < self.position.step:
            if self._writer is not None:
                arrays, facts, step, monitored = best
                self._writer.save(arrays, facts, step=step, monitored=monitored)
            best = None
        # Of one step there is one checkpoint: that of the best, whatever a callback did after it.
        arrays, facts = self._captured() if best is None else best[:2]
        if self._writer is None:
            return
        step = self.position.step
        copied_s = time.monotonic() - begun_s
        self._writer.save(arrays, facts, step=step, monitored=best and best[3], copied_s=copied_s)
        if now:
            self._writer.wait()

    def _captured(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        facts, arrays = self._callbacks.state()
        return self._state.capture() | arrays, {
            "position": self.position.to_json(),
            "callbacks": facts,
            "host_seeds": host_seeds(),
            "guard": self._guard.state(),
        }

    def _compile(self) -> None:
        position = self.position
        settings = StepSettings(
            batch_size=position.batch_size,
            accumulate=position.accumulate,
            xla=self.resolved.xla,
            reduction_dtype=self.config.reduction_dtype,
            reduction_bytes_per_pack=self.config.reduction_bytes_per_pack,
            average=self._average,
            together=max(1, min(position.together, self._most_together)),
            own_rows=self._feed.shares_rows,
            looks_first=not self._at_once,
            signals=self.around.ending.signals,
        )
        self._step = make_step(
            self.built, self._load, distribution=self.distribution, settings=settings
        )
        model = self.built.model
        self._run_fed = make_run_fed(
            self._step,
            rows_a_step=self._rows_a_step,
            alone=self.resolved.steps_per_call == 1,
            sound=(lambda: are_sound(model)) if self._at_once else None,
        )
        self._traced = None

    def _first_element(self) -> Any:
        # The run's first, wherever it stands: at its end no other is left.
        begin = replace(self.position, step=0)
        with self._feed.shuffled(self.calls(begin)) as batches:
            element = next(iter(batches))
            self._fixed = _has_fixed_shapes(batches, whole_calls=self._feed.whole_calls)
        return element if self._rows_a_step is None else step_of(element, 0, self._rows_a_step)

    def iterator(self, batches: tf.data.Dataset[Any]) -> Any:
        """What `one_call` reads, of what the feed yields."""
        step = self._step
        if isinstance(step, OneProgram) and not self._feed.whole_calls:
            # So many are taken at a time, and the next ones are made meanwhile.
            batches = batches.prefetch(2 * step.together)
        return iter(self.distribution.spread(batches))

    def _steps_together(self, first: Any) -> int:
        """Steps that may be one program: full batches of known shapes follow each other."""
        if not self._fixed or self._rows != self.position.batch_size:
            return 1
        return steps_together(first, steps_per_call=self.resolved.steps_per_call)

    def _loss_of_sample(self) -> tf.Tensor:
        """The loss of one pass over the resident batch, as in a step."""
        model, most = self.built.model, self.position.batch_size
        batch = self._load(tf.nest.map_structure(lambda tensor: tensor[:most], self._sample))
        with losses_are_means():
            outputs = model(self.built.adapt(batch[0]), training=True)
            return loss_of(model, told(batch, outputs), training=True)

    def _logs(self) -> dict[str, float]:
        loss = self.position.loss_sum / self.position.rows
        return {"loss": loss} | results(self.built.model)

    def _tell(self, scalars: Mapping[str, float]) -> None:
        position = self.position
        self.around.on_progress(
            Progress(
                step=position.step,
                steps=position.steps,
                epoch=position.step // position.per_epoch,
                scalars=scalars,
            )
        )

    def health(self) -> dict[str, Any]:
        """What was found and done, as JSON values."""
        return self._guard.record()

    @property
    def rows_a_step(self) -> float:
        """Rows of the resident batch."""
        return self._rows


def _has_fixed_shapes(elements: tf.data.Dataset[Any], *, whole_calls: bool) -> bool:
    """Whether all batches have the shapes of the first, but for an epoch's last of a whole call."""
    first = 1 if whole_calls else 0
    return all(
        isinstance(spec, tf.TensorSpec) and spec.shape[first:].is_fully_defined()
        for spec in tf.nest.flatten(elements.element_spec)
    )
