"""Detects from the names of a device's kernels how it computed BatchNormalization in training.

cuDNN's persistent kernel reads and writes NHWC, as TensorFlow's 16-bit convolutions do on a GPU.
Without it, TensorFlow transposes the input and output of each BatchNormalization to NCHW and back,
forward and backward. Not yet checked against a trace of Stoker's own step on a GPU.

Source of the names: published traces. `cudnn::batchnorm_fwtr_nhwc_semiPersist` and `..._bwtr_nhwc_...` are
PyTorch's with channels last (pytorch#80259); `cudnn::bn_fw_tr_1C11_kernel_NCHW` and
`cudnn::bn_bw_1C11_kernel_new` are those of TensorFlow's FusedBatchNormV3 in float32, after
transposes. So `1C11`, which names the shape of mean and variance, does not indicate the persistent
kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Way = Literal["nhwc", "nchw", "in_pieces", "none"]
"""`nhwc`: cuDNN's kernel without transposes; `nchw`: its kernels for NCHW; `in_pieces`: Keras's
separate operations instead of a cuDNN kernel; `none`: none of these."""

_NHWC = re.compile(r"nhwc\w*(batch_?norm|\bbn)|(batch_?norm|\bbn_?)\w*nhwc", re.IGNORECASE)

_NCHW = re.compile(
    r"(?<![a-z])bn_(fw|bw)\w*(1C11|1CHW|NCHW)|(batch_?norm|bn)\w*nchw|nchw\w*batch_?norm",
    re.IGNORECASE,
)

_TRANSPOSES = re.compile(
    r"SwapDimension|ShuffleInTensor3|nhwc_?(to|2)_?nchw|nchw_?(to|2)_?nhwc", re.IGNORECASE
)
"""TensorFlow's own and cuDNN's; a model may also have them for other reasons."""

_PIECES = re.compile(r"SquaredDifference|squared_?difference", re.IGNORECASE)
"""Kernels that compute a batch's variance if there is no fused kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchNormKernels:
    """Kernel names, each once, in order of first appearance."""

    nhwc: tuple[str, ...]
    """cuDNN kernels for NHWC."""

    nchw: tuple[str, ...]
    """cuDNN kernels for NCHW."""

    transposes: tuple[str, ...]
    """Transposes between the two layouts."""

    pieces: tuple[str, ...]
    """Kernels of a variance computed by separate operations."""

    @property
    def way(self) -> Way:
        """How BatchNormalization was computed; if in several ways, the slowest."""
        if self.nchw:
            return "nchw"
        if self.nhwc:
            return "nhwc"
        return "in_pieces" if self.pieces else "none"

    @property
    def is_persistent(self) -> bool:
        """Whether cuDNN's kernel for NHWC did all of it."""
        return self.way == "nhwc"

    def text(self) -> str:
        """A sentence for the user, with the names."""
        if self.way == "nhwc":
            return f"BatchNormalization ran by cuDNN's kernel for NHWC: {', '.join(self.nhwc)}"
        if self.way == "nchw":
            between = f", with transposes: {', '.join(self.transposes)}" if self.transposes else ""
            return f"BatchNormalization ran by kernels for NCHW: {', '.join(self.nchw)}{between}"
        if self.way == "in_pieces":
            return (
                f"BatchNormalization ran as single operations, among them {', '.join(self.pieces)}"
            )
        return "no kernel of a BatchNormalization in training was seen"


def batch_norm_kernels(names: Iterable[str]) -> BatchNormKernels:
    """Classify the names of kernels.

    Args:
        names: As in a device trace, demangled or not, with or without template arguments.
    """
    names = list(dict.fromkeys(_plain(name) for name in names))
    nhwc = [name for name in names if _NHWC.search(name)]
    return BatchNormKernels(
        nhwc=tuple(nhwc),
        nchw=tuple(name for name in names if name not in nhwc and _NCHW.search(name)),
        transposes=tuple(name for name in names if _TRANSPOSES.search(name)),
        pieces=tuple(name for name in names if _PIECES.search(name)),
    )


def _plain(name: str) -> str:
    """The name without `void`, template arguments and parameters."""
    return re.sub(r"[<(].*", "", name.removeprefix("void "))
