"""Opens the outputs of the first stages: shards and transform, or the user-defined dataset."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from stoker.app.experiment import Experiment
from stoker.core.user_code import load_function
from stoker.data.columns import Column, to_numpy
from stoker.data.dataset import load_dataset
from stoker.data.user_dataset.config import OwnDatasetConfig
from stoker.data.user_dataset.description import DESCRIPTION, AnyColumn, Count, read_description

if TYPE_CHECKING:
    from stoker.data.user_dataset.features import AnyTransform
    from stoker.data.user_dataset.load_dataset import AnyDataset, OwnDataset


def open_dataset(
    experiment: Experiment, ingested: Path, *, analysis: Mapping[str, Any]
) -> AnyDataset:
    """Open the dataset that the stages after `analyze` read.

    Args:
        experiment: Tells whether the dataset is in files or user-defined.
        ingested: Output of the stage `ingest`.
        analysis: Result of the stage `analyze`, with the size of a user-defined dataset.

    Raises:
        UserError: the manifest or the user's function is invalid.
    """
    if experiment.own_dataset is None:
        return load_dataset(ingested)
    own = call_own_dataset(experiment, experiment.own_dataset)
    from stoker.data.user_dataset.load_dataset import with_pipeline

    counts = own_counts(experiment.own_dataset, analysis=analysis)
    return with_pipeline(own, experiment.own_dataset.pipeline, counts=counts)


def own_counts(config: OwnDatasetConfig, *, analysis: Mapping[str, Any]) -> dict[str, Count]:
    """Return the numbers of batches and rows of one pass over each split.

    Args:
        config: The section `data`, with the batch size.
        analysis: Result of the stage `analyze`, which counted the dataset's batches.
    """
    counts = {split: Count(**count) for split, count in analysis["counts"].items()}
    size = config.pipeline.batch_size
    if size is None:
        return counts
    return {split: count.rebatched(size) for split, count in counts.items()}


def call_own_dataset(experiment: Experiment, config: OwnDatasetConfig) -> OwnDataset:
    """Call the user's function and return its dataset, which is checked; its batches are not counted.

    Raises:
        ConfigError: the user's function is invalid.
    """
    from stoker.app.import_tensorflow import import_tensorflow

    import_tensorflow()
    from stoker.data.user_dataset.load_dataset import open_own_dataset

    function = load_function(experiment.folder, config.dataset, where="data.dataset")
    return open_own_dataset(function, config)


def open_transform(experiment: Experiment, transformed: Path) -> AnyTransform:
    """Open the output of the stage `transform`, which turns raw rows into features.

    Raises:
            DataError: the output is damaged.
    """
    if experiment.own_dataset is None:
        from stoker.data.features.preprocessing.transform import load_transform

        return load_transform(transformed)
    from stoker.data.user_dataset.features import OwnFeatures

    return OwnFeatures(read_description(transformed / DESCRIPTION))


def split_rows(
    dataset: AnyDataset, split: str, columns: Sequence[AnyColumn], *, batch_rows: int
) -> Iterator[dict[str, NDArray[Any]]]:
    """Read a split once.

    Args:
        dataset: The dataset.
        split: `train` or `eval`.
        columns: The columns to read.
        batch_rows: Maximum number of rows per batch; a user-defined dataset keeps its batches.

    Yields:
        Column -> [rows, ...] values.
    """
    from stoker.data.user_dataset.load_dataset import OwnDataset

    if isinstance(dataset, OwnDataset):
        yield from dataset.arrays(split, columns=columns)
        return
    stored = [column for column in columns if isinstance(column, Column)]
    names = [column.name for column in stored]
    for batch in dataset.batches(split, columns=names, rows=batch_rows):
        yield {column.name: to_numpy(column, batch.column(column.name)) for column in stored}
