"""The description of a user's dataset: names and types. Does not import TensorFlow."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from stoker.core.files import read_json, write_json
from stoker.data.columns import Column
from stoker.data.features.spec import read_as

DESCRIPTION = "dataset.json"
"""The description's file."""

SPLITS = ("train", "eval")
"""The splits of every user's dataset."""

INPUTS = "inputs"
"""Name of the feature if a dataset has a single tensor as features."""

LABEL = "label"
"""Name of the column of a label without a name, with underscores if a feature has that name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorColumn:
    """One part of an element: a feature, or the label."""

    name: str
    """Its name in the dataset."""

    dtype: str
    """TensorFlow's name of its type."""

    shape: tuple[int | None, ...]
    """Shape of one record; None where it differs between batches."""

    @property
    def tensor_dtype(self) -> str:
        """The same as `dtype`; see `stoker.data.columns.Column`."""
        return self.dtype


AnyColumn = Column | TensorColumn
"""An input of a model: a column of shards, or a part of a user's elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """The parts of a dataset's elements."""

    features: tuple[TensorColumn, ...]
    """The inputs of the model and of serving, in the order of the dataset."""

    labels: dict[str, TensorColumn]
    """The labels, by the model's output."""

    named: bool
    """Whether the features are a dict, else a single tensor."""

    @property
    def columns(self) -> tuple[TensorColumn, ...]:
        """The features and the labels."""
        return (*self.features, *self.labels.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """The size of one pass over a split."""

    batches: int
    """Number of elements."""

    rows: int
    """Number of records in all elements."""

    batch_size: int
    """Number of records in the largest element."""

    def rebatched(self, batch_size: int) -> Count:
        """Return the size for the same rows in batches of another size."""
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
        DataError: it is missing, or something else.
    """
    return read_as(Description, read_json(path), f"{path} must describe a dataset")
