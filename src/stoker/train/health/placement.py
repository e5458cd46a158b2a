"""Finds operations of a step that run on the CPU although an accelerator is available."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context  # type: ignore[attr-defined]  # not in the stubs

from stoker.core.finding import Finding
from stoker.train.health.step_graph import is_stoker_scope, named

_MOVES_ONLY = re.compile(
    r"_.*|Const|Identity|IdentityN|NoOp|Enter|Exit|Merge|Switch|NextIteration|LoopCond|While|If"
    r"|StatelessWhile|StatelessIf|.*Iterator.*|.*Dataset.*|.*PyFunc.*|Placeholder.*|Timestamp"
    r"|.*Variable.*|VarHandleOp|StatefulPartitionedCall|PartitionedCall|TensorList.*|Fill|ZerosLike"
    r"|OnesLike|Cast|Reshape|ExpandDims|Squeeze|Slice|StridedSlice|Pack|Unpack|ConcatV2"
)
"""Operations that move, cut or create values, control the loop or read the input: they belong to
the host, or cost little there."""

_FLOATS = {tf.float16, tf.bfloat16, tf.float32, tf.complex64}
"""Dtypes of a step's computation. float64 is used by clocks; integers count steps and shapes."""


@contextmanager
def collected_placements() -> Iterator[list[Any]]:
    """Record where the runtime places the operations of functions that are first called inside.

    A function is placed once, at its first call, which must happen inside.

    Yields:
        A list, filled at the end with nodes (`op`, `name`, `device`, `attr`).
    """
    # The only way in TensorFlow 2 to see a function after placement.
    eager = context.context()
    nodes: list[Any] = []
    eager.enable_graph_collection()
    try:
        yield nodes
        for function in eager.export_run_metadata().function_graphs:
            for part in function.partition_graphs:
                nodes.extend(part.node)
    finally:
        eager.disable_graph_collection()


def check_placement(nodes: Iterable[Any], *, accelerator: str = "GPU:") -> Finding | None:
    """Warn if the step computes on the CPU although an accelerator is used.

    Args:
        nodes: Nodes from `collected_placements`, recorded at the first run of the step.
        accelerator: Part of the names of the devices on which all work should run.

    Returns:
        A warning that names the float operations on other devices; None if there are none, or
        nothing ran on the accelerator. Not run on a GPU: tested with two logical CPU devices.
    """
    placed = list(nodes)
    work = [
        f"{node.op} {_place(node.name)}"
        for node in placed
        if accelerator not in node.device and _is_work(node)
    ]
    if not work or not any(accelerator in node.device for node in placed):
        return None
    return Finding(
        kind="on_host",
        severity="warning",
        message=f"operations of the step run on the CPU while {accelerator.strip(':')} is there: "
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
