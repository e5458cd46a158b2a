"""Settings of batching: when requests are joined, and how many."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stoker.core.errors import ConfigError, Plain
from stoker.serve.text_files import read_text_file

PARAMETERS_FILE = "batching_params.pbtxt"
"""Name of the file in a version's folder with the version's own batching parameters."""


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
    """Maximum number of rows of a batch, over all its requests."""

    batch_timeout_micros: int = 0
    """Maximum time that the first request of a batch waits for others, microseconds. 0: it does not wait; the next
    batch has the requests that arrived during the previous run."""

    max_enqueued_batches: int = 64
    """Maximum number of full batches in the queue. A request that would exceed it is refused."""

    num_batch_threads: int = 1
    """Maximum number of batches of a signature that run at the same time."""

    allowed_batch_sizes: tuple[int, ...] = ()
    """Sizes that batches are padded to, ascending; empty: batches are not padded."""

    only_allowed_sizes: bool = False
    """Whether the check that compares joined with single answers runs only `allowed_batch_sizes`, because XLA would
    compile any other size."""

    pad_variable_length_inputs: bool = False
    """Whether inputs of different lengths are joined: each is padded with its first value to the longest length."""

    larger: Literal["alone", "split", "refuse"] = "alone"
    """What happens to a request with more rows than `max_batch_size`. `split` is not the default: if a model's rows
    depend on each other, a split request gets different answers."""

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
        """The size that a batch of this many rows is padded to."""
        return next((size for size in self.allowed_batch_sizes if size >= rows), rows)

    def up_to(self, rows: int) -> BatchingConfig:
        """A copy of this configuration whose batches have at most `rows` rows, which must be an allowed size."""
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
            "max_execution_batch_size requires max_batch_size", got=Plain(f"none in {path}")
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
