"""The `data` section of an experiment whose data is a function of the user's."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from stoker.core.errors import ConfigError, Plain
from stoker.core.fingerprint import fingerprint
from stoker.core.user_code import split_reference


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineConfig:
    """What is done to a user's own dataset between it and the step; nothing by default."""

    cache: Literal["none", "memory"] = "none"
    """`memory`: the batches of the first pass are kept in this process's memory, and every epoch gets
    those, in that order. Where the dataset gives another order or other batches in every pass, that
    is another training."""

    batch_size: int | None = None
    """Rows of a batch, whatever the dataset gives: the same rows in the same order, the last batch of
    a pass may be smaller. None: the dataset's own batches."""

    def __post_init__(self) -> None:
        if self.batch_size is not None and self.batch_size < 1:
            raise ConfigError(
                "data.pipeline.batch_size must be at least 1",
                got=self.batch_size,
                fix="Leave it out for the dataset's own batches.",
            )

    @property
    def differences(self) -> dict[str, Any]:
        """What is asked for, by name, as JSON values; empty where that is nothing."""
        return {
            name: value for name, value in asdict(self).items() if value != getattr(NOTHING, name)
        }


NOTHING = PipelineConfig()
"""The dataset as it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnDatasetConfig:
    """A `tf.data.Dataset` that the user's code makes; `data: module:function` is short for it."""

    dataset: str
    """`module:function`. `dataset(split)` gives the split's `tf.data.Dataset`, or `dataset()` gives
    `{"train": ..., "eval": ...}`; elements are batches of (features, label) or (features, label,
    weight)."""

    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the function. Other options are other data, so what the function reads
    from outside of the experiment's folder is told here: a path, a version."""

    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """What is done to the dataset between it and the step."""

    def __post_init__(self) -> None:
        split_reference(self.dataset, where="data.dataset")
        try:
            fingerprint(self.options)
        except TypeError as error:
            raise ConfigError(
                "data.options must hold texts, numbers, true or false, lists and sections",
                got=Plain(str(error)),
                fix="Write a date as a text, in quotes.",
            ) from None
