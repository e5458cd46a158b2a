"""Loads exported models with TensorFlow 1's loader, and calls them through callables of a session.

Measured on one core with lookup tables and string inputs: 41,000 calls/s this way, 2,600 calls/s with `signature(...)`
of `tf.saved_model.load`.
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
"""Tag of the graph that servers load."""

DEFAULT_SIGNATURE = "serving_default"
"""Signature that is called if the request names none."""

MIN_AXES_OF_IMAGES = 3
"""An input declared with at least this many axes may feed a convolution. If the array has fewer axes, the convolution's
kernel (oneDNN) aborts the whole process: `Check failed: index >= 0 && index < num_total_dims`. So the array is
refused."""

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
        """Return whether the input accepts an array of this shape.

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
    """Return an array of zeros, or of empty strings, that an input accepts.

    Args:
        spec: The input.
        rows: Length of the first axis if its length is not declared; other undeclared axes get length one.
    """
    first, inner = ((None,), ()) if spec.shape is None else (spec.shape[:1], spec.shape[1:])
    shape = (*(rows if length is None else length for length in first), *(n or 1 for n in inner))
    if spec.dtype == "string":
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, dtype=tf.dtypes.as_dtype(spec.dtype).as_numpy_dtype)


@dataclass(frozen=True, kw_only=True, slots=True)
class Signature:
    """A signature: one way to call a model, with named inputs and named outputs."""

    inputs: Mapping[str, TensorSpec]
    """Input name -> dtype and shape."""

    outputs: Mapping[str, TensorSpec]
    """Output name -> dtype and shape."""

    method: str
    """The method name in the SavedModel, usually "tensorflow/serving/predict"."""

    feed_names: Mapping[str, str] = field(default_factory=dict)
    """Input name -> name of its tensor in the graph."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Input name -> default value as a TensorProto."""


INLINE = -1
"""Value of `inter_op_threads` that makes a session run a call in its caller's thread."""


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
    """Return the configuration for all sessions of a process.

    GPU memory grows on demand, up to `gpu_memory_fraction`, which TensorFlow's allocator enforces. The fraction
    refers to the memory of the device that the session sees, so it also works for a MIG instance.

    Without a GPU, a call runs in its caller's thread: no other thread has to wake up, and when a model is loaded by a
    thread with low priority, the whole load has this priority. With a GPU, kernels end in threads of the driver; CPU
    operations after them would run in these threads and delay other calls. So TensorFlow's own threads are used, which
    is its default. Which of the two is faster on a GPU has not been measured.

    Args:
        given: The user's settings, which the other arguments override.
        gpu_memory_fraction: Maximum share of a GPU's memory, 0..1; 0: no limit.
        intra_op_threads: Number of threads that compute one operation; 0: TensorFlow's choice.
        inter_op_threads: Maximum number of operations that run at once; 0: as described above.
    """
    config = tf.compat.v1.ConfigProto()
    if given is not None:
        config.CopyFrom(given)
    config.gpu_options.allow_growth = True
    if gpu_memory_fraction:
        config.gpu_options.per_process_gpu_memory_fraction = gpu_memory_fraction
    # The graph may assign operations to a device that this worker does not have.
    config.allow_soft_placement = True
    if intra_op_threads:
        config.intra_op_parallelism_threads = intra_op_threads
    if inter_op_threads:
        config.inter_op_parallelism_threads = inter_op_threads
        config.use_per_session_threads = (
            True  # otherwise, the first session's setting applies to the whole process
        )
    elif not config.inter_op_parallelism_threads and not has_gpu():
        config.inter_op_parallelism_threads = INLINE
    return config


def inter_op_pool(session: tf.compat.v1.Session) -> int:
    """Return the thread pool for calls of a session: `INLINE` if calls run in the caller's thread."""
    inline = config_of_session(session).inter_op_parallelism_threads == INLINE
    return INLINE if inline else 0


def open_devices(config: tf.compat.v1.ConfigProto) -> None:
    """Open the GPU with this configuration; call it before other code opens the GPU.

    All sessions and eager code of a process share one allocator; whichever code opens the device first sets its limit.
    """
    if not has_gpu():
        return
    tf.compat.v1.Session(graph=tf.Graph(), config=config).close()
    fraction = config.gpu_options.per_process_gpu_memory_fraction
    limit = f"at most {fraction:.1%} of its memory" if fraction else "memory growing on demand"
    _log.info("models run on the first GPU that is visible here, with %s", limit)


