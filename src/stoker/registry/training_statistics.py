"""Statistics of the training data in a version, so that a server can compare requests with them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from stoker.core.config import build
from stoker.core.errors import ConfigError, DataError, Plain
from stoker.core.files import read_json, write_json
from stoker.core.statistics.columns import ColumnStatistics

TRAINING_STATISTICS = "assets.extra/training_statistics.json"
"""File of a version, in the folder that TensorFlow Serving reserves for others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStatistics:
    """Content of the file."""

    columns: tuple[ColumnStatistics, ...]
    """Columns of the training split that are inputs of the model."""


def write_training_statistics(saved_model: Path, columns: Iterable[ColumnStatistics]) -> None:
    """Add the statistics to a SavedModel.

    Args:
        saved_model: its folder.
        columns: statistics of the columns that it takes.
    """
    path = saved_model / TRAINING_STATISTICS
    path.parent.mkdir(exist_ok=True)
    write_json(path, asdict(TrainingStatistics(columns=tuple(columns))))


def read_training_statistics(saved_model: Path) -> dict[str, ColumnStatistics]:
    """Return column -> its statistics; empty if the SavedModel carries none.

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
