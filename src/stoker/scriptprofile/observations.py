"""What the watcher observes of a script, apart from its loops: lines, stages of inputs, functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A line of a file of the user's."""

    file: str
    """Absolute path; empty where it is not known."""

    line: int
    """From 1."""

    def __str__(self) -> str:
        """`train.py:12`."""
        return f"{Path(self.file).name}:{self.line}" if self.file else "?"


NOWHERE = Place(file="", line=0)
"""Where no line of the user's is known."""


def to_place(value: object) -> Place | None:
    """A place from its JSON form; None if it is unknown."""
    if isinstance(value, (list, tuple)) and len(value) == 2 and value[0]:
        return Place(file=str(value[0]), line=int(value[1]))
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One call in the making of a dataset."""

    kind: str
    """The method's name: `map`, `from_generator`."""

    place: Place
    """Where it was called."""

    in_user_code: bool
    """Called by the user's own code, and not for it by Keras or another library."""

    arguments: Mapping[str, Any]
    """Those that are numbers."""

    python_calls: tuple[Place, ...]
    """Where `tf.py_function` or `tf.numpy_function` stands inside of it."""

    random: bool
    """Draws random numbers."""

    element_bytes: int | None
    """Bytes of one element that it gives, where every dimension is known."""

    dtypes: tuple[str, ...]
    """Of the parts of an element."""

    cardinality: int
    """Elements of a pass; negative where it is infinite or unknown."""

    operations: tuple[str, ...] = ()
    """Types of the TensorFlow operations in a map's function."""

    row_bytes: int | None = None
    """Bytes of one row of an element of which only the number of rows is not known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feed:
    """What makes the batches of a `fit` in Python."""

    kind: str
    """`PyDataset`, `generator` or `DataLoader`."""

    name: str
    """Of its class; empty for a generator."""

    place: Place | None
    """Where its code stands."""

    workers: int
    """Of a PyDataset."""

    processes: bool
    """Its workers are processes, and not threads."""

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
    """Of the callback's class."""

    hook: str
    """The method's name: `on_train_batch_end`."""

    place: Place | None
    """Where its code begins; None where it is not the user's."""

    step_s: float
    """Seconds a step, on the mean."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """A stage as TensorFlow really ran it."""

    name: str
    """TensorFlow's name: `ParallelMapV2`, `MapAndBatch`."""

    cpu_s: float
    """CPU time by now, seconds."""

    elements: int
    """Elements given by now."""

    ratio: float
    """Elements read for one that is given; 0 where that varies."""

    per_output: float
    """Its elements for one of the last interleave or flat_map above it; 1 where there is none."""

    buffered: int
    """Elements that it held."""

    buffered_bytes: int
    """Their bytes."""

    parameters: Mapping[str, tuple[float, bool]]
    """Name -> value, and whether TensorFlow tunes it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Function:
    """A `tf.function` that Python called, by the code that it was made of."""

    name: str
    place: Place
    calls: int
    traces: int
    made: int
    """How many tf.functions were made of this code."""
    causes: tuple[Mapping[str, str], ...]
    """For the first traces: argument -> dtype and shape, or the Python value."""
    trace_s: float
    """Time of the calls that traced, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstPass:
    """The first of several passes over a dataset that holds a cache, which it fills."""

    longer_s: float
    """How much longer it took than a later one, seconds; of a loop of the user's own, how much longer it
    waited for its input."""

    wall_s: float
    """Wall time that it took, seconds."""

    away: float
    """The share of it that would not have passed on a machine without other programs."""

    nodes: tuple[Node, ...]
    """As TensorFlow ran it meanwhile, last one first; empty where that was not seen."""

    nodes_s: float
    """From its begin to when they were read, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WallPart:
    """The wall time of one line in a process, without nested parts."""

    kind: str
    """`imports`, `fit`, `validation`, `evaluate`, `predict`, `callbacks` or `saving`."""

    place: Place
    wall_s: float
    cpu_s: float
    """CPU time of all threads during it."""
    calls: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """What a step computes, and what the device reaches; either may be unknown, and says why."""

    operations: float | None = None
    """Floating-point operations of products of matrices and convolutions, of what `split_step` calls
    a step: forward, backward, and what is computed again."""

    no_operations: str = ""
    """Why they are not known."""

    notes: tuple[str, ...] = ()
    """What is more or less than the count says, in plain words."""

    peak_per_s: float | None = None
    """Operations a second that the device reaches, each kind at its own peak."""

    peak_of: str = ""
    """Kinds, and the type that was measured."""

    no_peak: str = ""
    """Why there is none."""

    on_cpu: str = ""
    """What of the step is placed on the CPU while a GPU is there; empty: nothing, or no GPU."""

    def achieved_per_s(self, step_s: float) -> float | None:
        """Operations a second, where a step takes so long."""
        return None if self.operations is None else self.operations / step_s

    def mfu(self, step_s: float) -> float | None:
        """Achieved by peak, where a step takes so long."""
        achieved = self.achieved_per_s(step_s)
        return None if achieved is None or not self.peak_per_s else achieved / self.peak_per_s

    def why_none(self) -> str:
        """Why the MFU is unknown."""
        return self.no_operations or self.no_peak


BUSY = 0.2
"""A share `waited` from which on the machine was busy with other work."""
