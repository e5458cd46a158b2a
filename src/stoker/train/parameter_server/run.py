"""A training run with parameter servers: its workers, its variables, its position."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain, Preempted, UserError
from stoker.core.user_code import call
from stoker.telemetry.catalogue import training as catalogue
from stoker.train.callbacks.callbacks import Callbacks
from stoker.train.checkpoints.seeds import host_seeds, keras_seeds, restore_host_seeds
from stoker.train.checkpoints.state import TrainingState
from stoker.train.checkpoints.store import VerifiedCheckpoint
from stoker.train.checkpoints.writer import CheckpointWriter
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.context.monitor import finite_of, is_better
from stoker.train.context.position import Position
from stoker.train.context.run_context import Progress, RunContext
from stoker.train.loop.run import AVERAGE
from stoker.train.loop.validation import results
from stoker.train.optimizer.ema import WeightAverage
from stoker.train.optimizer.settings import prepare_optimizer
from stoker.train.parameter_server.calls import Pass, WorkerCalls
from stoker.train.parameter_server.cluster import ClusterConnection
from stoker.train.parameter_server.server import PassTotals
from stoker.train.parameter_server.worker import WorkerModel, open_inbox
from stoker.train.setup.build_model import BuiltModel
from stoker.train.step.custom_train_step import FirstPass, first_pass

_NOTHING = PassTotals(batches=0, repeated=0, rows=0.0, loss_sum=0.0, not_finite=-1)


class Meter:
    """Measures the rates of a period of steps, on the chief."""

    def __init__(self) -> None:
        """Start the period."""
        self._begun_s = self._reported_s = time.monotonic()
        self._reported, self._reported_wait_s = _NOTHING, 0.0
        self.wait_s = 0.0
        """Time that the chief was blocked in next(iterator), seconds."""

    @property
    def wall_s(self) -> float:
        """Time since the start, seconds."""
        return time.monotonic() - self._begun_s

    def next_of(self, iterator: Iterator[Any]) -> Any:
        """Return the next element, and add the time to wait for it to `wait_s`."""
        asked_s = time.monotonic()
        element = next(iterator)
        self.wait_s += time.monotonic() - asked_s
        return element

    def scalars(self, totals: PassTotals, *, every_s: float) -> dict[str, float]:
        """Return loss and rates since the last report; empty if the last report is too recent.

        Args:
            totals: Totals since the start of the period.
            every_s: Minimum interval between two reports, seconds.
        """
        now_s = time.monotonic()
        wall_s, steps = now_s - self._reported_s, totals.batches - self._reported.batches
        if not steps or wall_s < every_s:
            return {}
        rows = totals.rows - self._reported.rows
        found = {
            "loss": (totals.loss_sum - self._reported.loss_sum) / rows,
            catalogue.STEP_TIME_S.tensorboard: wall_s / steps,
            catalogue.SAMPLES_PER_S.tensorboard: rows / wall_s,
            catalogue.INPUT_WAIT.tensorboard: min(
                1.0, (self.wait_s - self._reported_wait_s) / wall_s
            ),
        }
        self._reported, self._reported_s, self._reported_wait_s = totals, now_s, self.wait_s
        return found


_LOG = logging.getLogger(__name__)

REPORT_EVERY_S = 1.0
"""Interval between two reports of metrics, seconds; it is not a number of steps, because steps have no order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServerResult:
    """The result of training, apart from its checkpoints."""

    steps: int
    """Number of updates that the server applied in the whole run; each step counts once."""

    repeated: int
    """Number of updates that were dropped because they arrived again after a worker had died."""

    epochs: int
    best_epoch: int
    metrics: dict[str, float]
    """Metrics of the best epoch: loss and the model's metrics, for training and (`val_`) validation."""

    step_time_s: float
    """Mean wall time of this process per step, seconds."""

    samples_per_s: float

    input_wait: float
    """Share of this process's wall time in which it was blocked in next(iterator)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFeed:
    """Elements for the workers, and the function that converts an element to a batch."""

    elements: tf.data.Dataset[Any]
    """One element per batch."""

    load: Callable[[Any], Any]
    """Element -> batch; runs on a worker."""

    steps: int
    """Number of batches of a pass."""

    @property
    def sample(self) -> Any:
        """The first element."""
        return next(iter(self.elements))


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterServerSetup:
    """The parts of a run with parameter servers, apart from its data."""

    built: BuiltModel
    """The user's compiled model, built in the strategy's scope."""

    config: TrainConfig
    """The user's `train` section."""

    resolved: ResolvedTraining
    """The values that replaced each `auto`."""

    connection: ClusterConnection
    """The connection to workers and servers."""

    context: RunContext
    """All other inputs."""


