"""Operations of a graph whose shapes are known, forward and backward pass alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import tensorflow as tf

from stoker.measure.flops_formulas import CONVOLUTIONS, PRODUCTS, UNCOUNTED, Formula
from stoker.measure.flops_graph import Body, Shape

Kind = Literal["convolutions", "products of matrices"]

Work = Mapping[tuple[Kind, str], int]
"""Kind and type -> floating-point operations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """What was counted."""

    work: Work = field(default_factory=dict)
    """A multiplication and an addition are two."""

    unknown: tuple[str, ...] = ()
    """What could not be counted, each a reason not to give a figure."""

    notes: tuple[str, ...] = ()
    """What is more or less than the count says."""

    placed: tuple[Any, ...] = ()
    """Nodes that the runtime places one by one, as they are defined."""

    passes: int = 0
    """Loops over a dataset whose turn computes something."""

    outside: int = 0
    """Operations outside of those loops, where there are any."""

    @property
    def total(self) -> int:
        """Operations of all kinds."""
        return sum(self.work.values())

    def plus(self, other: Tally, *, times: int = 1) -> Tally:
        """Both, the other one so often."""
        work = dict(self.work)
        for key, operations in other.work.items():
            work[key] = work.get(key, 0) + times * operations
        return Tally(
            work=work,
            unknown=tuple(dict.fromkeys((*self.unknown, *other.unknown))),
            notes=tuple(dict.fromkeys((*self.notes, *other.notes))),
            placed=(*self.placed, *other.placed),
            passes=self.passes + other.passes,
            outside=self.outside + times * other.outside,
        )

    def all_on_device(self) -> Tally:
        """The same, inside of what XLA compiles: no operation of it is placed by itself."""
        return replace(self, placed=())

    def in_a_pass(self) -> Tally:
        """The same as a turn of a loop over a dataset."""
        return replace(self, passes=self.passes + bool(self.total), outside=0)


def tally_of(graph: Any) -> Tally:
    """Count the products and convolutions of a graph, without what its functions do.

    Args:
        graph: A definition with shapes; every node of it is run once.
    """
    body, tally = Body(graph.node), Tally()
    for node in graph.node:
        tally = tally.plus(_of_node(body, node)) if node.op in _COUNTED else tally
    return replace(tally, outside=tally.total)


def _of_node(body: Body, node: Any) -> Tally:
    if node.op in UNCOUNTED:
        return Tally(notes=(f"{node.name}: {node.op} is not counted",))
    kind: Kind = "convolutions" if node.op in _CONVOLUTIONS else "products of matrices"
    operations = _FORMULAS[node.op](body, node)
    if operations is None:
        return Tally(unknown=(f"{node.name}: {node.op} of a size that is not known",))
    return Tally(work={(kind, _type(node)): operations}) if operations else Tally()


def _type(node: Any) -> str:
    key = next(name for name in ("T", "Ta") if name in node.attr)
    return str(tf.as_dtype(node.attr[key].type).name)


def _product(shape: Shape | None) -> int | None:
    known = [side for side in shape or () if side is not None]
    return math.prod(known) if shape is not None and len(known) == len(shape) else None


def _filter_gradient(window: slice) -> Formula:
    """As the convolution itself: 2 x what came out of it x what each of that summed over."""

    def operations(body: Body, node: Any) -> int | None:
        kernel, given = body.shape(node.name), body.shape(body.inputs(node)[2])
        summed, numbers = _product(kernel[window] if kernel else None), _product(given)
        return None if summed is None or numbers is None else 2 * numbers * summed

    return operations


def _depthwise_input_gradient(body: Body, node: Any) -> int | None:
    _, kernel, given = (body.shape(reference) for reference in body.inputs(node)[:3])
    summed, numbers = _product(kernel[:2] if kernel else None), _product(given)
    return None if summed is None or numbers is None else 2 * numbers * summed


def _cudnn_gradient(body: Body, node: Any) -> int | None:
    """Twice the forward pass, whose arguments its own begin with."""
    forward = PRODUCTS["CudnnRNNV3"](body, node)
    return None if forward is None else 2 * forward


_CONVOLUTIONS: dict[str, Formula] = {
    **CONVOLUTIONS,
    "Conv2DBackpropFilter": _filter_gradient(slice(0, -1)),
    "Conv3DBackpropFilterV2": _filter_gradient(slice(0, -1)),
    "DepthwiseConv2dNativeBackpropFilter": _filter_gradient(slice(0, 2)),
    "DepthwiseConv2dNativeBackpropInput": _depthwise_input_gradient,
}

_FORMULAS: dict[str, Formula] = {
    **_CONVOLUTIONS,
    **PRODUCTS,
    "CudnnRNNBackpropV3": _cudnn_gradient,
}
"""Those of a forward pass, as `stoker train` counts them, and their gradients that are operations of
their own; that of a product of matrices is a product of matrices."""

_COUNTED = frozenset(_FORMULAS) | UNCOUNTED
