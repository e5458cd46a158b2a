"""What a user's dataset gives, as names and types: the type at the seam. No TensorFlow here."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from stoker.core.files import read_json, write_json
from stoker.data.columns import Column
from stoker.data.features.spec import read_as

DESCRIPTION = "dataset.json"
"""The description's file."""

SPLITS = ("train", "eval")
"""The splits that are asked for."""

INPUTS = "inputs"
"""Name of the feature where a dataset gives one tensor without a name."""

LABEL = "label"
"""Name of the column of a label without a name; underscores follow where a feature has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorColumn:
    """One part of an element: a feature, or the label."""

    name: str
    """As the dataset names it."""

    dtype: str
    """TensorFlow's name of its type."""

    shape: tuple[int | None, ...]
    """Of one record, without the batch; None where it differs from batch to batch."""

    @property
    def tensor_dtype(self) -> str:
        """The same as `dtype`; see `stoker.data.columns.Column`."""
        return self.dtype


AnyColumn = Column | TensorColumn
"""What a model takes: a column of shards, or a part of a user's own elements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """The elements of a dataset, by parts."""

    features: tuple[TensorColumn, ...]
    """What the model sees, and serving takes; in the order of the dataset."""

    labels: dict[str, TensorColumn]
    """What the model learns, by its output."""

    named: bool
    """Whether the features are a dict; else one tensor."""

    @property
    def columns(self) -> tuple[TensorColumn, ...]:
        """The features and the labels."""
        return (*self.features, *self.labels.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Count:
    """What one pass over a split meets."""

    batches: int
    """Elements."""

    rows: int
    """Records of all of them."""

    batch_size: int
    """Records of the largest element."""

    def rebatched(self, batch_size: int) -> Count:
        """Of the same rows in batches of another size."""
        return Count(
            batches=-(-self.rows // batch_size),
            rows=self.rows,
            batch_size=min(batch_size, self.rows),
        )


def write_description(path: Path, description: Description) -> None:
    """Write it as JSON."""
    write_json(path, asdict(description))


def read_description(path: Path) -> Description:
    """Read it back.

    Raises:
        DataError: it is missing, or something else.
    """
    return read_as(Description, read_json(path), f"{path} must describe a dataset")
