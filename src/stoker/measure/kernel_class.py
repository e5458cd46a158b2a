"""Classifies what a device runs: by HLO instruction, by kernel name, by TensorFlow operation.

`batch_norm_kernels` finds the kernels that computed BatchNormalization.

The known kernel names are from cuDNN, cuBLAS, CUTLASS, Eigen, NCCL, XLA and TensorFlow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

KernelClass = Literal[
    "products", "normalization", "elementwise", "transposes", "copies", "collectives", "other"
]

CLASSES: tuple[KernelClass, ...] = (
    "products",
    "normalization",
    "elementwise",
    "transposes",
    "other",
    "collectives",
    "copies",
)
"""In order of priority: while two kernels run at once, the time counts for the class that is first
in this list. So the time of a copy during a convolution counts only as a convolution."""

LABELS = {
    "products": "convolution and matrix product",
    "normalization": "normalization",
    "elementwise": "element-wise and reductions",
    "transposes": "layout transposes",
    "copies": "memory copies",
    "collectives": "collectives",
    "other": "other kernels",
    "idle": "idle",
}
"""Class or `idle` -> the label that the user sees."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """One kind of event on a device."""

    name: str
    """The kernel's name, demangled; empty if a CPU operation is used in place of a kernel."""

    scope: str = ""
    """Name of the TensorFlow operation that launched it, e.g. `model/conv1/Conv2D`."""

    op: str = ""
    """Type of that operation, e.g. `Conv2D`."""

    hlo: KernelClass | None = None
    """Class of the kernel from XLA's program; None if it is unknown there."""

    casts: bool = False
    """Whether the kernel only changes a dtype."""

    @property
    def shown(self) -> str:
        """The name for the user: the kernel's name without `void` and template arguments."""
        plain = re.sub(r"<.*", "", self.name.removeprefix("void ").partition("(")[0])
        if not plain:
            return self.op or self.scope
        return f"{plain} ({self.op})" if self.op else plain


def class_of(kernel: Kernel) -> KernelClass:
    """The class of a kernel.

    Element-wise work inside a normalization layer counts as normalization, because a Keras layer
    without a fused kernel consists of it.
    """
    # A copy by the driver counts as a copy, even if XLA gives its instruction another class.
    copies: KernelClass | None = "copies" if _COPIES.search(kernel.name) else None
    found = copies or kernel.hlo or _by_name(kernel.name) or _by_operation(kernel.op) or "other"
    if found == "elementwise" and _is_normalization(kernel.scope):
        return "normalization"
    return found


def only_casts(name: str, op: str) -> bool:
    """Whether a kernel only changes a dtype, judged by its name and the type of its operation."""
    converts = "TensorConversionOp" in name and "CwiseBinaryOp" not in name
    return op == "Cast" or converts or name.startswith("Cast_GPU_")


_COPIES = re.compile(
    r"^(\[?CUDA )?mem(cpy|set)(?!.*kernel)|^Memory(Alloc|Free)|^cu(da)?Mem(cpy|set)", re.IGNORECASE
)
"""Events of the driver that are not kernels: `MemcpyD2D`, `[CUDA memcpy HtoD]`, `cudaMemcpyAsync`."""

