"""Floating-point operations of single operations, from the shapes of what enters and leaves them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

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
    """2 x rows x columns x what is summed over, which either factor may know."""
    left, right = (body.shape(reference) for reference in body.inputs(node)[:2])
    turned_left = _says(node, "transpose_a", "adj_x")
    turned_right = _says(node, "transpose_b", "adj_y")
    summed = _dimension(left, -2 if turned_left else -1)
    if summed is None:
        summed = _dimension(right, -1 if turned_right else -2)
    return _times(2, _product(body.shape(node.name)), summed)


def _convolution(body: Body, node: Any) -> int | None:
    """2 x outputs x what each sums over: the filter, [*window, channels in, channels out]."""
    kernel = body.shape(body.inputs(node)[1])
    return _times(2, _product(body.shape(node.name)), _product(kernel[:-1] if kernel else None))


def _depthwise(body: Body, node: Any) -> int | None:
    """As `_convolution`, but an output sums over one channel: [height, width, channels, outputs]."""
    kernel = body.shape(body.inputs(node)[1])
    return _times(2, _product(body.shape(node.name)), _product(kernel[:2] if kernel else None))


def _transposed_convolution(body: Body, node: Any) -> int | None:
    """Every number that enters is spread over the filter, [*window, channels out, channels in]."""
    _, kernel, given = (body.shape(reference) for reference in body.inputs(node)[:3])
    return _times(2, _product(given), _product(kernel[:-1] if kernel else None))


def _einsum(body: Body, node: Any) -> int | None:
    """2 x the product of all indices' sizes."""
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
            # What is broadcast is 1 in one of them.
            before = sizes.get(index)
            sizes[index] = max(before, size) if before and size else before or size
    return _times(2, *sizes.values())


def _indices(term: str, rank: int) -> list[str | int]:
    """Names of a term's dimensions; those of an ellipsis are counted from its end."""
    left, dots, right = term.partition("...")
    hidden = range(rank - len(left) - len(right), 0, -1) if dots else ()
    return [*left, *hidden, *right]


_GATES = {b"lstm": 4, b"gru": 3, b"rnn_relu": 1, b"rnn_tanh": 1}
"""Products of each kind that a step of a recurrent cell takes."""


def _cudnn_rnn(body: Body, node: Any) -> int | None:
    """2 x time x batch x gates x units x (what enters + units), of one layer in one direction."""
    given, state = (body.shape(reference) for reference in body.inputs(node)[:2])
    if given is None or state is None or state[0] != 1:
        return None
    units, features = state[2], given[2]
    both = None if units is None or features is None else units + features
    return _times(2, given[0], given[1], _GATES[node.attr["rnn_mode"].s], units, both)


Formula = Callable[[Body, Any], "int | None"]
"""A body and a node of it -> its operations; None where a size is not known."""

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
"""Operations with products inside that no formula here is for: said, never passed over."""
