"""The stage of a chain: its interface, its input, and its result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.app.experiment import Experiment
from stoker.app.stage_outputs import open_dataset, open_transform
from stoker.data.dataset import Dataset, load_dataset
from stoker.data.features.analysis.label_summary import LabelSummary, labels_from_facts
from stoker.data.ingest import list_source
from stoker.data.sources.files.listing import Listing
from stoker.telemetry.wall_time import WallTime

if TYPE_CHECKING:
    from stoker.data.user_dataset.description import AnyColumn
    from stoker.data.user_dataset.features import AnyTransform
    from stoker.data.user_dataset.load_dataset import AnyDataset


@dataclass(frozen=True, kw_only=True)
class Context:
    """Input of a stage: the experiment, the outputs of earlier stages, and where to report progress."""

    experiment: Experiment
    run_id: str
    outputs: dict[str, Path]
    """Output folder of each stage."""
    identities: dict[str, str]
    """Identity of each stage's record."""
    results: dict[str, dict[str, Any]]
    """Recorded result of each stage."""
    progress: Callable[[str, float | None], None]
    """Receives a line and the completed share, 0 to 1; None if unknown."""
    accept_change: bool = False
    """Continue from a checkpoint that was made with other inputs."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Settings that a task of another launcher's cluster was started with; all tasks must agree."""
    wait_for_all: Callable[[], None] = lambda: None
    """Waits until all tasks are ready; TensorFlow's own wait cannot be interrupted."""
    wall: WallTime = field(default_factory=WallTime)
    """Account of this process's wall time."""

    @functools.cached_property
    def listing(self) -> Listing:
        """The source's files, listed once, so that the key of ingest covers exactly the files it reads."""
        return list_source(self.experiment.files)

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
        stage = "transform" if self.experiment.own_dataset is None else "analyze"
        return labels_from_facts(self.results[stage].get("labels", {}))

    def hashed(self, columns: Iterable[AnyColumn]) -> tuple[str, ...]:
        """Return the names of the columns that ingest hashed; none for a user-defined dataset."""
        return () if self.experiment.own_dataset else tuple(column.name for column in columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """Result of a stage that has written its output."""

    result: dict[str, Any]
    """Facts for later stages and the summary, JSON values. Reasons under `refused` stop the chain after
    the output is published; `warnings` holds the lines that the stage logged about the data."""

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