@dataclass(frozen=True, slots=True)
class _Bound:
    """A signature, and the session's callable that runs it."""

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
        """Create a callable for every signature; use `load_model` to load a model from a folder.

        Args:
            session: The session with the graph.
            signature_defs: Signature -> its definition.
            path: Folder of the SavedModel.
            runs: Signature -> function to call instead of the session.
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
        """Name -> signature, for all signatures that can be called."""
        return {name: bound.signature for name, bound in self._bound.items()}

    def call(self, signature: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a signature once.

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
        gc.collect()  # a graph and its operations refer to each other, so only the collector frees them
        _return_free_memory()


_REFUSED_BY_GRAPH = (
    tf.errors.InvalidArgumentError,
    tf.errors.OutOfRangeError,
    tf.errors.DataLossError,
    tf.errors.UnimplementedError,
)
"""Error types with which a graph refuses its input values."""

_NOT_LOADABLE = (OSError, RuntimeError, ValueError, TypeError, KeyError, DecodeError)
"""Error types, other than TensorFlow's own, that the loader raises for a damaged SavedModel or a folder without one."""


def load_model(path: Path) -> LoadedModel:
    """Load a SavedModel as TensorFlow Serving's session loader does, and initialize its tables.

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
        UserError: an input is unknown, missing, or of another dtype or shape; the error names the input.
    """
    arrays = typed_inputs(signature, inputs)
    for error in wrong_shapes(signature, arrays):
        raise error
    return arrays


def typed_inputs(
    signature: Signature, inputs: Mapping[str, np.ndarray]
) -> list[np.ndarray[Any, Any]]:
    """Return the arrays in the signature's order. Dtypes and the number of axes of images are checked, but not shapes.

    Raises:
        UserError: an input is unknown or missing, has another dtype, or is an image with too few axes; the error
            names the input.
    """
    if inputs.keys() != signature.inputs.keys():
        raise _wrong_names(signature, inputs)
    return [_typed(name, spec, inputs[name]) for name, spec in signature.inputs.items()]


def wrong_shapes(signature: Signature, arrays: Sequence[np.ndarray[Any, Any]]) -> list[UserError]:
    """Return an error for each array from `typed_inputs` that does not have its declared shape."""
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
    """Return NumPy's name of a dtype; cached, because NumPy builds the name again on each access."""
    return dtype.name


def shape_text(shape: tuple[int | None, ...] | None) -> str:
    """Return a shape as TensorFlow Serving prints it: [-1,16], or [?] for any rank."""
    if shape is None:
        return "[?]"
    return "[" + ",".join("-1" if size is None else str(size) for size in shape) + "]"


_IN_FUNCTION = re.compile(r"^(\{\{function_node [^}]*\}\} ?)+")
"""TensorFlow's prefix of errors inside a function: {{function_node NAME}}."""


def first_line(error: BaseException) -> str:
    """Return the line of an error that has the reason, without TensorFlow's heading and traceback."""
    text = error.message if isinstance(error, tf.errors.OpError) else str(error)
    lines = (line.strip() for line in str(text).splitlines())
    reasons = [
        _IN_FUNCTION.sub("", line) for line in lines if line and line != "Graph execution error:"
    ]
    # in a function, the reason comes after the stack, before the node's line
    for line, after in itertools.pairwise(reasons):
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
    """Return an array of strings as an object array of `bytes`; other arrays are returned unchanged."""
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
    """Make glibc return freed pages to the kernel: it kept 100 MB after 15 loads of a 16 MB model."""
    with contextlib.suppress(OSError, AttributeError):  # other C libraries lack this function
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _fed_text(signature: Signature, arrays: Sequence[np.ndarray[Any, Any]]) -> str:
    fed = zip(signature.inputs.items(), arrays, strict=True)
    return ", ".join(f"{name!r} ({spec}, fed {shape_text(a.shape)})" for (name, spec), a in fed)


def _callable(
    session: tf.compat.v1.Session | None, definition: meta_graph_pb2.SignatureDef
) -> Callable[..., list[np.ndarray]]:
    assert session is not None  # without a session, `runs` has a function for every signature
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
