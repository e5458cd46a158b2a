"""The description of a user's dataset: names and types. Does not import TensorFlow."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from stoker.core.files import read_json, write_json
from stoker.data.columns import Column
from stoker.data.features.spec import read_as

DESCRIPTION = "dataset.json"
"""Name of the file with the description."""

SPLITS = ("train", "eval")
"""The splits of every user's dataset."""

INPUTS = "inputs"
"""Name of the feature, if the features of a dataset are a single tensor."""

LABEL = "label"
"""Name of a label without a name; underscores are appended if a feature has this name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorColumn:
    """One part of an element: a feature or a label."""

    name: str
    """Name of the part in the dataset."""

    dtype: str
    """TensorFlow's name of the part's type."""

    shape: tuple[int | None, ...]
    """Shape of one record; None where it differs between batches."""

    @property
    def tensor_dtype(self) -> str:
        """The dtype of the column's tensor: always `dtype`. The property exists because `Column` has it, too."""
        return self.dtype


AnyColumn = Column | TensorColumn
"""An input of a model: a column of shards, or a part of a user's elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """The parts of a dataset's elements."""

    features: tuple[TensorColumn, ...]
    """The features, which are the inputs of the model and of serving, in the order of the dataset."""

    labels: dict[str, TensorColumn]
    """Output of the model -> its label."""

    named: bool
    """Whether the features are a dict, not a single tensor."""

    @property
    def columns(self) -> tuple[TensorColumn, ...]:
        """The features and the labels."""
        return (*self.features, *self.labels.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """The size of one pass over a split."""

    batches: int
    """Number of batches."""

    rows: int
    """Number of records in all batches."""

    batch_size: int
    """Number of records in the largest batch."""

    def rebatched(self, batch_size: int) -> Count:
        """Return the size of a pass over the same rows in batches of a different size."""
        return Count(
            batches=-(-self.rows // batch_size),
            rows=self.rows,
            batch_size=min(batch_size, self.rows),
        )


def write_description(path: Path, description: Description) -> None:
    """Write a description as JSON."""
    write_json(path, asdict(description))


def read_description(path: Path) -> Description:
    """Read a description.

    Raises:
        DataError: the file is missing, or does not hold a description.
    """
    return read_as(Description, read_json(path), f"{path} must describe a dataset")
