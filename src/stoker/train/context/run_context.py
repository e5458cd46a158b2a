"""The inputs of a training run apart from model, data and settings, and its result."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import keras

from stoker.data.sources.config import ServiceConfig
from stoker.telemetry.run_time import RunTime
from stoker.telemetry.writers import MetricWriter
from stoker.train.checkpoints.identity import Identity
from stoker.train.config import ResolvedTraining, TrainConfig
from stoker.train.context.heartbeat import Heartbeat
from stoker.train.context.local_step import LocalStepTime
from stoker.train.context.preemption import Preemption
from stoker.train.context.utilization import BusyReport
from stoker.train.setup.build_model import BuiltModel
from stoker.train.setup.feeds import Feeds
from stoker.train.setup.strategy import Distribution
from stoker.train.watch.watch import Watch

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """A function that runs in a thread, which starts immediately."""

    def __init__(self, work: Callable[[], T], *, name: str) -> None:
        """Start the thread.

        Args:
            work: The function; called once. It must not draw random numbers or trace parts of the
                model, because the main thread builds the model at the same time.
            name: The thread's name.
        """
        self._found: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the function has ended; its error, if any, is not raised."""
        self._thread.join()

    def result(self) -> T:
        """Wait until the function has ended, and return its result.

        Raises:
            Exception: the exception that the function raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found  # type: ignore[return-value]  # it has returned a value

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._found = work()
        except BaseException as error:  # noqa: BLE001 - raised where the result is read
            self._error = error


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """Progress of training, for the user."""

    step: int
    """Number of steps done."""

    steps: int
    """Number of steps of the whole run."""

    epoch: int
    """Number of finished epochs."""

    scalars: Mapping[str, float]
    """The newest metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """The result of training, apart from its checkpoints."""

    steps: int
    epochs: int
    best_epoch: int
    metrics: dict[str, float]
    """Metrics of the best epoch: loss and the model's metrics, for training and (`val_`) validation."""

    busy: BusyReport
    samples_per_s: float

    resolved: ResolvedTraining
    """The value of each `auto` at the end of the run; the use of XLA may have been decided during training."""

    health: dict[str, Any] = field(default_factory=dict)
    """Findings and actions: rollbacks, reduced batches, warnings; JSON values."""

    xla: dict[str, Any] = field(default_factory=dict)
    """Whether XLA compiles the step, why, and how the compilation cache was used; JSON values."""

    agreement: dict[str, Any] | None = None
    """Whether validation used the fast image decoder; see `agreed_metrics`. None: there was no choice."""


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The inputs of a training run apart from model, data and settings."""

    memory_bytes: int
    """Memory of this machine, bytes; a part of it may store transformed features."""

    checkpoints: Path
    """Folder of the checkpoints; a run resumes from the newest good one."""

    writer: MetricWriter
    """Receives the metrics."""

    on_progress: Callable[[Progress], None]
    """Called with the progress after every call of steps."""

    on_wait: Callable[[str], None] = lambda _: None
    """Called with a line for the user, from another thread, while the device waits for a compiler."""

    preemption: Preemption
    """Requests to stop this process."""

    heartbeat: Heartbeat
    """Reports to the launcher that this process is alive."""

    run_time: RunTime = field(default_factory=RunTime)
    """Accounts for the wall time of the run."""

    watch: Watch = field(default_factory=Watch)
    """Writes TensorBoard data and profiles."""

    local_step: LocalStepTime | None = None
    """Measures this worker's time between two all-reduces; None without other workers."""

    identity: Identity = field(default_factory=dict)
    """Identity of the run: configuration, code, data, versions."""

    accept_change: bool = False
    """Whether the run may resume from a checkpoint with another identity."""

    callbacks: Sequence[keras.callbacks.Callback] = ()
    """The user's callbacks."""

    service: ServiceConfig | None = None
    """tf.data service whose workers prepare the training batches; None: this process prepares them."""

    work_dir: Path | None = None
    """Folder for the copy of the training split that the workers of `service` read."""

    feeds: BackgroundCall[Feeds] | None = None
    """The feeds, which a thread is already opening; None: training opens them."""


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """The parts of one training run, apart from its data."""

    built: BuiltModel
    """The user's compiled model, built in the strategy's scope."""

    config: TrainConfig
    """The user's `train` section."""

    resolved: ResolvedTraining
    """The values that replaced each `auto`."""

    distribution: Distribution
    """Devices and workers that share each step."""

    context: RunContext
