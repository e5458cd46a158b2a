"""Loads and calls exported models: a session callable on the v1-loaded graph.

Measured on one core with lookup tables and string inputs: 41 k calls/s this way,
2.6 k by `signature(...)` of `tf.saved_model.load`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import config_pb2, meta_graph_pb2

from stoker.core.errors import Plain, UserError
from stoker.internals.tensorflow_internals import config_of_session, session_callable

_log = logging.getLogger(__name__)

SERVE_TAG = "serve"
"""Tag of the graph that servers use."""

DEFAULT_SIGNATURE = "serving_default"
"""Signature of calls that do not name one."""

MIN_AXES_OF_IMAGES = 3
"""An array with so many declared axes may feed a convolution, whose kernel (oneDNN) aborts the whole process if there
are fewer: `Check failed: index >= 0 && index < num_total_dims`. So an array with fewer axes is refused before that."""

Shape = tuple[int | None, ...]
"""Length of each axis; None for any length."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Declared dtype and shape of one input or output."""

    dtype: str
    """TensorFlow's name of the dtype: "float32", "string", "bfloat16"."""

    shape: Shape | None
    """Length of each axis, None for any length; None instead of a tuple for any rank."""

    def __str__(self) -> str:
        return f"{self.dtype} of shape {shape_text(self.shape)}"

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether the input accepts an array of this shape.

        Trailing axes of length one may be missing: TensorFlow Serving does not check shapes, and its
        documented example sends [3] for [-1, 1].
        """
        declared = self.shape
        if declared is None:
            return True
        if len(shape) > len(declared) or (declared and not shape):
            return False
        for want, size in zip(declared, shape, strict=False):
            if want is not None and want != size:
                return False
        return len(shape) == len(declared) or set(declared[len(shape) :]) == {1}


def zeros(spec: TensorSpec, rows: int) -> np.ndarray[Any, Any]:
    """An array of zeros, or of empty strings, that an input accepts.

    Args:
        spec: The input.
        rows: Length of a first axis of any length; other such axes get length one.
    """
    first, inner = ((None,), ()) if spec.shape is None else (spec.shape[:1], spec.shape[1:])
    shape = (*(rows if length is None else length for length in first), *(n or 1 for n in inner))
    if spec.dtype == "string":
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, dtype=tf.dtypes.as_dtype(spec.dtype).as_numpy_dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """One way to call a model: named tensors in, named tensors out."""

    inputs: Mapping[str, TensorSpec]
    """Input name -> dtype and shape."""

    outputs: Mapping[str, TensorSpec]
    """Output name -> dtype and shape."""

    method: str
    """The method name in the SavedModel, usually "tensorflow/serving/predict"."""

    feed_names: Mapping[str, str] = field(default_factory=dict)
    """Input name -> name of its tensor in the graph."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Input name -> its default as a TensorProto."""


INLINE = -1
"""Thread count that makes a session run a call in its caller's thread."""


@functools.cache
def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU in this process."""
    return bool(tf.config.list_physical_devices("GPU"))


def session_config(
    given: tf.compat.v1.ConfigProto | None = None,
    *,
    gpu_memory_fraction: float = 0.0,
    intra_op_threads: int = 0,
    inter_op_threads: int = 0,
) -> tf.compat.v1.ConfigProto:
    """The configuration of every session in a process.

    GPU memory grows on demand. A fraction is a limit enforced by TensorFlow's allocator. It refers
    to the memory of the device that the session sees, so it is right for a MIG instance too.

    Without a GPU, a call runs in its caller's thread: it is not handed over, and a load at low
    priority stays there. With a GPU, kernels end in threads of the driver; CPU operations after
    them would run there and delay other calls. So TensorFlow's own threads are used, as by default.
    Which of the two is faster on a GPU has not been measured.

    Args:
        given: The user's settings; the other arguments are applied on top.
        gpu_memory_fraction: Largest share of a GPU's memory, 0..1; 0 sets no limit.
        intra_op_threads: Threads that compute one operation; 0: TensorFlow's choice.
        inter_op_threads: Operations that run at once; 0: as described above.
    """
    config = tf.compat.v1.ConfigProto()
    if given is not None:
        config.CopyFrom(given)
    config.gpu_options.allow_growth = True
    if gpu_memory_fraction:
        config.gpu_options.per_process_gpu_memory_fraction = gpu_memory_fraction
    # A model may name a device that this worker does not have.
    config.allow_soft_placement = True
    if intra_op_threads:
        config.intra_op_parallelism_threads = intra_op_threads
    if inter_op_threads:
        config.inter_op_parallelism_threads = inter_op_threads
        config.use_per_session_threads = True  # otherwise the process's first session decides
    elif not config.inter_op_parallelism_threads and not has_gpu():
        config.inter_op_parallelism_threads = INLINE
    return config


def inter_op_pool(session: tf.compat.v1.Session) -> int:
    """The pool for calls of a session: `INLINE` if it runs them in the caller's thread."""
    inline = config_of_session(session).inter_op_parallelism_threads == INLINE
    return INLINE if inline else 0


