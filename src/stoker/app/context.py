"""The interface of a stage of the chain: its input (`Context`), its work, and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from stoker.app.experiment import Experiment
from stoker.app.stage_outputs import open_dataset, open_transform
from stoker.data.dataset import Dataset, load_dataset
from stoker.data.features.analysis.label_summary import LabelSummary, labels_from_facts
from stoker.data.sources.files.listing import Listing
from stoker.telemetry.wall_time import WallTime

if TYPE_CHECKING:
    from stoker.data.user_dataset.description import AnyColumn
    from stoker.data.user_dataset.features import AnyTransform
    from stoker.data.user_dataset.load_dataset import AnyDataset


class StageResult(TypedDict, total=False):
    """Facts that a stage records, as JSON values. These keys can be in the result of any stage."""

    warnings: list[str]
    """Warnings about the data that the stage logged."""

    refused: list[str]
    """Reasons to stop the chain after the output is published."""

    already: bool
    """Whether the work had been done before: the stage then counts as skipped."""

    changes: list[dict[str, Any]]
    """Changes of the inputs since the start of the run, which the user accepted to continue its training."""


class IngestResult(StageResult):
    """Facts of the stage `ingest`."""

    rows: dict[str, int]
    """Number of rows of each split; empty for a user-defined dataset."""

    columns: int
    bad_rows: int
    fingerprint: str
    copies_dropped: NotRequired[int]
    image_store: NotRequired[str | None]


class AnalyzeResult(StageResult):
    """Facts of the stage `analyze`; the last three keys exist only for a user-defined dataset."""

    anomalies: list[str]
    of_columns: list[dict[str, Any]]
    distinct: NotRequired[int | None]
    splits: NotRequired[dict[str, dict[str, Any]]]
    counts: NotRequired[dict[str, dict[str, int]]]
    bytes: NotRequired[Mapping[str, str]]
    labels: NotRequired[dict[str, dict[str, dict[str, Any]]]]


class TransformResult(StageResult):
    """Facts of the stage `transform`; the optional keys are missing for a user-defined dataset."""

    features: list[str]
    serving_columns: list[str]
    labels: NotRequired[dict[str, dict[str, dict[str, Any]]]]
    of_columns: NotRequired[list[dict[str, Any]]]
    vocabulary_losses: NotRequired[list[dict[str, Any]]]


class LoopFacts(TypedDict):
    """Measurements of a training loop."""

    busy_fraction: float | None
    """Share of time in which the device is busy (U); None with parameter servers, where it is unknown because workers
    also wait for the servers."""

    input_wait: float
    step_time_s: float
    ceiling_step_time_s: float | None
    health: dict[str, Any]
    xla: dict[str, Any] | None
    agreement: dict[str, Any] | None
    repeated_steps: NotRequired[int]


class DeviceFacts(TypedDict):
    """Measurements of `DeviceWatch`; the optional keys are missing if it could not measure the model."""

    mfu: float | None
    device_time: dict[str, Any] | None
    model_rate: NotRequired[dict[str, Any]]
    device_time_not_measured: NotRequired[str]
    device_watch_s: NotRequired[dict[str, float]]
    device_finding: NotRequired[dict[str, Any] | None]


class TrainingResult(StageResult, LoopFacts, DeviceFacts):
    """Facts of the stage `train`."""

    steps: int
    epochs: int
    best_epoch: int
    metrics: dict[str, float]
    samples_per_s: float
    parameters: int
    resolved: dict[str, Any]
    goodput: float | None
    wall_time: dict[str, Any]
    workers: NotRequired[int]
    restarts: NotRequired[list[str]]
    stragglers: NotRequired[list[dict[str, float | str]]]
    """Workers that were slow at some time, with their largest ratio of step time to that of other workers."""


class ExportResult(StageResult):
    """Facts of the stage `export`. If the model has several outputs, the first five are dicts by output."""

    from_logits: Any
    is_regression: Any
    multi_hot: Any
    one_class: Any
    classes: Any
    outputs: list[str]
    signatures: list[str]
    inputs: dict[str, str]
    vetted_rows: int


class EvaluateResult(StageResult):
    """Facts of the stage `evaluate`."""

    rows: int
    metrics: dict[str, Any]
    main_metric: str
    verdicts: list[dict[str, Any]]


class PushResult(StageResult):
    """Facts of the stage `push`."""

    version: int
    path: str


class ServeResult(StageResult):
    """Facts of the smoke test that ends `stoker run`."""

    version: int
    rows: int


class StageResults(TypedDict, total=False):
    """Result of each stage that was done or skipped."""

    ingest: IngestResult
    analyze: AnalyzeResult
    transform: TransformResult
    train: TrainingResult
    export: ExportResult
    evaluate: EvaluateResult
    push: PushResult
    serve: ServeResult


@dataclass(frozen=True, kw_only=True)
class Context:
    """Input of a stage: the experiment, the outputs of earlier stages, and where to report progress."""

    experiment: Experiment
    run_id: str
    outputs: dict[str, Path]
    """Output folder of each stage."""
    identities: dict[str, str]
    """Identity of each stage's record."""
    results: StageResults
    """Recorded result of each stage."""
    progress: Callable[[str, float | None], None]
    """Receives a line, and the completed share, 0 to 1 (None: unknown)."""
    accept_change: bool = False
    """Continue from a checkpoint that was made with other inputs."""
    requested: Mapping[str, Any] = field(default_factory=dict)
    """Settings that this task was started with, if another launcher started the cluster; all tasks must agree."""
    wait_for_all: Callable[[], None] = lambda: None
    """Waits until all tasks are ready. Used instead of TensorFlow's own wait, which cannot be interrupted."""
    wall: WallTime = field(default_factory=WallTime)
    """Account of this process's wall time."""
    source: str = ""
    """Fingerprint of the data's source."""
    listing: Listing | None = None
    """Files from which the fingerprint `source` was computed; the stage `ingest` reads exactly these files."""

    def shards(self) -> Dataset:
        """Return the ingested dataset."""
        return load_dataset(self.outputs["ingest"])

    def dataset(self) -> AnyDataset:
        """Return the dataset, ingested or user-defined."""
        return open_dataset(
            self.experiment, self.outputs["ingest"], analysis=self.results["analyze"]
        )

    def transform(self) -> AnyTransform:
        """Return the transform from raw columns to features."""
        return open_transform(self.experiment, self.outputs["transform"])

    def labels(self) -> dict[str, dict[str, LabelSummary]]:
        """Return the label summary of each split and output; empty for runs of older versions."""
        made = self.experiment.own_dataset is None
        stage = self.results["transform"] if made else self.results["analyze"]
        return labels_from_facts(stage.get("labels", {}))

    def hashed(self, columns: Iterable[AnyColumn]) -> tuple[str, ...]:
        """Return the names of the columns that the stage `ingest` hashed; empty for a user-defined dataset."""
        return () if self.experiment.own_dataset else tuple(column.name for column in columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Result of a stage that has written its output."""

    result: StageResult
    """Facts for later stages and the summary."""

    columns: tuple[str, ...] = ()
    """Raw columns that the stage read."""

    content: str = ""
    """Fingerprint of the part of the output that may differ for equal inputs; see `StageRecord.content`."""


Work = Callable[[Context, Path], Done]
"""The work of a stage: writes its output into the given folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage of the chain."""

    name: str
    """Name of the stage: a verb, which is also its command."""

    folder: str
    """Output folder, relative to the run."""

    inputs: Callable[[Context], Mapping[str, Any]]
    """Everything the stage depends on, except the raw columns that it reads."""

    work: Work
    """Writes the output into the given folder."""

    in_place: bool = False
    """Whether the stage writes to its final folder, where users can watch it and where it continues after a kill.
    Otherwise, the complete output is moved there."""

    resumable: bool = False
    """Whether the work continues from the partial output of a killed process."""

    tensorflow: bool = False
    """Whether the work needs TensorFlow, which takes seconds to import."""

    runs_user_code: bool = False
    """Whether the work calls user functions, whose file reads are observed."""

    always: bool = False
    """Whether the stage depends on state outside the run, and therefore runs every time."""


CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints."""

RESOLVED = "resolved.json"
"""File with the resolved settings: the value of every `auto`."""

METRICS = "metrics.jsonl"
"""File with the metrics of each call of steps, and of each epoch."""

WALL_TIME = "wall_time.json"
"""File with the record of the run's wall time, over all its processes."""

TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's event files."""
