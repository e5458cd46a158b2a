"""Lists the operations of a traced step, including operations of called functions, and where they run."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from stoker.core.errors import Finding
from stoker.internals.tensorflow_internals import called_function, collected_nodes

_OWN_SCOPE = re.compile(r"stoker(_\d+)?")
"""Name of a scope that contains Stoker's own operations, which are not reported, e.g. the clock of the input
wait. TensorFlow appends a number if a scope's name occurs again."""

SHOWN = 5
"""Maximum number of operations that a finding names."""

_PLUMBING = re.compile(r"(while|replica|cond|StatefulPartitionedCall)(_\d+)?")
"""Parts of an operation's name that come from loops, replicas and calls, not from the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOperation:
    """An operation of a step."""

    operation: tf.Operation

    compiled: bool
    """Whether XLA compiles it, because it is in a function with `jit_compile=True`."""

    @property
    def kind(self) -> str:
        """Its TensorFlow type, e.g. `MatMul`."""
        return str(self.operation.type)

    @property
    def scope(self) -> str:
        """The layers that it belongs to, according to its name: `model/block/dense`."""
        parts = str(self.operation.name).split("/")[:-1]
        return "/".join(part for part in parts if not _PLUMBING.fullmatch(part))

    @property
    def is_own(self) -> bool:
        """Whether it belongs to Stoker."""
        return is_stoker_scope(str(self.operation.name))

    @property
    def is_gradient(self) -> bool:
        """Whether it belongs to the backward pass."""
        return "gradient_tape" in str(self.operation.name)


def is_stoker_scope(name: str) -> bool:
    """Return whether an operation with this name is in a scope of Stoker."""
    return any(_OWN_SCOPE.fullmatch(part) for part in name.split("/"))


def step_operations(step: Any) -> Iterator[StepOperation]:
    """Yield all operations of a step's graph; those of a called function once for each call.

    Args:
        step: A concrete function: `run.get_concrete_function(...)`.
    """
    yield from _walk(step.graph, compiled=False)


def _walk(graph: Any, *, compiled: bool) -> Iterator[StepOperation]:
    for operation in graph.get_operations():
        yield StepOperation(operation=operation, compiled=compiled)
        for name in _functions_of(operation.node_def):
            function = called_function(graph, name)
            if function is not None:
                must = operation.node_def.attr["_XlaMustCompile"].b
                yield from _walk(function.graph, compiled=compiled or must)


def _functions_of(node: Any) -> list[str]:
    names: list[str] = []
    for value in node.attr.values():
        kind = value.WhichOneof("value")
        if kind == "func":
            names.append(value.func.name)
        elif kind == "list":
            names += [function.name for function in value.list.func]
    return names


def named(operations: Sequence[str]) -> str:
    """Join the first names, without duplicates: `a, b and 3 more`."""
    distinct = list(dict.fromkeys(operations))
    shown = ", ".join(distinct[:SHOWN])
    more = len(distinct) - SHOWN
    return f"{shown} and {more} more" if more > 0 else shown


_MOVES_ONLY = re.compile(
    r"_.*|Const|Identity|IdentityN|NoOp|Enter|Exit|Merge|Switch|NextIteration|LoopCond|While|If"
    r"|StatelessWhile|StatelessIf|.*Iterator.*|.*Dataset.*|.*PyFunc.*|Placeholder.*|Timestamp"
    r"|.*Variable.*|VarHandleOp|StatefulPartitionedCall|PartitionedCall|TensorList.*|Fill|ZerosLike"
    r"|OnesLike|Cast|Reshape|ExpandDims|Squeeze|Slice|StridedSlice|Pack|Unpack|ConcatV2"
)
"""Operations that may run on the host: they move, cut or create values, control the loop or read the input,
and cost little there."""

_FLOATS = {tf.float16, tf.bfloat16, tf.float32, tf.complex64}
"""Dtypes of a step's computation. Clocks use float64, and counters and shapes use integers."""


def check_placement(nodes: Iterable[Any], *, accelerator: str = "GPU:") -> Finding | None:
    """Warn if the step computes on the CPU although an accelerator is used.

    Args:
        nodes: Nodes from `collected_nodes`, recorded at the first run of the step.
        accelerator: Part of the names of the devices on which all work should run.

    Returns:
        A warning that names the float operations on other devices; None if there are none, or if nothing
        ran on the accelerator. Tested with two logical CPU devices, but not with a GPU.
    """
    placed = list(nodes)
    work = [
        f"{node.op} {_place(node.name)}"
        for node in placed
        if accelerator not in node.device and _is_work(node)
    ]
    if not work or not any(accelerator in node.device for node in placed):
        return None
    return Finding.warning(
        "on_host",
        f"operations of the step run on the CPU although {accelerator.strip(':')} is available: "
        f"{named(work)}",
        fix="Remove tf.device from the model, or replace operations that have no GPU kernel.",
    )


def _is_work(node: Any) -> bool:
    if _MOVES_ONLY.fullmatch(node.op) or is_stoker_scope(node.name):
        return False
    kinds = [node.attr[name].type for name in ("T", "dtype", "DstT") if name in node.attr]
    return any(tf.as_dtype(kind) in _FLOATS for kind in kinds if kind)


def _place(name: str) -> str:
    parts = [part for part in name.split("/") if not re.match(r"(while|body|cond|Func)", part)]
    return "/".join(part for part in parts if not part.startswith("_"))


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlacement:
    """Variables and operations on one device."""

    device: str
    """Short name of the device, e.g. `GPU:0`."""

    variables: int = 0
    """Number of variables."""

    variables_bytes: int = 0
    """Total size of the variables, bytes."""

    operations: int = 0
    """Number of operations of the compiled step."""

    kinds: tuple[str, ...] = ()
    """Types of operations with their counts, the most frequent first."""


def traced_operations(run: Callable[[], Any]) -> dict[str, Counter[str]]:
    """Call a function that compiles something, and return the placement of its operations.

    Args:
        run: The function; it must trace and compile something, because operations are recorded only then.

    Returns:
        Device -> number of operations of each type on it, after TensorFlow's own optimization. A program
        that XLA compiles is a single operation.
    """
    found: dict[str, Counter[str]] = {}
    with collected_nodes() as nodes:
        run()
    for node in nodes:
        if node.device and node.op not in ("_Arg", "_Retval", "NoOp"):
            found.setdefault(_short(node.device), Counter())[node.op] += 1
    return found


def placements(
    variables: Iterable[Any], operations: dict[str, Counter[str]], *, shown: int = 6
) -> list[DevicePlacement]:
    """Return an entry for each device that has a variable or runs an operation.

    Args:
        variables: Keras variables; a variable with a copy on several replicas counts on each of them.
        operations: The result of `traced_operations`.
        shown: Maximum number of types of operations to name.
    """
    held: dict[str, list[int]] = {}
    for variable in variables:
        size = math.prod(variable.shape) * tf.as_dtype(variable.dtype).size
        for part in getattr(variable.value, "values", [variable.value]):
            held.setdefault(_short(part.device), []).append(size)
    return [
        DevicePlacement(
            device=device,
            variables=len(held.get(device, [])),
            variables_bytes=sum(held.get(device, [])),
            operations=sum(operations.get(device, Counter()).values()),
            kinds=tuple(kind for kind, _ in operations.get(device, Counter()).most_common(shown)),
        )
        for device in sorted({*held, *operations})
    ]


def _short(device: str) -> str:
    return device.rpartition("device:")[2] or device