_NAMES: tuple[tuple[KernelClass, re.Pattern[str]], ...] = (
    # XLA's kernel for a copy that leaves the layout unchanged.
    ("copies", re.compile(r"^(wrapped|loop)_copy(_fusion)?(_\d+)?$|^memcpy", re.IGNORECASE)),
    ("collectives", re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter", re.IGNORECASE)),
    # Searches for the fastest kernel; not part of a step.
    ("other", re.compile(r"redzone", re.IGNORECASE)),
    (
        "products",
        re.compile(
            r"xmma|cutlass|gemm|nvjet|scudnn|hcudnn|winograd|convolve|conv2d|conv3d|convolution"
            r"|conv_?transpose|depthwise|[wd]grad|fprop|im2col|computeOffsetsKernel|cublas|gemv"
            r"|dot_kernel|splitKreduce|fmha|flash_(attn|fwd|bwd|fprop)|sdpa|ContractionKernel"
            r"|fft[12]d_|RNN_block|persistRNN",
            re.IGNORECASE,
        ),
    ),
    (
        "transposes",
        re.compile(
            r"SwapDimension|ShuffleInTensor3|nhwc_?(to|2)_?nchw|nchw_?(to|2)_?nhwc|AddPadding"
            r"|convertTensor|TensorShuffling|transpose|permute",
            re.IGNORECASE,
        ),
    ),
    (
        "normalization",
        re.compile(
            r"\bbn_|[_:]bn_|batch_?norm|layer_?norm|rms_?norm|group_?norm|instance_?norm|ln_(fwd|bwd)",
            re.IGNORECASE,
        ),
    ),
    (
        "other",
        re.compile(r"pooling|Pool(Forward|Backward)|MaxPool|AvgPool|Gather|Scatter|Sort|TopK"),
    ),
    (
        "elementwise",
        re.compile(
            r"EigenMetaKernel|_GPU_DT_|Apply\w*Kernel|Bias(NHWC|NCHW|Grad)|relu|gelu|activation"
            r"|op_?tensor|op_generic|scalePackedTensor|elem_?(ent)?_?wise|softmax|reduce|fusion"
            r"|^loop_|^wrapped_|^input_|cast|convert|dropout|Philox|SetZero|SetToValue|CrossEntropy",
            re.IGNORECASE,
        ),
    ),
)


def _by_name(name: str) -> KernelClass | None:
    return next((kind for kind, pattern in _NAMES if pattern.search(name)), None)


_OPERATIONS: tuple[tuple[KernelClass, re.Pattern[str]], ...] = (
    ("products", re.compile(r"Conv[123]?D|Conv$|MatMul|Einsum|Depthwise|CudnnRNN|Attention|FFT")),
    ("normalization", re.compile(r"BatchNorm|LayerNorm|^LRN")),
    ("transposes", re.compile(r"Transpose$|^Bitcast$")),
    ("copies", re.compile(r"^_?(Host)?(Send|Recv)$|^Copy|^DeepCopy")),
    ("collectives", re.compile(r"^(Collective|Nccl)")),
    (
        "other",
        re.compile(
            r"Gather|Scatter|Pool|Sort|TopK|Unique|Where|Resize|Decode|Lookup|Hash|Parse|ReadFile"
            r"|String|PyFunc|Queue|TensorList|Stack|Print|Assert|Summary|Variable(s)?$|VarHandle"
        ),
    ),
)


def _by_operation(op: str) -> KernelClass | None:
    """The class by type of operation; a type without a rule is element-wise."""
    if not op:
        return None
    return next((kind for kind, pattern in _OPERATIONS if pattern.search(op)), "elementwise")


_NORMALIZATION = re.compile(
    r"(?!.*(global|clip_by|grad\w*)_norm)(\w*_)?(bn|\w*norm|\w*normali[sz]ation)"
    r"(_[a-z0-9]{1,2}|\d+)?(_\d+)*",
    re.IGNORECASE,
)
"""Names of normalization layers: `norm_a_1`, `conv1_bn`, `batch_normalization_13`; not the norm in
gradient clipping."""


def _is_normalization(scope: str) -> bool:
    """Whether the operation belongs to a normalization layer, judged by its name."""
    return any(_NORMALIZATION.fullmatch(part) for part in scope.split("/"))


Way = Literal["nhwc", "nchw", "in_pieces", "none"]
"""How BatchNormalization is computed. `nhwc`: by cuDNN's kernel without transposes; `nchw`: by cuDNN's
kernels for NCHW; `in_pieces`: by Keras's separate operations; `none`: none of these kernels ran."""

_NHWC = re.compile(r"nhwc\w*(batch_?norm|\bbn)|(batch_?norm|\bbn_?)\w*nhwc", re.IGNORECASE)

_NCHW = re.compile(
    r"(?<![a-z])bn_(fw|bw)\w*(1C11|1CHW|NCHW)|(batch_?norm|bn)\w*nchw|nchw\w*batch_?norm",
    re.IGNORECASE,
)

_TRANSPOSES = re.compile(
    r"SwapDimension|ShuffleInTensor3|nhwc_?(to|2)_?nchw|nchw_?(to|2)_?nhwc", re.IGNORECASE
)
"""Transposes of TensorFlow and of cuDNN; a model may also run them for other reasons."""

_PIECES = re.compile(r"SquaredDifference|squared_?difference", re.IGNORECASE)
"""Kernels that compute a batch's variance as separate operations, without a fused kernel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchNormKernels:
    """Names of the kernels that computed BatchNormalization in training, in order of first appearance.

    cuDNN's persistent kernel reads and writes NHWC, as TensorFlow's 16-bit convolutions do on a GPU.
    Without it, TensorFlow transposes the input and output of each BatchNormalization to NCHW and back,
    forward and backward. Not yet checked against a trace of Stoker's own step on a GPU.

    Source of the names: published traces. PyTorch with channels last runs
    `cudnn::batchnorm_fwtr_nhwc_semiPersist` and `..._bwtr_nhwc_...` (pytorch#80259). TensorFlow's
    FusedBatchNormV3 in float32 runs `cudnn::bn_fw_tr_1C11_kernel_NCHW` and
    `cudnn::bn_bw_1C11_kernel_new`, after transposes. So `1C11`, the shape of mean and variance, is not
    a sign of the persistent kernel.
    """

    nhwc: tuple[str, ...]
    """cuDNN kernels for NHWC."""

    nchw: tuple[str, ...]
    """cuDNN kernels for NCHW."""

    transposes: tuple[str, ...]
    """Transposes between the two layouts."""

    pieces: tuple[str, ...]
    """Kernels that compute the variance as separate operations."""

    @property
    def way(self) -> Way:
        """How BatchNormalization was computed; if in several ways, `nchw` has precedence over `nhwc`."""
        if self.nchw:
            return "nchw"
        if self.nhwc:
            return "nhwc"
        return "in_pieces" if self.pieces else "none"

    @property
    def is_persistent(self) -> bool:
        """Whether only cuDNN's kernel for NHWC computed BatchNormalization."""
        return self.way == "nhwc"

    def text(self) -> str:
        """A clause for the user that names the kernels."""
        if self.way == "nhwc":
            return f"BatchNormalization ran by cuDNN's kernel for NHWC: {', '.join(self.nhwc)}"
        if self.way == "nchw":
            between = f", with transposes: {', '.join(self.transposes)}" if self.transposes else ""
            return f"BatchNormalization ran by kernels for NCHW: {', '.join(self.nchw)}{between}"
        if self.way == "in_pieces":
            return (
                f"BatchNormalization ran as single operations, among them {', '.join(self.pieces)}"
            )
        return "no kernel of a BatchNormalization in training was found"


def batch_norm_kernels(names: Iterable[str]) -> BatchNormKernels:
    """Find the kernels that computed BatchNormalization.

    Args:
        names: Names of kernels as in a device trace, demangled or not, with or without template arguments.
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
