"""Reads and writes the statistics of a version's training data; a server compares requests with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from stoker.core.config import build
from stoker.core.errors import ConfigError, DataError, Plain
from stoker.core.files import read_json, write_json
from stoker.core.statistics.columns import ColumnStatistics

TRAINING_STATISTICS = "assets.extra/training_statistics.json"
"""File of a version, in `assets.extra`, a folder that TensorFlow Serving leaves to other programs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStatistics:
    """Content of the file with training statistics."""

    columns: tuple[ColumnStatistics, ...]
    """Columns of the training split that are inputs of the model."""


def write_training_statistics(saved_model: Path, columns: Iterable[ColumnStatistics]) -> None:
    """Add the statistics to a SavedModel.

    Args:
        saved_model: Folder of the SavedModel.
        columns: Statistics of the model's input columns.
    """
    path = saved_model / TRAINING_STATISTICS
    path.parent.mkdir(exist_ok=True)
    write_json(path, asdict(TrainingStatistics(columns=tuple(columns))))


def read_training_statistics(saved_model: Path) -> dict[str, ColumnStatistics]:
    """Return column -> statistics; empty if the SavedModel has none.

    Raises:
        DataError: the file is damaged.
    """
    path = saved_model / TRAINING_STATISTICS
    if not path.is_file():
        return {}
    try:
        found = build(TrainingStatistics, read_json(path))
    except ConfigError as error:
        raise DataError(
            f"{path} must hold statistics of columns",
            got=Plain(error.rule),
            fix="Push the model again.",
        ) from error
    return {column.name: column for column in found.columns}
