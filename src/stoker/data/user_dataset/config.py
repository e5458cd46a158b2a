"""The section `data` of an experiment that uses the user's own dataset."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from stoker.core.errors import ConfigError, Plain
from stoker.core.fingerprint import fingerprint
from stoker.core.user_code import split_reference


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """Changes to a user's own dataset before the step gets its batches; by default, nothing is changed."""

    cache: Literal["none", "memory"] = "none"
    """memory: keep the batches of the first pass in this process's memory, and use the same batches in the same order
    in every epoch. This changes the training if the dataset has different batches in every pass."""

    batch_size: int | None = None
    """Rows per batch, if they should differ from the dataset's own: the same rows in the same order; the last batch of
    a pass may be smaller. null: the dataset's own batches."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(
                "data.pipeline.batch_size must be at least 1",
                got=self.batch_size,
                fix="Leave it out for the dataset's own batches.",
            )

    @property
    def differences(self) -> dict[str, Any]:
        """Settings that differ from the defaults, as JSON values."""
        return {
            name: value for name, value in asdict(self).items() if value != getattr(NOTHING, name)
        }


NOTHING = PipelineConfig()
"""The dataset without changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnDatasetConfig:
    """A `tf.data.Dataset` from the user's code; `data: module:function` is its short form."""

    dataset: str
    """`module:function`. `dataset(split)` returns the split's `tf.data.Dataset`, or `dataset()` returns
    `{"train": ..., "eval": ...}`; elements are batches of (features, label) or (features, label,
    weight)."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function. Changing an option counts as new data. Pass everything the function
    reads from outside the experiment folder (paths, versions) here."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Changes to the dataset before the step gets its batches."""

    def __post_init__(self) -> None:
        split_reference(self.dataset, where="data.dataset")
        try:
            fingerprint(self.options)
        except TypeError as error:
            raise ConfigError(
                "data.options may hold only strings, numbers, true, false, lists and sections",
                got=Plain(str(error)),
                fix="Write a date as a string, in quotes.",
            ) from None
