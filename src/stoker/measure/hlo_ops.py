"""Reads class and TensorFlow operation of each instruction from a compiled program of XLA."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.measure.kernel_class import KernelClass

CONTAINERS = frozenset(
    ["while", "conditional", "call", "async-start", "async-update", "async-done", "tuple"]
)
"""Opcodes of instructions that run other instructions: on a CPU, their events contain the others' events."""

_STRUCTURE = frozenset(
    [
        "parameter",
        "constant",
        "broadcast",
        "bitcast",
        "tuple",
        "get-tuple-element",
        "reshape",
        "convert",
        "iota",
    ]
)
"""Opcodes that do not determine the class of a fusion."""

_TRANSPOSES = frozenset(["transpose", "copy"])
_PRODUCTS = frozenset(["convolution", "dot", "ragged-dot"])
_COLLECTIVES = re.compile(r"^(all-|reduce-scatter|collective-)")
_OTHER = frozenset(
    [
        "sort",
        "scatter",
        "gather",
        "fft",
        "rng",
        "rng-bit-generator",
        "reduce-window",
        "select-and-scatter",
        "custom-call",
        "infeed",
        "outfeed",
        "send",
        "recv",
        "send-done",
        "recv-done",
        "cholesky",
        "triangular-solve",
    ]
)
_TARGETS: tuple[tuple[KernelClass, re.Pattern[str]], ...] = (
    ("normalization", re.compile(r"norm", re.IGNORECASE)),
    ("products", re.compile(r"conv|gemm|matmul|cublas|dot|fmha|attention|onednn", re.IGNORECASE)),
    ("collectives", re.compile(r"nccl|collective", re.IGNORECASE)),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class HloOp:
    """One instruction of a compiled program."""

    kind: KernelClass | None
    """Its class; None for a loop, a branch or a call: its kernels are classified by their names."""

    scope: str
    """Name of the TensorFlow operation that it comes from; for a fusion, of the operation of its result."""

    casts: bool
    """Whether it only changes a dtype."""

    runs_others: bool
    """Whether it is a loop, a branch or a call, which run other instructions."""


def hlo_ops(module: Any) -> dict[str, HloOp]:
    """Describe the instructions of a program: name -> description.

    Args:
        module: An `HloModuleProto`.
    """
    computations = {each.id: each for each in module.computations}
    found = {}
    for computation in module.computations:
        operands = {each.id: each for each in computation.instructions}
        for instruction in computation.instructions:
            fused = _opcodes(instruction, computations)
            found[instruction.name] = HloOp(
                kind=_kind(instruction, computations, operands),
                scope=instruction.metadata.op_name,
                casts=bool(fused) and "convert" in fused and not fused - _STRUCTURE,
                runs_others=instruction.opcode in CONTAINERS,
            )
    return found


def _opcodes(instruction: Any, computations: Mapping[int, Any]) -> set[str]:
    """The opcode of an instruction; for a fusion, all opcodes inside it."""
    if instruction.opcode != "fusion":
        return {instruction.opcode}
    inner: Iterable[Any] = (
        each
        for called in instruction.called_computation_ids
        if called in computations
        for each in computations[called].instructions
    )
    return {each.opcode for each in inner}


def _wrapped(
    instruction: Any, computations: Mapping[int, Any], operands: Mapping[int, Any]
) -> tuple[Any, Mapping[int, Any]] | None:
    """The instruction that an asynchronous one runs, and the computation around it (ID -> instruction), or None."""
    while instruction is not None and instruction.opcode in ("async-update", "async-done"):
        instruction = operands.get(instruction.operand_ids[0]) if instruction.operand_ids else None
    for called in () if instruction is None else instruction.called_computation_ids:
        inner = {each.id: each for each in computations[called].instructions}
        if (root := inner.get(computations[called].root_id)) is not None:
            return root, inner
    return None


def _kind(
    instruction: Any, computations: Mapping[int, Any], operands: Mapping[int, Any]
) -> KernelClass | None:
    if instruction.opcode.startswith("async-"):
        wrapped = _wrapped(instruction, computations, operands)
        return None if wrapped is None else _kind(wrapped[0], computations, wrapped[1])
    if instruction.opcode in CONTAINERS:
        return None
    opcodes = _opcodes(instruction, computations)
    if instruction.opcode == "custom-call":
        target = instruction.custom_call_target
        return next((kind for kind, pattern in _TARGETS if pattern.search(target)), "other")
    if opcodes & _PRODUCTS:
        return "products"
    if any(_COLLECTIVES.match(opcode) for opcode in opcodes):
        return "collectives"
    if instruction.opcode in ("copy-start", "copy-done") or _is_plain_copy(instruction, operands):
        return "copies"
    work = opcodes - _STRUCTURE
    if work and work <= _TRANSPOSES:
        return "transposes"
    return "other" if work and work <= _OTHER else "elementwise"


def _is_plain_copy(instruction: Any, operands: Mapping[int, Any]) -> bool:
    """Whether an instruction is a copy that leaves the layout unchanged."""
    if instruction.opcode != "copy" or len(instruction.operand_ids) != 1:
        return False
    source = operands.get(instruction.operand_ids[0])
    if source is None:
        return False
    before, after = (each.shape.layout.minor_to_major for each in (source, instruction))
    return list(before) == list(after)
