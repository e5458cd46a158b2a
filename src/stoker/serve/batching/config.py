"""When requests are joined, and how many."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stoker.core.errors import ConfigError, Plain
from stoker.serve.text_files import read_text_file

PARAMETERS_FILE = "batching_params.pbtxt"
"""The file in a version's folder with batching parameters for this version, if versions may have their own."""


WarmSizes = Literal["auto", "on", "off"]
"""Whether batches are padded to a few sizes that are run before a version takes requests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchingConfig:
    """How requests to one signature are joined.

    Source: TensorFlow Serving, `BatchingParameters`, whose names these fields have.
    """

    enabled: bool = True
    """Whether requests are joined at all."""

    max_batch_size: int = 128
    """Most rows in one call, over all requests joined."""

    batch_timeout_micros: int = 0
    """Longest that the first request of a batch waits for others, microseconds. 0: it does not wait; the requests
    that came during the last run are the next batch."""

    max_enqueued_batches: int = 64
    """Most full batches in the queue; a request beyond them is refused."""

    num_batch_threads: int = 1
    """Batches of one signature that run at once."""

    allowed_batch_sizes: tuple[int, ...] = ()
    """The sizes that a batch is padded to, ascending; any size if empty."""

    only_allowed_sizes: bool = False
    """Whether the check of joined answers must not run other sizes, because XLA would compile them."""

    pad_variable_length_inputs: bool = False
    """Whether inputs of other lengths are padded to the longest, each with its first value."""

    larger: Literal["alone", "split", "refuse"] = "alone"
    """What happens to a request with more rows than a batch may have. A model whose rows depend on each other gives
    other answers if the request is split, so it is split only on request."""

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_enqueued_batches", "num_batch_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", got=getattr(self, name))
        if self.batch_timeout_micros < 0:
            raise ConfigError(
                "batch_timeout_micros must not be below 0", got=self.batch_timeout_micros
            )
        sizes = self.allowed_batch_sizes
        if any(low >= high for low, high in itertools.pairwise(sizes)) or 0 in sizes[:1]:
            raise ConfigError(
                "allowed_batch_sizes entries must be in monotonically increasing order",
                got=list(sizes),
            )
        if sizes and sizes[-1] != self.max_batch_size:
            raise ConfigError(
                "Last entry in allowed_batch_sizes must match max_batch_size; "
                f"expected {self.max_batch_size}",
                got=sizes[-1],
            )

    def padded(self, rows: int) -> int:
        """The padded size for a batch of so many rows."""
        return next((size for size in self.allowed_batch_sizes if size >= rows), rows)

    def up_to(self, rows: int) -> BatchingConfig:
        """The same configuration with batches of at most this many rows, rounded to an allowed size."""
        sizes = tuple(size for size in self.allowed_batch_sizes if size <= rows)
        return dataclasses.replace(self, max_batch_size=rows, allowed_batch_sizes=sizes)


def read_batching_parameters(path: Path) -> BatchingConfig:
    """Read TensorFlow Serving's `batching_parameters_file`, with TensorFlow Serving's defaults.

    Raises:
        ConfigError: the file does not exist, or has another form.
    """
    found = read_text_file(
        path, "BatchingParameters", full_name="tensorflow.serving.BatchingParameters"
    )
    if found.HasField("max_execution_batch_size") and not found.HasField("max_batch_size"):
        raise ConfigError(
            "max_execution_batch_size needs a max_batch_size", got=Plain(f"none in {path}")
        )
    given = {
        name: getattr(found, name).value
        for name in (
            "max_batch_size",
            "batch_timeout_micros",
            "max_enqueued_batches",
            "num_batch_threads",
        )
        if found.HasField(name)
    }
    given = {"max_batch_size": 1000, **given}
    if found.HasField("max_execution_batch_size"):
        given["max_batch_size"] = min(given["max_batch_size"], found.max_execution_batch_size.value)
    return BatchingConfig(
        **given,
        larger="split" if found.enable_large_batch_splitting.value else "refuse",
        allowed_batch_sizes=tuple(found.allowed_batch_sizes),
        pad_variable_length_inputs=found.pad_variable_length_inputs,
    )
