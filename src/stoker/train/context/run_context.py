"""What training is given beside model, data and settings, and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras

from stoker.data.sources.config import ServiceConfig
from stoker.telemetry.run_time import RunTime
from stoker.telemetry.writers import MetricWriter
from stoker.train.checkpoints.identity import Identity
from stoker.train.config import ResolvedTraining
from stoker.train.context.background import BackgroundCall
from stoker.train.context.heartbeat import Heartbeat
from stoker.train.context.preemption import Preemption
from stoker.train.context.utilization import BusyReport
from stoker.train.setup.feeds import Feeds
from stoker.train.watch.watch import NoWatch, Watch


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

    resolved: ResolvedTraining
    """What every `auto` was in the run's last step: XLA may have been chosen in training."""

    health: dict[str, Any] = field(default_factory=dict)
    """What was found and done: rollbacks, smaller batches, warnings; JSON values."""

    xla: dict[str, Any] = field(default_factory=dict)
    """Whether XLA compiles the step, why, and how the cache was used; JSON values."""

    agreement: dict[str, Any] | None = None
    """Whether validation went by the quick decoder; see `agreed_metrics`."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """What training is given beside model, data and settings."""

    memory_bytes: int
    """What this machine has; a part of it may hold transformed features."""

    checkpoints: Path
    """Folder for the checkpoints; a run goes on from the newest good one in it."""

    writer: MetricWriter
    """Takes the metrics of each interval."""

    on_progress: Callable[[Progress], None]
    """Told after every call."""

    on_wait: Callable[[str], None] = lambda _: None
    """Called with a line, from another thread, while the device waits for a compiler."""

    preemption: Preemption
    """Who may ask this process to end."""

    heartbeat: Heartbeat
    """Whom to tell that this process is alive."""

    run_time: RunTime = field(default_factory=RunTime)
    """Accounts for the run's wall time."""

    watch: Watch = field(default_factory=NoWatch)
    """Shows the model to users."""

    identity: Identity = field(default_factory=dict)
    """What the run is: configuration, code, data, versions."""

    accept_change: bool = False
    """Go on from a checkpoint of another identity."""

    callbacks: Sequence[keras.callbacks.Callback] = ()
    """The user's."""

    service: ServiceConfig | None = None
    """A tf.data service whose workers make the training batches."""

    work_dir: Path | None = None
    """Where the copy of the training split goes that those workers read."""

    feeds: BackgroundCall[Feeds] | None = None
    """The data, if a thread is opening it already; None: training opens it when needed."""