def open_devices(config: tf.compat.v1.ConfigProto) -> None:
    """Open the GPU with this configuration, before anything else does.

    One allocator serves all sessions of a process, and eager code too: whatever opens the device
    first sets its limit.
    """
    if not has_gpu():
        return
    tf.compat.v1.Session(graph=tf.Graph(), config=config).close()
    fraction = config.gpu_options.per_process_gpu_memory_fraction
    limit = f"at most {fraction:.1%} of its memory" if fraction else "memory growing on demand"
    _log.info("models run on the first GPU that is visible here, with %s", limit)


@dataclass(frozen=True, slots=True)
class _Bound:
    """A signature with the session's callable for it."""

    signature: Signature
    run: Callable[..., list[np.ndarray]]


class LoadedModel:
    """A SavedModel in memory, with its own graph and session; safe for calls from several threads."""

    def __init__(
        self,
        session: tf.compat.v1.Session | None,
        signature_defs: Mapping[str, Any],
        path: Path,
        *,
        runs: Mapping[str, Callable[..., list[np.ndarray]]] | None = None,
    ) -> None:
        """Bind every signature; use `load_model` to create one from a folder.

        Args:
            session: Holds the graph.
            signature_defs: Signature -> its definition.
            path: The folder.
            runs: Signature -> function that runs it instead of the session.
        """
        self.path = path
        self.signature_defs = dict(signature_defs)
        self._session: tf.compat.v1.Session | None = session
        self._bound = {
            name: _Bound(
                _signature(definition),
                _callable(session, definition) if runs is None else runs[name],
            )
            for name, definition in sorted(signature_defs.items())
            if definition.inputs and definition.outputs
        }

    @property
    def signatures(self) -> dict[str, Signature]:
        """Name -> signature, for all that can be called."""
        return {name: bound.signature for name, bound in self._bound.items()}

    def call(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run one signature once.

        Args:
            signature: One of `signatures`.
            inputs: Input name -> array of the declared dtype and shape; strings as an array of
                `bytes` or `str` objects.

        Returns:
            Output name -> array; strings as an object array of `bytes`.

        Raises:
            UserError: the signature or an input is unknown, an input is missing or has another dtype or
                shape than declared, or the graph raised an error for the values.
        """
        bound = self._bound.get(signature)
        if bound is None:
            raise UserError(
                f"the signature must be one of {', '.join(self._bound) or 'none'}", got=signature
            )
        return self.run(signature, checked_inputs(bound.signature, inputs))

    def run(self, signature: str, arrays: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Run one signature once, like `call`, on the arrays from `checked_inputs`.

        Raises:
            UserError: the graph raised an error for the values.
        """
        bound = self._bound[signature]
        try:
            values = bound.run(*arrays)
        except _REFUSED_BY_GRAPH as error:
            raise UserError(
                f"the model failed on {_fed_text(bound.signature, arrays)}",
                got=Plain(first_line(error)),
                fix="Correct the values or the shape of the inputs.",
            ) from error
        return dict(zip(bound.signature.outputs, values, strict=True))

    def close(self) -> None:
        """Free the memory; no call may run now or later."""
        self._bound = {}
        if self._session is not None:
            self._session.close()
        self._session = None
        gc.collect()  # the graph and its operations refer to each other
        _return_free_memory()


_REFUSED_BY_GRAPH = (
    tf.errors.InvalidArgumentError,
    tf.errors.OutOfRangeError,
    tf.errors.DataLossError,
    tf.errors.UnimplementedError,
)
"""Errors of a graph about its input values."""

_NOT_LOADABLE = (OSError, RuntimeError, ValueError, TypeError, KeyError, DecodeError)
"""Errors of the loader for a damaged or foreign SavedModel, other than TensorFlow's own."""


def load_model(path: Path) -> LoadedModel:
    """Load a SavedModel as TensorFlow Serving's session loader does, with its tables initialized.

    Raises:
        UserError: the SavedModel is missing or damaged, or has no signature to call.
    """
    graph = tf.Graph()
    session = tf.compat.v1.Session(graph=graph, config=session_config())
    try:
        with graph.as_default():
            meta = tf.compat.v1.saved_model.load(session, [SERVE_TAG], str(path))
        model = LoadedModel(session, meta.signature_def, path)
        if not model.signatures:
            raise ValueError("it has no signature with inputs and outputs")
    except (*_NOT_LOADABLE, tf.errors.OpError) as error:
        session.close()
        raise not_loadable(path, first_line(error)) from error
    return model


def not_loadable(path: Path, why: str, *, tags: str = SERVE_TAG) -> UserError:
    """Return the error for a folder without a SavedModel that can be served."""
    return UserError(
        f"{path} must be a whole SavedModel with the tag {tags!r}",
        got=Plain(why),
        fix="Export it again with Keras's ExportArchive (`stoker export`).",
    )


def checked_inputs(
    signature: Signature, inputs: Mapping[str, np.ndarray]
) -> list[np.ndarray[Any, Any]]:
    """Return the arrays in the signature's order, with dtypes and shapes checked.

    Raises:
        UserError: an input is unknown, missing, or of another dtype or shape; the error names it.
    """
    arrays = typed_inputs(signature, inputs)
    for error in wrong_shapes(signature, arrays):
        raise error
    return arrays


def typed_inputs(
    signature: Signature, inputs: Mapping[str, np.ndarray]
) -> list[np.ndarray[Any, Any]]:
    """Return the arrays in the signature's order, with dtypes and the axes of images checked; shapes may differ.

    Raises:
        UserError: an input is unknown, missing, of another dtype, or lacks axes of an image; the error names it.
    """
    if inputs.keys() != signature.inputs.keys():
        raise _wrong_names(signature, inputs)
    return [_typed(name, spec, inputs[name]) for name, spec in signature.inputs.items()]


def wrong_shapes(signature: Signature, arrays: Sequence[np.ndarray[Any, Any]]) -> list[UserError]:
    """Return one error for each array from `typed_inputs` that does not have its declared shape."""
    return [
        _wrong_kind(name, spec, array)
        for (name, spec), array in zip(signature.inputs.items(), arrays, strict=True)
        if not spec.takes(array.shape)
    ]


def _wrong_names(signature: Signature, inputs: Mapping[str, np.ndarray]) -> UserError:
    unknown = sorted(set(inputs) - set(signature.inputs))
    missing = sorted(set(signature.inputs) - set(inputs))
    wrong = f"input {(missing or unknown)[0]!r} is {'missing' if missing else 'not one of them'}"
    return UserError(
        f"the inputs must be {', '.join(sorted(signature.inputs))}, and {wrong}",
        got=Plain(", ".join(sorted(inputs)) or "none"),
    )


@functools.cache
def dtype_name(dtype: np.dtype[Any]) -> str:
    """NumPy's name of a dtype, which NumPy builds again on each access."""
    return dtype.name


def shape_text(shape: tuple[int | None, ...] | None) -> str:
    """A shape as TensorFlow Serving prints it: [-1,16], or [?] for any rank."""
    if shape is None:
        return "[?]"
    return "[" + ",".join("-1" if size is None else str(size) for size in shape) + "]"


_IN_FUNCTION = re.compile(r"^(\{\{function_node [^}]*\}\} ?)+")
"""TensorFlow's prefix of an operation in a function, with the name from the tracer."""


def first_line(error: BaseException) -> str:
    """The line of an error with the reason, without TensorFlow's heading and traceback."""
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    lines = (line.strip() for line in str(text).splitlines())
    reasons = [
        _IN_FUNCTION.sub("", line) for line in lines if line and line != "Graph execution error:"
    ]
    for line, after in itertools.pairwise(reasons):  # in a function, after its stack
        if after.startswith("[[{{node"):
            return line.rstrip(".")
    return reasons[0].rstrip(".") if reasons else type(error).__name__


def _typed(name: str, spec: TensorSpec, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array = _as_strings(name, value) if spec.dtype == "string" else value
    shape = spec.shape
    lacks_axes = shape is not None and array.ndim < len(shape) >= MIN_AXES_OF_IMAGES
    if lacks_axes or _name_of_dtype(array) != spec.dtype:
        raise _wrong_kind(name, spec, array)
    return array


def _wrong_kind(name: str, spec: TensorSpec, array: np.ndarray[Any, Any]) -> UserError:
    found = f"{_name_of_dtype(array)} of shape {shape_text(array.shape)}"
    return UserError(f"input {name!r} must be {spec}", got=Plain(found))


def _name_of_dtype(array: np.ndarray[Any, Any]) -> str:
    return "string" if array.dtype == object else dtype_name(array.dtype)


def _as_strings(name: str, value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """An array of strings as objects of `bytes`; other arrays unchanged."""
    if value.dtype.kind not in "OSU":
        return value
    array = value.astype(object)
    kinds = set(map(type, array.flat))
    if not kinds <= {bytes, str, np.bytes_, np.str_}:
        odd = next(item for item in array.flat if not isinstance(item, bytes | str))
        raise UserError(f"input {name!r} must hold strings only", got=odd)
    if kinds <= {bytes}:
        return array
    flat = [item.encode() if isinstance(item, str) else bytes(item) for item in array.flat]
    encoded = np.empty(len(flat), dtype=object)
    encoded[:] = flat
    return encoded.reshape(array.shape)


def _return_free_memory() -> None:
    """Make glibc return freed pages: it kept 100 MB after 15 loads of a 16 MB model."""
    with contextlib.suppress(OSError, AttributeError):  # another libc has no such call
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _fed_text(signature: Signature, arrays: Sequence[np.ndarray[Any, Any]]) -> str:
    fed = zip(signature.inputs.items(), arrays, strict=True)
    return ", ".join(f"{name!r} ({spec}, fed {shape_text(a.shape)})" for (name, spec), a in fed)


def _callable(
    session: tf.compat.v1.Session | None, definition: meta_graph_pb2.SignatureDef
) -> Callable[..., list[np.ndarray]]:
    assert session is not None  # without a session, `runs` is given
    options = config_pb2.CallableOptions()
    options.feed.extend(info.name for _, info in sorted(definition.inputs.items()))
    options.fetch.extend(info.name for _, info in sorted(definition.outputs.items()))
    options.run_options.inter_op_thread_pool = inter_op_pool(session)
    return session_callable(session, options)


def _signature(definition: meta_graph_pb2.SignatureDef) -> Signature:
    inputs = sorted(definition.inputs.items())
    outputs = sorted(definition.outputs.items())
    return Signature(
        inputs={name: _spec(name, info) for name, info in inputs},
        outputs={name: _spec(name, info) for name, info in outputs},
        method=definition.method_name,
        feed_names={name: info.name for name, info in inputs},
        defaults=dict(definition.defaults),
    )


def _spec(name: str, info: meta_graph_pb2.TensorInfo) -> TensorSpec:
    if info.WhichOneof("encoding") != "name":
        raise ValueError(
            f"its tensor {name!r} is sparse or composite; only dense tensors are served"
        )
    shape = info.tensor_shape
    sizes = tuple(None if dim.size < 0 else dim.size for dim in shape.dim)
    return TensorSpec(
        dtype=tf.dtypes.as_dtype(info.dtype).name, shape=None if shape.unknown_rank else sizes
    )
