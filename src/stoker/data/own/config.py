"""The `data` section of an experiment whose data is a function of the user's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from stoker.core.errors import ConfigError, Plain
from stoker.core.fingerprint import fingerprint
from stoker.core.user_code import split_reference


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
