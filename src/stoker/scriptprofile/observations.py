"""What the watcher observes in a script besides its loops: lines, stages of inputs, functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A line of one of the user's files."""

    file: str
    """Absolute path; empty if unknown."""

    line: int
    """Line number, from 1."""

    def __str__(self) -> str:
        """`train.py:12`."""
        return f"{Path(self.file).name}:{self.line}" if self.file else "?"


NOWHERE = Place(file="", line=0)
"""Used if no line of the user's is known."""


def to_place(value: object) -> Place | None:
    """A place from its JSON form; None if it is unknown."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and value[0]:
        return Place(file=str(value[0]), line=int(value[1]))
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One call that creates a dataset."""

    kind: str
    """The method's name: `map`, `from_generator`."""

    place: Place
    """The line of the call."""

    in_user_code: bool
    """Whether the user's own code called it, and not Keras or another library."""

    arguments: Mapping[str, Any]
    """Its numeric arguments."""

    python_calls: tuple[Place, ...]
    """The line of `tf.py_function` or `tf.numpy_function` inside it."""

    random: bool
    """Whether it draws random numbers."""

    element_bytes: int | None
    """Bytes of one of its elements, if every dimension is known."""

    dtypes: tuple[str, ...]
    """Dtypes of the parts of an element."""

    cardinality: int
    """Elements per pass; negative if infinite or unknown."""

    operations: tuple[str, ...] = ()
    """Types of the TensorFlow operations in a map's function."""

    row_bytes: int | None = None
    """Bytes per row of an element, if only the number of rows is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """The Python object that makes the batches of a `fit`."""

    kind: str
    """`PyDataset`, `generator` or `DataLoader`."""

    name: str
    """Name of its class; empty for a generator."""

    place: Place | None
    """The line of its code."""

    workers: int
    """`workers` of a PyDataset."""

    processes: bool
    """Whether its workers are processes instead of threads."""

    def label(self) -> str:
        """`the PyDataset Images (workers=1)`."""
        if self.kind != "PyDataset":
            return f"the {self.kind} {self.name}".strip()
        processes = ", use_multiprocessing=True" if self.processes else ""
        return f"the PyDataset {self.name} (workers={self.workers}{processes})"


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchHook:
    """What a callback of a `fit` does before or after each batch."""

    name: str
    """Name of the callback's class."""

    hook: str
    """The method's name: `on_train_batch_end`."""

    place: Place | None
    """The first line of its code; None if it is not the user's."""

    step_s: float
    """Mean seconds per step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A stage as TensorFlow ran it."""

    name: str
    """TensorFlow's name: `ParallelMapV2`, `MapAndBatch`."""

    cpu_s: float
    """CPU time so far, seconds."""

    elements: int
    """Elements produced so far."""

    ratio: float
    """Elements read for each element produced; 0 if that varies."""

    per_output: float
    """Elements per element of the last interleave or flat_map above it; 1 without one."""

    buffered: int
    """Number of buffered elements."""

    buffered_bytes: int
    """Bytes of the buffered elements."""

    parameters: Mapping[str, tuple[float, bool]]
    """Name -> value, and whether TensorFlow tunes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A `tf.function` that Python called, identified by its code."""

    name: str
    place: Place
    calls: int
    traces: int
    made: int
    """Number of tf.functions made of this code."""
    causes: tuple[Mapping[str, str], ...]
    """For the first traces: argument -> dtype and shape, or the Python value."""
    trace_s: float
    """Duration of the calls that traced, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstPass:
    """The first of several passes over a dataset with a cache, which it fills."""

    longer_s: float
    """Its additional duration compared with a later pass, seconds; for a loop of the user's own, its additional
    wait for input."""

    wall_s: float
    """Its wall time, seconds."""

    away: float
    """The share of it that other programs on the machine caused."""

    nodes: tuple[Node, ...]
    """The stages that TensorFlow ran meanwhile, last one first; empty if unknown."""

    nodes_s: float
    """From its start until the stages were read, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WallPart:
    """The wall time of one line in a process, without nested parts."""

    kind: str
    """`imports`, `fit`, `validation`, `evaluate`, `predict`, `callbacks` or `saving`."""

    place: Place
    wall_s: float
    cpu_s: float
    """CPU time of all threads meanwhile."""
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """The operations of a step, and the peak of the device; either may be unknown, with a reason."""

    operations: float | None = None
    """Floating-point operations of matrix products and convolutions, for one step of
    `split_step`: forward, backward, and recomputation."""

    no_operations: str = ""
    """Why they are unknown."""

    notes: tuple[str, ...] = ()
    """How the count may differ from the real operations."""

    peak_per_s: float | None = None
    """Operations per second of the device, with each kind at its own peak."""

    peak_of: str = ""
    """Kinds and dtype of the measured peak."""

    no_peak: str = ""
    """Why it is missing."""

    on_cpu: str = ""
    """The operations of the step that are placed on the CPU although a GPU exists; empty: none, or no GPU."""

    def achieved_per_s(self, step_s: float) -> float | None:
        """Operations per second, for a step of this duration."""
        return None if self.operations is None else self.operations / step_s

    def mfu(self, step_s: float) -> float | None:
        """MFU, for a step of this duration."""
        achieved = self.achieved_per_s(step_s)
        return None if achieved is None or not self.peak_per_s else achieved / self.peak_per_s

    def why_none(self) -> str:
        """Why the MFU is unknown."""
        return self.no_operations or self.no_peak


BUSY = 0.2
"""A share `waited` from which on the machine was busy with other work."""
