"""The whole of training, in its order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tensorflow as tf

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.user_code import call
from stoker.data.feed.calls import Calls
from stoker.data.feed.service.reading import ServiceFeed
from stoker.data.own.features import AnyTransform
from stoker.data.own.feed import AnyFeed
from stoker.data.own.opening import AnyDataset
from stoker.data.sources.config import ServiceConfig
from stoker.telemetry import catalogue
from stoker.telemetry.writers import MetricWriter
from stoker.train.busy import BusyReport, measure_ceiling
from stoker.train.checkpoint import save_checkpoint
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.feeds import open_feeds
from stoker.train.model import BuiltModel
from stoker.train.step import (
    Batch,
    make_eval_step,
    make_run_fed,
    make_run_resident,
    make_train_step,
    step_of,
    told,
)

BEST = "best"
"""Name of the checkpoint of the best epoch, which is exported."""

LAST = "last"
"""Name of the checkpoint of the last epoch."""


Fed = tuple[AnyFeed | ServiceFeed, "tf.data.Dataset[Any]"]
"""A feed, and what it reads."""

EVAL_BATCHES = 4
"""A validation batch in training batches: no gradients are kept, so it may be larger."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Where training stands, for a person who waits."""

    step: int
    """Steps done."""

    steps: int
    """Steps in all."""

    epoch: int
    """Epochs finished."""

    scalars: Mapping[str, float]
    """The newest metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What training leaves to the next stage, beside its checkpoints."""

    steps: int
    epochs: int
    best_epoch: int
    metrics: dict[str, float]
    """Of the best epoch: loss, the model's own metrics, and each with `val_`."""

    busy: BusyReport
    samples_per_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Timed:
    """What the calls of a stretch of training took, seconds."""

    steps: int
    rows: float
    wall_s: float
    wait_s: float

    def scalars(self) -> dict[str, float]:
        return {
            catalogue.STEP_TIME_S.name: self.wall_s / self.steps,
            catalogue.SAMPLES_PER_S.name: self.rows / self.wall_s,
            catalogue.INPUT_WAIT.name: min(1.0, self.wait_s / self.wall_s),
        }


def _together(calls: Sequence[_Timed]) -> _Timed:
    # The first call holds tracing and the input's start; it counts only where it is all there is.
    counted = calls[1:] or calls
    return _Timed(
        steps=sum(call.steps for call in counted),
        rows=sum(call.rows for call in counted),
        wall_s=sum(call.wall_s for call in counted),
        wait_s=sum(call.wait_s for call in counted),
    )


