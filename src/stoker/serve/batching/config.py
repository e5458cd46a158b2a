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
"""The file in a version's folder that holds its own parameters, where those are asked for."""


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
    """Longest that the first request of a batch waits for company, microseconds; 0 waits for
    nobody: what came while the last batch ran is the next one."""

    max_enqueued_batches: int = 64
    """Most full batches that may wait; a request beyond them is refused."""

    num_batch_threads: int = 1
    """Batches of one signature that run at once."""

    allowed_batch_sizes: tuple[int, ...] = ()
    """The sizes that a batch is padded to, ascending; any size if empty."""

    only_allowed_sizes: bool = False
    """Whether the check for joining requests may not run other sizes: XLA would compile them."""

    pad_variable_length_inputs: bool = False
    """Whether inputs of other lengths are padded to the longest, each with its first value."""

    larger: Literal["alone", "split", "refuse"] = "alone"
    """What becomes of a request of more rows than a batch may have. In pieces a model that looks
    across rows answers otherwise, so that is done only where it is asked for."""

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
        """The size that a batch of so many rows is run with."""
        return next((size for size in self.allowed_batch_sizes if size >= rows), rows)

    def up_to(self, rows: int) -> BatchingConfig:
        """The same with batches of at most this many rows, limited to one of the allowed sizes."""
        sizes = tuple(size for size in self.allowed_batch_sizes if size <= rows)
        return dataclasses.replace(self, max_batch_size=rows, allowed_batch_sizes=sizes)


def read_batching_parameters(path: Path) -> BatchingConfig:
    """TensorFlow Serving's `batching_parameters_file`; what it leaves out is as TensorFlow Serving has it.

    Raises:
        ConfigError: the file is not there, or not in its form.
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