class ParameterServerRun:
    """A training run in progress: its workers, its variables and its position."""

    def __init__(
        self,
        setup: ParameterServerSetup,
        training: WorkerFeed,
        evaluation: WorkerFeed,
        position: Position,
        writer: CheckpointWriter,
    ) -> None:
        """Build everything that a step changes, on the servers.

        Args:
            setup: The parts of the run.
            training: The training split, starting at the position.
            evaluation: The eval split.
            position: The position at which the run starts or resumes.
            writer: Writes the checkpoints.
        """
        built, config, connection = setup.built, setup.config, setup.connection
        self.built, self.position = built, position
        self._config, self._context, self._writer = config, setup.context, writer
        self._elements = iter(training.elements)
        self._eval_elements, self._evaluated = evaluation.elements, 0
        self._repeated = 0
        self._in_epoch = position.in_epoch > 0 or not position.validated
        with connection.strategy.scope():
            self._average = _prepare(setup, training)
            seeds = keras_seeds(connection.strategy)
            worker = WorkerModel(built, seeds=[seeds.state])
            workers = WorkerCalls(connection, silent_s=config.watchdog_s)
            self._training = Pass(
                workers,
                *open_inbox(
                    worker,
                    worker.train,
                    training.load,
                    training.sample,
                    batches=training.steps,
                    average=self._average,
                ),
            )
            self._testing = Pass(
                workers,
                *open_inbox(
                    worker,
                    worker.evaluate,
                    evaluation.load,
                    evaluation.sample,
                    batches=evaluation.steps,
                ),
            )
        self._training.trace()
        self._testing.trace()
        averaged = {} if self._average is None else {AVERAGE: self._average.variables}
        self._state = TrainingState(built.model, extras=averaged)
        self._callbacks = _callbacks(setup, position)

    def begin(self, found: VerifiedCheckpoint | None) -> None:
        """Restore the state of the checkpoint, or write the first one."""
        self._context.heartbeat.enter("train")
        if found is not None:
            arrays = found.arrays()
            self._state.restore(arrays)
            restore_host_seeds(found.facts["host_seeds"])
            self._callbacks.set_state(found.facts["callbacks"], arrays)
            self._context.writer.rewind(self.position.step)
        self._callbacks.on_train_begin()
        if found is None:
            # A first checkpoint shows early whether the disk is writable.
            self._save()

    def begin_epoch(self) -> None:
        """At the start of an epoch, reset the values that are counted per epoch, and call the callbacks."""
        if self._in_epoch:
            return
        self._in_epoch = True
        self.position.loss_sum = self.position.rows = 0.0
        self.built.model.reset_metrics()
        self._callbacks.on_epoch_begin(self.position.epoch)

    def train_until_save(self) -> None:
        """Train until the epoch ends, a checkpoint is due, or this process must stop."""
        position, meter = self.position, Meter()
        first = position.step
        for totals in self._training.run(first, self._next_elements(meter)):
            if totals.not_finite < 0:
                self._note(first, totals, meter, every_s=REPORT_EVERY_S)
        if totals.not_finite >= 0:
            raise _not_finite(totals.not_finite + 1)
        self._note(first, totals, meter, every_s=0.0)
        position.step += totals.batches
        position.loss_sum += totals.loss_sum
        position.rows += totals.rows
        position.validated = position.step % position.per_epoch != 0
        position.timing.add(
            steps=totals.batches, rows=totals.rows, wall_s=meter.wall_s, wait_s=meter.wait_s
        )
        self._repeated += totals.repeated
        if position.validated:
            self._save()
            self._end_if_asked()

    def end_epoch(self) -> None:
        """Validate, call the callbacks, and save."""
        position, context = self.position, self._context
        epoch = position.step // position.per_epoch
        if self._in_epoch and position.rows:
            loss = position.loss_sum / position.rows
            position.metrics = {"loss": loss} | results(self.built.model)
        context.heartbeat.enter("validate")
        with self._average.in_place() if self._average else nullcontext():
            metrics = position.metrics | self._validate()
        context.heartbeat.enter("train")
        better = is_better(metrics, position, epoch=epoch, config=self._config)
        metrics = self._callbacks.on_epoch_end(epoch - 1, metrics)
        position.validated, self._in_epoch = True, False
        position.over = position.step >= position.steps or self._callbacks.stop_training
        if better:
            position.best_epoch, position.best_metrics = epoch, finite_of(metrics)
        context.writer.write(position.step, metrics | {catalogue.EPOCH.tensorboard: float(epoch)})
        self._report_progress(position.step, metrics)
        self._save(monitored=metrics[self._config.monitor] if better else None)
        if not position.over:
            self._end_if_asked()

    def end(self) -> ParameterServerResult:
        """Call the callbacks' end hooks, and wait for the checkpoints."""
        position, timing = self.position, self.position.timing
        self._callbacks.on_train_end(position.metrics)
        self._writer.wait()
        return ParameterServerResult(
            steps=position.step,
            repeated=self._repeated,
            epochs=-(-position.step // position.per_epoch),
            best_epoch=position.best_epoch,
            metrics=position.best_metrics,
            step_time_s=timing.wall_s / timing.steps,
            samples_per_s=timing.rows / timing.wall_s,
            input_wait=min(1.0, timing.wait_s / timing.wall_s),
        )

    def _next_elements(self, meter: Meter) -> Iterator[Any]:
        position = self.position
        end = min(position.steps, (position.epoch + 1) * position.per_epoch)
        for number in range(position.step, end):
            is_due = number > position.step and self._writer.due(number)
            if is_due or self._context.preemption.requested:
                return
            yield meter.next_of(self._elements)

    def _validate(self) -> dict[str, float]:
        model = self.built.model
        model.reset_metrics()
        *_, totals = self._testing.run(self._evaluated, self._eval_elements)
        self._evaluated += totals.batches
        return {"val_loss": totals.loss_sum / totals.rows} | results(model, "val_")

    def _note(self, first: int, totals: PassTotals, meter: Meter, *, every_s: float) -> None:
        step = first + totals.batches
        self._context.heartbeat.beat(step)
        self._context.preemption.has_work = True
        scalars = meter.scalars(totals, every_s=every_s)
        if scalars:
            self._context.writer.write(step, scalars)
            self._report_progress(step, scalars)

    def _report_progress(self, step: int, scalars: dict[str, float]) -> None:
        steps, epoch = self.position.steps, step // self.position.per_epoch
        self._context.on_progress(Progress(step=step, steps=steps, epoch=epoch, scalars=scalars))

    def _save(self, *, monitored: float | None = None) -> None:
        """Save a checkpoint. No step is in progress, and all steps before the position are applied."""
        begun_s = time.monotonic()
        callbacks, arrays = self._callbacks.state()
        arrays = self._state.capture() | arrays
        facts = {
            "position": self.position.to_json(),
            "callbacks": callbacks,
            "host_seeds": host_seeds(),
        }
        copied_s = time.monotonic() - begun_s
        step = self.position.step
        self._writer.save(arrays, facts, step=step, monitored=monitored, copied_s=copied_s)

    def _end_if_asked(self) -> None:
        if not self._context.preemption.requested:
            return
        self._writer.wait()
        raise Preempted(
            "training was stopped by a signal",
            got=Plain(f"a signal after step {self.position.step} of {self.position.steps}"),
            fix="Everything is saved: run the same command again to continue.",
        )


def _prepare(setup: ParameterServerSetup, training: WorkerFeed) -> WeightAverage | None:
    """Build metrics and optimizer on the servers; return the moving average of the weights, or None."""
    built, first = setup.built, training.load(training.sample)
    what = "a first batch through the model and its loss"
    passed: FirstPass = call(first_pass, built, first, what=what)
    for warning in passed.warnings:
        _LOG.warning("%s", warning.line())
    average = prepare_optimizer(built.model, setup.config, setup.resolved)
    built.model.optimizer.build(built.model.trainable_variables)
    return average


def _callbacks(setup: ParameterServerSetup, position: Position) -> Callbacks:
    callbacks = Callbacks(
        setup.built.model,
        setup.context.callbacks,
        steps=position.per_epoch,
        epochs=setup.config.epochs,
    )
    if callbacks.has_batch_hooks:
        raise unsupported_error("a callback with a hook for batches")
    return callbacks


def unsupported_error(what: str) -> ConfigError:
    """Return the error for a setting that requires consecutive steps."""
    return ConfigError(
        "train.strategy: parameter_server computes gradients on workers and applies them on a "
        "server, in no fixed order",
        got=Plain(what),
        fix="Remove this setting, or use train.strategy: multi_worker.",
    )


def _not_finite(step: int) -> UserError:
    return UserError(
        f"the loss and the gradients of step {step} must be finite numbers",
        got=Plain("NaN or infinite; the step was not applied"),
        fix="Look for NaN in the features (`stoker analyze`), or lower the learning rate.",
    )
