"""Counts the floating-point operations of a graph with known shapes, in the forward and backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import tensorflow as tf

from stoker.measure.flops_graph import Body, Shape


def _says(node: Any, *names: str) -> bool:
    return any(name in node.attr and node.attr[name].b for name in names)


def _product(shape: Shape | None) -> int | None:
    known = [size for size in shape or () if size is not None]
    return math.prod(known) if shape is not None and len(known) == len(shape) else None


def _times(*factors: int | None) -> int | None:
    known = [factor for factor in factors if factor is not None]
    return math.prod(known) if len(known) == len(factors) else None


def _dimension(shape: Shape | None, place: int) -> int | None:
    return shape[place] if shape else None


def _matrix_product(body: Body, node: Any) -> int | None:
    """2 x rows x columns x length of the summed axis, read from a factor whose shape is known."""
    left, right = (body.shape(reference) for reference in body.inputs(node)[:2])
    turned_left = _says(node, "transpose_a", "adj_x")
    turned_right = _says(node, "transpose_b", "adj_y")
    summed = _dimension(left, -2 if turned_left else -1)
    if summed is None:
        summed = _dimension(right, -1 if turned_right else -2)
    return _times(2, _product(body.shape(node.name)), summed)


def _convolution(body: Body, node: Any) -> int | None:
    """2 x outputs x products per output; the filter is [*window, channels in, channels out]."""
    kernel = body.shape(body.inputs(node)[1])
    return _times(2, _product(body.shape(node.name)), _product(kernel[:-1] if kernel else None))


def _depthwise(body: Body, node: Any) -> int | None:
    """Like `_convolution`, but an output sums over one channel; filter: [height, width, channels, outputs]."""
    kernel = body.shape(body.inputs(node)[1])
    return _times(2, _product(body.shape(node.name)), _product(kernel[:2] if kernel else None))


def _transposed_convolution(body: Body, node: Any) -> int | None:
    """2 x inputs x products per input value; the filter is [*window, channels out, channels in]."""
    _, kernel, given = (body.shape(reference) for reference in body.inputs(node)[:3])
    return _times(2, _product(given), _product(kernel[:-1] if kernel else None))


def _einsum(body: Body, node: Any) -> int | None:
    """2 x the product of the sizes of all indices."""
    references = body.inputs(node)
    if len(references) < 2:
        return 0
    terms, _, result = node.attr["equation"].s.decode().partition("->")
    sizes: dict[str | int, int | None] = {}
    for term, reference in zip([*terms.split(","), result], [*references, node.name], strict=True):
        shape = body.shape(reference)
        if shape is None:
            return None
        for index, size in zip(_indices(term, len(shape)), shape, strict=True):
            # A broadcast dimension has the size 1 in one of the inputs.
            before = sizes.get(index)
            sizes[index] = max(before, size) if before and size else before or size
    return _times(2, *sizes.values())


def _indices(term: str, rank: int) -> list[str | int]:
    """Names of the dimensions of an einsum's term; dimensions of an ellipsis are numbered from the last one."""
    left, dots, right = term.partition("...")
    hidden = range(rank - len(left) - len(right), 0, -1) if dots else ()
    return [*left, *hidden, *right]


_GATES = {b"lstm": 4, b"gru": 3, b"rnn_relu": 1, b"rnn_tanh": 1}
"""Type of a recurrent cell -> number of its gates."""


def _cudnn_rnn(body: Body, node: Any) -> int | None:
    """2 x time steps x batch size x gates x units x (inputs + units), for one layer in one direction."""
    given, state = (body.shape(reference) for reference in body.inputs(node)[:2])
    if given is None or state is None or state[0] != 1:
        return None
    units, features = state[2], given[2]
    both = None if units is None or features is None else units + features
    return _times(2, given[0], given[1], _GATES[node.attr["rnn_mode"].s], units, both)


Formula = Callable[[Body, Any], "int | None"]
"""(body, node) -> number of the node's operations; None if a size is unknown."""

PRODUCTS: dict[str, Formula] = {
    "MatMul": _matrix_product,
    "BatchMatMul": _matrix_product,
    "BatchMatMulV2": _matrix_product,
    "BatchMatMulV3": _matrix_product,
    "Einsum": _einsum,
    "CudnnRNNV3": _cudnn_rnn,
}

CONVOLUTIONS: dict[str, Formula] = {
    "Conv": _convolution,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "DepthwiseConv2dNative": _depthwise,
    "Conv2DBackpropInput": _transposed_convolution,
    "Conv3DBackpropInputV2": _transposed_convolution,
}

UNCOUNTED = frozenset(
    [
        "PyFunc",
        "PyFuncStateless",
        "EagerPyFunc",
        "SparseTensorDenseMatMul",
        "SparseMatrixMatMul",
        "SparseMatrixSparseMatMul",
        "Cholesky",
        "Lu",
        "MatrixInverse",
        "MatrixSolve",
        "MatrixSolveLs",
        "MatrixTriangularSolve",
        "MatrixExponential",
        "Qr",
        "Svd",
        "SelfAdjointEigV2",
        "Eig",
        "Dilation2D",
        "FFT",
        "FFT2D",
        "FFT3D",
        "IFFT",
        "IFFT2D",
        "IFFT3D",
        "RFFT",
        "RFFT2D",
        "RFFT3D",
        "IRFFT",
        "IRFFT2D",
        "IRFFT3D",
        "XlaCallModule",
        "XlaConvV2",
        "XlaDotV2",
        "XlaDot",
        "XlaConv",
        "CudnnRNN",
        "CudnnRNNV2",
        "QuantizedMatMul",
        "QuantizedConv2D",
    ]
)
"""Operations that contain products but have no formula here; each one in a graph is reported as not counted."""


Kind = Literal["convolutions", "products of matrices"]

Work = Mapping[tuple[Kind, str], int]
"""(kind, dtype) -> number of floating-point operations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tally:
    """The result of a count."""

    work: Work = field(default_factory=dict)
    """Counted floating-point operations; a multiplication and an addition are two."""

    unknown: tuple[str, ...] = ()
    """Parts that could not be counted; if there are any, no figure is reported."""

    notes: tuple[str, ...] = ()
    """How the count may differ from the real operations."""

    placed: tuple[Any, ...] = ()
    """`NodeDef`s of operations that the runtime places on devices one by one, not as part of an XLA program."""

    passes: int = 0
    """Number of loops over a dataset that compute something in each iteration."""

    outside: int = 0
    """Counted operations outside these loops."""

    @property
    def total(self) -> int:
        """Number of counted operations of all kinds."""
        return sum(self.work.values())

    def plus(self, other: Tally, *, times: int = 1) -> Tally:
        """Return this count plus `times` the other one."""
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
        """Return this count for an XLA program, whose operations are not placed one by one."""
        return replace(self, placed=())

    def in_a_pass(self) -> Tally:
        """Return this count as that of one iteration of a loop over a dataset, with no operations outside it."""
        return replace(self, passes=self.passes + bool(self.total), outside=0)


def tally_of(graph: Any) -> Tally:
    """Count the products and convolutions of a graph, without the functions that it calls.

    Args:
        graph: A `GraphDef` with shapes; each of its nodes runs once.
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


def _filter_gradient(window: slice) -> Formula:
    """Like the convolution itself: 2 x outputs of the convolution x products per output."""

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
    """Twice the operations of the forward pass, whose arguments are the first ones of the gradient."""
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
"""Operation -> its formula: operations of a forward pass, and gradients that have an operation of their
own. The gradient of a matrix product consists of matrix products."""

_COUNTED = frozenset(_FORMULAS) | UNCOUNTED
