"""What a stage of the chain is, what it may know, and what it reports."""

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
    """What a stage may know: the experiment, the outputs before it, and whom to tell."""

    experiment: Experiment
    run_id: str
    outputs: dict[str, Path]
    """Stage -> where its output lies."""
    identities: dict[str, str]
    """Stage -> identity of its record."""
    results: dict[str, dict[str, Any]]
    """Stage -> the facts that it recorded."""
    progress: Callable[[str, float | None], None]
    """Told a line of what is going on and how far it is, a share or None."""
    accept_change: bool = False
    """Go on from a checkpoint of other inputs."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """What each task of another launcher's cluster was started with; all must be alike."""
    gather: Callable[[], None] = lambda: None
    """Waits until those that train along are ready; TensorFlow's own wait cannot be ended."""
    wall: WallTime = field(default_factory=WallTime)
    """Accounts for this process's wall time."""

    @functools.cached_property
    def listing(self) -> Listing:
        """The source's files, found once: those that give ingest its key are those that it reads."""
        return list_source(self.experiment.files)

    def shards(self) -> Dataset:
        """The ingested dataset."""
        return load_dataset(self.outputs["ingest"])

    def dataset(self) -> AnyDataset:
        """The dataset, ingested or the user's own."""
        return open_dataset(
            self.experiment, self.outputs["ingest"], analysis=self.results["analyze"]
        )

    def transform(self) -> AnyTransform:
        """What makes features of it."""
        return open_transform(self.experiment, self.outputs["transform"])

    def labels(self) -> dict[str, dict[str, LabelSummary]]:
        """Split -> output -> label summary; nothing in the record of an earlier version."""
        stage = "transform" if self.experiment.own_dataset is None else "analyze"
        return labels_from_facts(self.results[stage].get("labels", {}))

    def hashed(self, columns: Iterable[AnyColumn]) -> tuple[str, ...]:
        """The names of columns whose values ingest has hashed: none of a user's own dataset."""
        return () if self.experiment.own_dataset else tuple(column.name for column in columns)


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """What a stage reports when it has written its output."""

    result: dict[str, Any]
    """Facts for later stages and the summary. A list under `refused` that is not empty ends the
    chain here, with its reasons, once the output is published. A list under `warnings` has the lines
    that the stage has logged about the data."""

    columns: tuple[str, ...] = ()
    """Raw columns that it read."""

    content: str = ""
    """Fingerprint of what equal inputs do not settle; see `StageRecord.content`."""


Work = Callable[[Context, Path], Done]
"""Does a stage's work: writes the given folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One link of the chain."""

    name: str
    """The verb."""

    folder: str
    """Where its output lies inside a run."""

    inputs: Callable[[Context], Mapping[str, Any]]
    """Everything it depends on other than the raw columns that it reads."""

    work: Work
    """Does it: writes the given empty folder."""

    in_place: bool = False
    """Writes at its final place, so that others can watch, and goes on there from what a killed one
    has left; else its output appears whole."""

    resumable: bool = False
    """Its work goes on from what a killed one has left in the folder."""

    tensorflow: bool = False
    """Its work needs TensorFlow, which takes seconds to import."""

    runs_user_code: bool = False
    """It calls the user's functions: what they read is observed."""

    always: bool = False
    """Looks at the world outside the run, and so is asked every time."""
