"""Every metric of a training run: its name in Prometheus, and in TensorBoard and `metrics.jsonl`."""

from __future__ import annotations

from stoker.telemetry.catalogue.metric import Kind, Metric, Writer

RUN = ("run",)
"""The only label of most metrics; `stoker_run_info` has further facts about the run."""


def _gauge(name: str, unit: str, help_text: str, *more: str, tensorboard: str = "") -> Metric:
    return Metric(
        name=name,
        kind=Kind.GAUGE,
        unit=unit,
        help=help_text,
        writer=Writer.TRAINING,
        labels=(*RUN, *more),
        tensorboard=tensorboard,
    )


def _counter(name: str, unit: str, help_text: str, *more: str) -> Metric:
    return Metric(
        name=name,
        kind=Kind.COUNTER,
        unit=unit,
        help=help_text,
        writer=Writer.TRAINING,
        labels=(*RUN, *more),
    )


STEP_TIME_S = Metric(
    name="stoker_train_step_seconds",
    kind=Kind.HISTOGRAM,
    unit="seconds",
    help="Wall time of a training step; if a call runs several steps, each counts with their mean.",
    writer=Writer.TRAINING,
    labels=RUN,
    tensorboard="step_time_s",
)
SAMPLES_PER_S = _gauge(
    "stoker_train_samples_per_second",
    "samples per second",
    "Training samples per second of wall time.",
    tensorboard="samples_per_s",
)
INPUT_WAIT = _gauge(
    "stoker_train_input_wait_ratio",
    "ratio",
    "W: share of the wall time of training steps blocked in next(iterator).",
    tensorboard="input_wait",
)
BUSY_FRACTION = _gauge(
    "stoker_train_busy_ratio",
    "ratio",
    "U: time of a step on a batch kept in memory, divided by the time of a step on real data.",
    tensorboard="busy_fraction",
)
GOODPUT = _gauge(
    "stoker_train_goodput_ratio",
    "ratio",
    "Share of the training's wall time, over all processes of the run, in steps that were not repeated.",
    tensorboard="goodput",
)
MFU = _gauge(
    "stoker_train_mfu_ratio",
    "ratio",
    "Model FLOPs per second, divided by the measured peak of the devices; only on GPUs.",
    tensorboard="mfu",
)
EPOCH = _gauge("stoker_train_epoch", "", "Number of finished epochs.", tensorboard="epoch")
LOSS = _gauge(
    "stoker_train_loss",
    "",
    "Mean loss over the steps of the last call; after an epoch, over the epoch.",
    tensorboard="loss",
)
MODEL_METRIC = _gauge(
    "stoker_train_metric",
    "",
    "Newest value of a metric of the model; names on the eval split begin with val_.",
    "name",
)
LOSS_SCALE = _gauge(
    "stoker_train_loss_scale",
    "",
    "Dynamic factor by which the loss is multiplied in float16.",
    tensorboard="loss_scale",
)
GRADIENT_NORM = _gauge(
    "stoker_train_gradient_norm",
    "",
    "Global norm of the gradients of a fixed batch; measured with each histogram of gradients.",
    tensorboard="gradient_norm",
)
STEPS = _counter("stoker_train_steps_total", "", "Training steps that this process has done.")
WALL_SECONDS = _counter(
    "stoker_train_wall_seconds_total",
    "seconds",
    "Wall time of this process by part; the part `waiting` is the run's time between its processes.",
    "part",
)
CHECKPOINT_AGE = _gauge(
    "stoker_train_checkpoint_age_seconds",
    "seconds",
    "Time since the newest checkpoint was written.",
)
RESTARTS = _counter(
    "stoker_train_restarts_total",
    "",
    "Number of processes that continued the run, by how the earlier process ended.",
    "cause",
)
REMAINING = _gauge(
    "stoker_train_remaining_seconds", "seconds", "Estimated time until the last step."
)
LOCAL_STEP = _gauge(
    "stoker_train_local_step_seconds",
    "seconds",
    "Time of a worker from one all-reduce to the next, median over 100 steps.",
    "worker",
)
STRAGGLER = _gauge(
    "stoker_train_straggler_ratio",
    "ratio",
    "Local step time of a worker, divided by the median of the other workers; a straggler is above 1.2.",
    "worker",
)
RUN_INFO = _gauge(
    "stoker_run_info",
    "",
    "Always 1; the labels are facts about a run. Join it with other metrics by the label run.",
    *("experiment", "user", "team", "cluster", "git_commit"),
)

SPEED = (STEP_TIME_S, SAMPLES_PER_S, INPUT_WAIT, BUSY_FRACTION, MFU, GOODPUT, EPOCH)
"""Metrics that the progress line and TensorBoard show, in addition to the model's own loss and metrics."""

METRICS = (
    *SPEED,
    *(LOSS, MODEL_METRIC, LOSS_SCALE, GRADIENT_NORM, STEPS, WALL_SECONDS, CHECKPOINT_AGE),
    *(RESTARTS, REMAINING, LOCAL_STEP, STRAGGLER, RUN_INFO),
)
"""All metrics of a training run."""
