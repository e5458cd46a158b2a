"""Every metric of a training run: its name in Prometheus, and in TensorBoard and `metrics.jsonl`."""

from __future__ import annotations

from stoker.telemetry.catalogue.metric import Kind, Metric, Writer

RUN = ("run",)
"""The only label of most series; `stoker_run_info` has further facts of the run."""


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
    help="Wall time of a training step; steps of one call count with their mean.",
    writer=Writer.TRAINING,
    labels=RUN,
    tensorboard="step_time_s",
)
SAMPLES_PER_S = _gauge(
    "stoker_train_samples_per_second",
    "samples per second",
    "Samples trained on per second of wall time.",
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
    "U: time of the same step on one resident batch, divided by its time on real data.",
    tensorboard="busy_fraction",
)
GOODPUT = _gauge(
    "stoker_train_goodput_ratio",
    "ratio",
    "Share of the run's wall time, over all its processes, spent in training steps.",
    tensorboard="goodput",
)
MFU = _gauge(
    "stoker_train_mfu_ratio",
    "ratio",
    "Model FLOPs per second, divided by the measured peak of these devices; on a GPU.",
    tensorboard="mfu",
)
EPOCH = _gauge("stoker_train_epoch", "", "Epochs finished.", tensorboard="epoch")
LOSS = _gauge(
    "stoker_train_loss",
    "",
    "Mean loss of the last call of steps; after an epoch, of the epoch.",
    tensorboard="loss",
)
MODEL_METRIC = _gauge(
    "stoker_train_metric",
    "",
    "Newest value of a metric of the model by its own name, val_ for the eval split.",
    "name",
)
LOSS_SCALE = _gauge(
    "stoker_train_loss_scale",
    "",
    "Dynamic factor of the loss in float16.",
    tensorboard="loss_scale",
)
GRADIENT_NORM = _gauge(
    "stoker_train_gradient_norm",
    "",
    "Global norm of the gradients of one fixed batch, with each histogram of gradients.",
    tensorboard="gradient_norm",
)
STEPS = _counter("stoker_train_steps_total", "", "Training steps that this process has done.")
WALL_SECONDS = _counter(
    "stoker_train_wall_seconds_total",
    "seconds",
    "Wall time of this process by part; waiting: of the run, between its processes.",
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
    "Processes that continued the run, by the earlier one's end.",
    "cause",
)
REMAINING = _gauge(
    "stoker_train_remaining_seconds", "seconds", "Estimated time until the last step."
)
LOCAL_STEP = _gauge(
    "stoker_train_local_step_seconds",
    "seconds",
    "Median over 100 steps of a worker's time from one all-reduce to the next.",
    "worker",
)
STRAGGLER = _gauge(
    "stoker_train_straggler_ratio",
    "ratio",
    "A worker's local step time, divided by the median of the others'; a straggler is above 1.2.",
    "worker",
)
RUN_INFO = _gauge(
    "stoker_run_info",
    "",
    "Always 1: facts of a run; join it with other metrics by the label run.",
    *("experiment", "user", "team", "cluster", "git_commit"),
)

SPEED = (STEP_TIME_S, SAMPLES_PER_S, INPUT_WAIT, BUSY_FRACTION, MFU, GOODPUT, EPOCH)
"""Shown in the progress line and TensorBoard, besides the model's own loss and metrics."""

METRICS = (
    *SPEED,
    *(LOSS, MODEL_METRIC, LOSS_SCALE, GRADIENT_NORM, STEPS, WALL_SECONDS, CHECKPOINT_AGE),
    *(RESTARTS, REMAINING, LOCAL_STEP, STRAGGLER, RUN_INFO),
)
"""All of them."""
