"""The stage of a chain: its interface, its input, and its result."""

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
    """Facts that a stage records, JSON values: what the chain itself reads in the result of any stage."""

    warnings: list[str]
    """Lines that the stage logged about the data."""

    refused: list[str]
    """Reasons to stop the chain after the output is published."""

    already: bool
    """Whether the work was done before, so that the stage counts as skipped."""

    changes: list[dict[str, Any]]
    """Accepted changes of the inputs of a training that was continued."""


class IngestResult(StageResult):
    """Facts of the stage `ingest`."""

    rows: dict[str, int]
    """Rows of each split; empty for a user-defined dataset."""

    columns: int
    bad_rows: int
    fingerprint: str
    copies_dropped: NotRequired[int]
    image_store: NotRequired[str | None]


class AnalyzeResult(StageResult):
    """Facts of the stage `analyze`; the last three are of a user-defined dataset."""

    anomalies: list[str]
    of_columns: list[dict[str, Any]]
    distinct: NotRequired[int | None]
    splits: NotRequired[dict[str, dict[str, Any]]]
    counts: NotRequired[dict[str, dict[str, int]]]
    bytes: NotRequired[Mapping[str, str]]
    labels: NotRequired[dict[str, dict[str, dict[str, Any]]]]


class TransformResult(StageResult):
    """Facts of the stage `transform`; the optional ones are missing for a user-defined dataset."""

    features: list[str]
    serving_columns: list[str]
    labels: NotRequired[dict[str, dict[str, dict[str, Any]]]]
    of_columns: NotRequired[list[dict[str, Any]]]
    vocabulary_losses: NotRequired[list[dict[str, Any]]]


class LoopFacts(TypedDict):
    """What a training loop measured of itself."""

    busy_fraction: float | None
    """None with parameter servers: workers wait for them too, so it is unknown."""

    input_wait: float
    step_time_s: float
    ceiling_step_time_s: float | None
    health: dict[str, Any]
    xla: dict[str, Any] | None
    agreement: dict[str, Any] | None
    repeated_steps: NotRequired[int]


class DeviceFacts(TypedDict):
    """What `DeviceWatch` measured; the optional ones need a model that it could measure."""

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
    """Of several workers: those that were slow at any time, with their largest ratio."""


class ExportResult(StageResult):
    """Facts of the stage `export`; the first five are by output if the model has several."""

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
    """Receives a line and the completed share, 0 to 1; None if unknown."""
    accept_change: bool = False
    """Continue from a checkpoint that was made with other inputs."""
    requested: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a task of another launcher's cluster was started with; all tasks must agree."""
    wait_for_all: Callable[[], None] = lambda: None
    """Waits until all tasks are ready; TensorFlow's own wait cannot be interrupted."""
    wall: WallTime = field(default_factory=WallTime)
    """Account of this process's wall time."""
    source: str = ""
    """Fingerprint of the data's source."""
    listing: Listing | None = None
    """The source's files as `source` names them, so that the key of ingest covers exactly what it reads."""

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
        """Return the names of the columns that ingest hashed; none for a user-defined dataset."""
        return () if self.experiment.own_dataset else tuple(column.name for column in columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Result of a stage that has written its output."""

    result: StageResult
    """Facts for later stages and the summary."""

    columns: tuple[str, ...] = ()
    """Raw columns that the stage read."""

    content: str = ""
    """Fingerprint of what equal inputs do not determine; see `StageRecord.content`."""


Work = Callable[[Context, Path], Done]
"""The work of a stage: writes its output into the given folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage of the chain."""

    name: str
    """Name, a verb."""

    folder: str
    """Output folder, relative to the run."""

    inputs: Callable[[Context], Mapping[str, Any]]
    """Everything the stage depends on, except the raw columns that it reads."""

    work: Work
    """Writes the output into the given folder."""

    in_place: bool = False
    """Writes into the final folder, where it can be watched, and continues there after a kill. Otherwise
    the output is published when it is complete."""

    resumable: bool = False
    """The work continues from the partial output of a killed process."""

    tensorflow: bool = False
    """The work needs TensorFlow, which takes seconds to import."""

    runs_user_code: bool = False
    """The work calls user functions, whose file reads are observed."""

    always: bool = False
    """Depends on state outside the run, and therefore runs every time."""


CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints."""

RESOLVED = "resolved.json"
"""The resolved settings: the value of every `auto`."""

METRICS = "metrics.jsonl"
"""The metrics of each call of steps, and of each epoch."""

WALL_TIME = "wall_time.json"
"""The account of the run's wall time, over all its processes."""

TENSORBOARD = "tensorboard"
"""Folder of the metrics as TensorBoard event files."""
