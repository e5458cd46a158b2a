"""Observations of the watcher about a script except its loops: lines, stages of inputs, functions."""

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
"""The place if no line of the user's code is known."""


def to_place(value: object) -> Place | None:
    """Convert JSON to a place; None if the place is unknown."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and value[0]:
        return Place(file=str(value[0]), line=int(value[1]))
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One call that creates a dataset."""

    kind: str
    """Name of the method, e.g. `map` or `from_generator`."""

    place: Place
    """The line of the call."""

    in_user_code: bool
    """Whether the user's own code called it, not Keras or another library."""

    arguments: Mapping[str, Any]
    """Its numeric arguments, by name."""

    python_calls: tuple[Place, ...]
    """The lines of `tf.py_function` and `tf.numpy_function` in its function."""

    random: bool
    """Whether it uses random numbers."""

    element_bytes: int | None
    """Bytes of one of its elements; None if a dimension is unknown."""

    dtypes: tuple[str, ...]
    """Dtypes of the parts of an element."""

    cardinality: int
    """Elements per pass; negative if infinite or unknown."""

    operations: tuple[str, ...] = ()
    """Types of the TensorFlow operations in a map's function."""

    row_bytes: int | None = None
    """Bytes per row of an element; known if at most the number of rows is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """The Python object that makes the batches of a `model.fit`."""

    kind: str
    """`PyDataset`, `generator` or `DataLoader`."""

    name: str
    """Name of its class; empty for a generator."""

    place: Place | None
    """The line where its code starts."""

    workers: int
    """Argument `workers` of a PyDataset."""

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
    """A callback's method that `model.fit` calls before or after each batch."""

    name: str
    """Name of the callback's class."""

    hook: str
    """Name of the method, e.g. `on_train_batch_end`."""

    place: Place | None
    """The first line of its code; None if it is not the user's code."""

    step_s: float
    """Mean duration per step, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A stage of an input as TensorFlow ran it."""

    name: str
    """TensorFlow's name, e.g. `ParallelMapV2` or `MapAndBatch`."""

    cpu_s: float
    """CPU time so far, seconds."""

    elements: int
    """Elements produced so far."""

    ratio: float
    """Number of elements that it reads for each element that it produces; 0 if this number varies."""

    per_output: float
    """Number of this stage's elements that the nearest interleave or flat_map above needs for one of its own elements;
    1 if none is above."""

    buffered: int
    """Number of buffered elements."""

    buffered_bytes: int
    """Bytes of the buffered elements."""

    parameters: Mapping[str, tuple[float, bool]]
    """Parameter -> its value, and whether TensorFlow tunes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A `tf.function` that Python called, identified by its code."""

    name: str
    place: Place
    calls: int
    traces: int
    made: int
    """Number of tf.function objects created from this code."""
    causes: tuple[Mapping[str, str], ...]
    """For each of the first traces: argument -> dtype and shape, or the Python value."""
    trace_s: float
    """Duration of the calls that traced, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstPass:
    """The first of several passes over a dataset with a cache; it fills the cache."""

    longer_s: float
    """How much longer it took than a later pass, seconds; for a loop in the user's own code, how much longer it
    waited for input."""

    wall_s: float
    """Wall time of the pass, seconds."""

    away: float
    """Share of the wall time that other programs on the machine caused."""

    nodes: tuple[Node, ...]
    """The stages that TensorFlow ran during the pass, last stage first; empty if unknown."""

    nodes_s: float
    """Time from the start of the pass until the stages were read, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WallPart:
    """The wall time of one line in a process, without nested parts."""

    kind: str
    """`imports`, `fit`, `validation`, `evaluate`, `predict`, `callbacks` or `saving`."""

    place: Place
    wall_s: float
    cpu_s: float
    """CPU time of all threads during this wall time."""
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """The operations of a step, and the peak of the device. Each may be unknown; a text then says why."""

    operations: float | None = None
    """Floating-point operations of matrix products and convolutions in one step: forward, backward, and
    recomputation."""

    no_operations: str = ""
    """Why the operations are unknown."""

    notes: tuple[str, ...] = ()
    """How the count may differ from the real operations."""

    peak_per_s: float | None = None
    """Maximum operations per second of the device for this step: each kind of operation runs at its own peak."""

    peak_of: str = ""
    """Kinds of operations and dtype of the measured peak."""

    no_peak: str = ""
    """Why the peak is missing."""

    on_cpu: str = ""
    """Message about operations of the step that run on the CPU although a GPU exists; empty if none does."""

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
"""The machine was busy with other work if threads waited for a core for at least this share of their time."""