def fit(
    built: BuiltModel,
    dataset: AnyDataset,
    transform: AnyTransform,
    *,
    config: TrainConfig,
    resolved: ResolvedTraining,
    memory_bytes: int,
    checkpoints: Path,
    writer: MetricWriter,
    on_progress: Callable[[Progress], None],
    service: ServiceConfig | None = None,
    work_dir: Path | None = None,
) -> TrainResult:
    """Train, validate after each epoch, keep the best and the last state.

    Args:
        built: The user's compiled model.
        dataset: With the splits `train` and `eval`.
        transform: What turns raw columns into features and label.
        config: The user's `train` section.
        resolved: What its `auto`s became.
        memory_bytes: What this machine has; a part of it may hold transformed features.
        checkpoints: Folder for the checkpoints `best` and `last`.
        writer: Takes the metrics of each interval.
        on_progress: Told after every call.
        service: A tf.data service whose workers make the training batches.
        work_dir: Where the copy of the training split goes that those workers read.

    Raises:
        UserError: the loss is NaN or infinite (the step is named), or the monitored metric is not
            among the model's.
    """
    feed, held_out = open_feeds(
        dataset,
        transform,
        augment=config.augment,
        seed=config.seed,
        memory_bytes=memory_bytes,
        service=service,
        work_dir=work_dir,
    )
    per_epoch = feed.steps(resolved.batch_size)
    calls = Calls(
        rows=feed.rows,
        batch_size=resolved.batch_size,
        steps_per_call=resolved.steps_per_call,
        seed=config.seed,
        first=0,
        last=-(-per_epoch // resolved.steps_per_call) * config.epochs,
    )
    at_once = EVAL_BATCHES * resolved.batch_size
    with feed.shuffled(calls) as batches, held_out.in_order(batch_size=at_once) as eval_batches:
        return _fit(
            built,
            (feed, batches),
            (held_out, eval_batches),
            config=config,
            resolved=resolved,
            checkpoints=checkpoints,
            writer=writer,
            on_progress=on_progress,
        )


def _fit(
    built: BuiltModel,
    training: Fed,
    validation: Fed,
    *,
    config: TrainConfig,
    resolved: ResolvedTraining,
    checkpoints: Path,
    writer: MetricWriter,
    on_progress: Callable[[Progress], None],
) -> TrainResult:
    (feed, batches), (held_out, eval_batches) = training, validation
    per_epoch = feed.steps(resolved.batch_size)
    total = per_epoch * config.epochs
    rows_a_step = resolved.batch_size if feed.whole_calls else None

    # Everything that a step changes exists from here on, so that it can be saved and put back.
    element = next(iter(batches))
    sample = element if rows_a_step is None else step_of(element, 0, rows_a_step)
    first = feed.load(sample)
    call(_build_metrics, built, first, what="a first batch through the model and its loss")
    step = make_train_step(built, xla=resolved.xla)
    state = training_state(built)
    run_fed = make_run_fed(step, feed.load, rows_a_step=rows_a_step)
    run_resident = make_run_resident(step, feed.load, sample)
    eval_step = make_eval_step(built, held_out.load)

    deterministic = config.deterministic
    before_s = measure_ceiling(run_resident, sample, state=state, deterministic=deterministic)
    calls: list[_Timed] = []
    best = _Best(config)
    iterator = iter(batches)
    for epoch in range(1, config.epochs + 1):
        built.model.reset_metrics()
        losses = _Mean()
        for done in _calls(per_epoch, resolved.steps_per_call):
            begun_s = time.monotonic()
            loss_sum, rows, wait_s = (
                float(value) for value in run_fed(iterator, tf.constant(done.steps, tf.int64))
            )
            wall_s = time.monotonic() - begun_s
            at = (epoch - 1) * per_epoch + done.end
            _refuse_nan(loss_sum, at, done.steps)
            losses.add(loss_sum, rows)
            calls.append(_Timed(steps=done.steps, rows=rows, wall_s=wall_s, wait_s=wait_s))
            scalars = {"loss": loss_sum / rows} | calls[-1].scalars()
            writer.write(at, scalars)
            on_progress(Progress(step=at, steps=total, epoch=epoch - 1, scalars=scalars))
        metrics = {"loss": losses.value} | _results(built)
        metrics |= _validate(built, eval_step, eval_batches)
        writer.write(epoch * per_epoch, metrics | {catalogue.EPOCH.name: float(epoch)})
        facts = {"epoch": epoch, "step": epoch * per_epoch, "metrics": _finite(metrics)}
        if best.is_better(metrics, epoch):
            save_checkpoint(checkpoints / BEST, state, facts=facts)
        on_progress(Progress(step=epoch * per_epoch, steps=total, epoch=epoch, scalars=metrics))
    save_checkpoint(checkpoints / LAST, state, facts=facts)

    after_s = measure_ceiling(run_resident, sample, state=state, deterministic=deterministic)
    timed = _together(calls)
    busy = BusyReport(
        ceiling_step_s=(before_s + after_s) / 2,
        ceiling_rows=float(tf.shape(first[1])[0]),
        real_step_s=timed.wall_s / timed.steps,
        real_rows=timed.rows / timed.steps,
        input_wait=min(1.0, timed.wait_s / timed.wall_s),
    )
    writer.write(total, {catalogue.BUSY_FRACTION.name: busy.busy_fraction})
    return TrainResult(
        steps=total,
        epochs=config.epochs,
        best_epoch=best.epoch,
        metrics=best.metrics,
        busy=busy,
        samples_per_s=timed.rows / timed.wall_s,
    )


def training_state(built: BuiltModel) -> list[Any]:
    """Every variable that a step can change: weights, seeds, optimizer, metrics, in this order."""
    model = built.model
    return [*model.variables, *model.optimizer.variables, *model.metrics_variables]


@dataclass(frozen=True, slots=True)
class _Call:
    steps: int
    end: int


def _calls(per_epoch: int, steps_per_call: int) -> Iterator[_Call]:
    for start in range(0, per_epoch, steps_per_call):
        end = min(start + steps_per_call, per_epoch)
        yield _Call(end - start, end)


class _Mean:
    def __init__(self) -> None:
        self.total, self.rows = 0.0, 0.0

    def add(self, total: float, rows: float) -> None:
        self.total += total
        self.rows += rows

    @property
    def value(self) -> float:
        return self.total / self.rows


class _Best:
    """The best epoch by the monitored metric; a NaN is never the best."""

    def __init__(self, config: TrainConfig) -> None:
        self.monitor = config.monitor
        self.mode = config.monitor_mode
        self.epoch = 0
        self.metrics: dict[str, float] = {}

    def is_better(self, metrics: Mapping[str, float], epoch: int) -> bool:
        if self.monitor not in metrics:
            known = [name for name in metrics if name.startswith("val_")]
            raise ConfigError(
                "train.monitor must be a metric of the compiled model",
                got=self.monitor,
                fix=nearest(self.monitor, known),
            )
        value = metrics[self.monitor]
        if math.isnan(value):
            raise UserError(
                f"{self.monitor} of epoch {epoch} must be a number",
                got=Plain("nan"),
                fix="Look for NaN in the features of the eval split (`stoker analyze`).",
            )
        sign = 1.0 if _mode(self.monitor, self.mode) == "max" else -1.0
        better = not self.metrics or sign * value > sign * self.metrics[self.monitor]
        if better:
            self.epoch, self.metrics = epoch, dict(metrics)
        return better


_LESS_IS_BETTER = ("loss", "error", "mae", "mse", "rmse", "crossentropy", "divergence")
"""Parts of metric names of which less is better."""


def _mode(monitor: str, mode: Literal["min", "max", "auto"]) -> Literal["min", "max"]:
    if mode != "auto":
        return mode
    return "min" if any(part in monitor.lower() for part in _LESS_IS_BETTER) else "max"


def _build_metrics(built: BuiltModel, batch: Batch) -> None:
    outputs = built.model(built.adapt(batch[0]), training=False)
    built.model.compute_loss(**told(batch, outputs), training=False)
    built.model.compute_metrics(**told(batch, outputs))
    built.model.reset_metrics()


def _results(built: BuiltModel, prefix: str = "") -> dict[str, float]:
    results = built.model.get_metrics_result()
    return {f"{prefix}{name}": float(value) for name, value in results.items() if name != "loss"}


def _validate(
    built: BuiltModel,
    eval_step: Callable[[Any], tuple[tf.Tensor, tf.Tensor]],
    batches: tf.data.Dataset[Any],
) -> dict[str, float]:
    built.model.reset_metrics()
    losses = _Mean()
    for element in batches:
        loss_sum, rows = eval_step(element)
        losses.add(float(loss_sum), float(rows))
    return {"val_loss": losses.value} | _results(built, "val_")


def _refuse_nan(loss_sum: float, at: int, steps: int) -> None:
    if not math.isfinite(loss_sum):
        raise UserError(
            f"the loss of steps {at - steps + 1} to {at} must be a finite number",
            got=Plain(str(loss_sum)),
            fix="Look for NaN in the features (`stoker analyze`), or lower the learning rate.",
        )


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
