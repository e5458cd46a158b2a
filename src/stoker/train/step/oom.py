"""Makes a step fit in memory: with a smaller batch and more passes, the update stays the same."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.core.user_code import first_line

_SAYS_MEMORY = re.compile(
    r"\bOOM\b|out of memory|failed to allocate|cannot allocate memory|ALLOC_FAILED|bad_alloc",
    re.IGNORECASE,
)
"""Matches the messages of TensorFlow, XLA, CUDA's libraries and the host for lack of memory. The code
RESOURCE_EXHAUSTED alone is not enough: it is also used for open files, quotas and gRPC messages."""

_TENSOR = re.compile(r"shape\[(?P<shape>[\d,]*)\] and type (?P<dtype>\w+) on (?P<device>\S+)")
_WANTED = re.compile(r"allocate (?P<size>[\d.]+ ?(?:[KMGT]i?B|bytes))")


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """How a replica's share of a step is divided into passes."""

    batch_size: int
    """Number of samples of a replica in one pass."""

    accumulate: int
    """Number of passes per update."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reduction:
    """The change to a smaller batch after a step that did not fit in memory; it is recorded in the run."""

    before: Split
    after: Split

    why: str
    """What did not fit in memory, for the user."""

    @property
    def message(self) -> str:
        """One line for the log."""
        return (
            f"out of memory ({self.why}): train.batch_size {self.before.batch_size} -> "
            f"{self.after.batch_size}, train.accumulate {self.before.accumulate} -> "
            f"{self.after.accumulate}; the global batch stays, BatchNorm sees "
            f"{self.after.batch_size} samples at a time"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a step failed because the device or the host ran out of memory."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, tf.errors.OpError) and bool(_SAYS_MEMORY.search(str(error)))


def what_did_not_fit(error: BaseException) -> str:
    """Return what an error says about the size: `400 MiB for a float tensor of 10000 x 10000 on CPU:0`."""
    text = str(error)
    tensor = _TENSOR.search(text)
    if tensor:
        sides = [int(side) for side in tensor["shape"].split(",") if side]
        device = tensor["device"].split("device:")[-1]
        named = f"a {tensor['dtype']} tensor of {' x '.join(map(str, sides)) or 'one value'}"
        return f"{_size(math.prod(sides), tensor['dtype'])} for {named} on {device}"
    wanted = _WANTED.search(text)
    return wanted["size"] if wanted else first_line(error) or "no more memory"


def reduce_batch(split: Split, error: BaseException) -> Reduction:
    """Halve the batch and double the number of passes, so that an update has the same samples.

    Args:
        split: The current batch and passes.
        error: The error of the step, for which `is_out_of_memory` is True.

    Raises:
        ConfigError: The batch size is odd or 1.
    """
    if split.batch_size % 2:
        raise does_not_fit(split, error)
    after = Split(batch_size=split.batch_size // 2, accumulate=split.accumulate * 2)
    return Reduction(before=split, after=after, why=what_did_not_fit(error))


def does_not_fit(
    split: Split, error: BaseException, *, uncut: str = "", accumulates: bool = True
) -> ConfigError:
    """Return the error that ends the run, with the size.

    Args:
        split: The current batch and passes.
        error: The error of the step.
        uncut: Why the batch is not reduced although the settings allow it; empty if the settings do not
            allow it, or if the batch is as small as possible.
        accumulates: Whether an update can consist of several passes.
    """
    less = f"Set train.batch_size to {split.batch_size // 2} or less"
    kept = " (train.accumulate keeps the global batch)" if accumulates else ""
    reduced = "" if uncut else ", or train.on_oom: reduce with an even batch size"
    smallest = (
        "Not even one sample fits: use a smaller model, train.remat, or mixed precision."
        if split.batch_size == 1
        else f"{less}{kept}, use train.remat{reduced}."
    )
    because = f"; its batch is not reduced: {uncut}" if uncut else ""
    return ConfigError(
        f"a step of train.batch_size {split.batch_size} does not fit in memory{because}",
        got=Plain(f"out of memory: {what_did_not_fit(error)}"),
        fix=smallest,
    )


def _size(values: int, dtype: str) -> str:
    names = {"float": "float32", "half": "float16", "double": "float64"}
    try:
        size = float(values * tf.as_dtype(names.get(dtype, dtype)).size)
    except TypeError:
        return f"{values} values"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
