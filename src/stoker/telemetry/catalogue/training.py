"""Every metric of a training run: its name, unit and meaning, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """What one number of `metrics.jsonl` and TensorBoard means."""

    name: str
    """As it is written, e.g. `busy_fraction`."""

    unit: str
    """`s`, `1/s`, `1` (a share), or "" for a count."""

    help: str
    """One sentence."""


STEP_TIME_S = Metric(
    name="step_time_s", unit="s", help="Wall time of a training step, mean over the interval."
)
SAMPLES_PER_S = Metric(
    name="samples_per_s", unit="1/s", help="Samples trained on per second of wall time."
)
INPUT_WAIT = Metric(
    name="input_wait",
    unit="1",
    help="W: share of the wall time of training steps blocked in next(iterator).",
)
BUSY_FRACTION = Metric(
    name="busy_fraction",
    unit="1",
    help="U: time of the same step on one resident batch, divided by its time on real data.",
)
GOODPUT = Metric(
    name="goodput",
    unit="1",
    help="Share of the run's wall time, over all its processes, spent in training steps.",
)
MFU = Metric(
    name="mfu",
    unit="1",
    help="Model FLOPs per second, divided by the measured peak of these devices; on a GPU.",
)
EPOCH = Metric(name="epoch", unit="", help="Epochs finished.")

TRAINING = (STEP_TIME_S, SAMPLES_PER_S, INPUT_WAIT, BUSY_FRACTION, MFU, GOODPUT, EPOCH)
"""What a training run writes in addition to the model's own loss and metrics (`loss`, `val_loss`, ...)."""
