"""Serves a version's `model.tflite` with LiteRT, like TensorFlow Serving with `--prefer_tflite_model`.

Source of the signatures that a file has, and of the error messages: TensorFlow Serving, `tflite_session.cc`.
"""

from __future__ import annotations

import math
import queue
import struct
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from flatbuffers import flexbuffers
from google.protobuf.message import DecodeError
from tensorflow.core.protobuf import meta_graph_pb2

from stoker.core.errors import DataError, Plain
from stoker.export.litert import FILE
from stoker.registry.exported_model import DEFAULT_SIGNATURE, LoadedModel, first_line
from stoker.serve.errors import Code, ServeError
from stoker.serve.loading.saved_model import check_files

_SIGNATURES = b"signature_defs_metadata"
"""Name of the metadata with TensorFlow's signatures. Source: tensorflow/lite/tools/signature."""

_PREDICT = "tensorflow/serving/predict"

_FAILURES = (ValueError, RuntimeError, TypeError)
"""Exceptions that LiteRT raises for an invalid file or invalid inputs."""

_DAMAGED = (*_FAILURES, struct.error, IndexError, DecodeError, AttributeError)
"""Exceptions that may be raised while a damaged file is read."""

_SMALL = 256
"""An interpreter is kept if its calls had at most this many times the elements of the inputs that the file declares."""

_UNUSUAL = 4
"""An interpreter is also kept if none of its calls had more than this many times the mean number of elements of recent
calls. Other interpreters are discarded, because LiteRT never returns memory."""

_RECENT = 16
"""Number of calls over which the recent number of elements is averaged."""

_DEPRECATED = r"\s*Warning: tf\.lite\.Interpreter is deprecated"
"""The ignored warning. It recommends another package, ai_edge_litert, which is not needed: TensorFlow includes
LiteRT."""


def load_litert(folder: Path, *, interpreters: int) -> tuple[LoadedModel, bool]:
    """Load the `model.tflite` of a version.

    Args:
        folder: The version's folder.
        interpreters: Maximum number of calls that run at the same time; each takes memory for its tensors.

    Returns:
        The model, and whether a call of it may run forever.

    Raises:
        DataError: the file is damaged, or has an operation that is not LiteRT's own.
    """
    check_files(folder)
    try:
        content = (folder / FILE).read_bytes()
        endless = _checked(folder, content)
        pool = _Pool(content, size=interpreters)
        definitions = _read_signatures(content) or pool.signature()
        runs = {name: pool.run_of(definition) for name, definition in definitions.items()}
        return LoadedModel(None, definitions, folder, runs=runs), endless
    except (OSError, *_DAMAGED) as error:
        raise DataError(
            f"{folder / FILE} must be one complete LiteRT model",
            got=Plain(first_line(error)),
            fix="Convert it again, or copy it again.",
        ) from error


def _checked(folder: Path, content: bytes) -> bool:
    """Check that a file has only LiteRT's own operations, which only compute; return whether it has a loop.

    Raises:
        DataError: the file has another operation.
    """
    from tensorflow.lite.python import schema_py_generated as schema

    model = schema.Model.GetRootAs(content, 0)
    codes = [model.OperatorCodes(number) for number in range(model.OperatorCodesLength())]
    for code in codes:
        if code.CustomCode() is not None:
            raise DataError(
                f"{folder / FILE}: a model must have only LiteRT's built-in operations",
                got=Plain(code.CustomCode().decode(errors="replace")[:80]),
                fix="Convert it with TFLITE_BUILTINS only, or serve its SavedModel.",
            )
    loops = (schema.BuiltinOperator.WHILE, schema.BuiltinOperator.STABLEHLO_WHILE)
    # Older converters wrote only the deprecated field. LiteRT uses the larger value of both fields.
    return any(max(code.BuiltinCode(), code.DeprecatedBuiltinCode()) in loops for code in codes)


def _read_signatures(content: bytes) -> dict[str, meta_graph_pb2.SignatureDef]:
    """Return TensorFlow's signatures in a file.

    Usually empty, because LiteRT's converter writes another kind of signatures.
    """
    from tensorflow.lite.python import schema_py_generated as schema

    model = schema.Model.GetRootAs(content, 0)
    for number in range(model.MetadataLength()):
        metadata = model.Metadata(number)
        if metadata.Name() == _SIGNATURES:
            raw = model.Buffers(metadata.Buffer()).DataAsNumpy().tobytes()
            texts = flexbuffers.GetRoot(raw).AsMap
            return {
                str(key.AsKey): meta_graph_pb2.SignatureDef.FromString(text.AsStringBytes)
                for key, text in zip(texts.Keys, texts.Values, strict=True)
            }
    return {}


class _Pool:
    """The interpreters of a model. They are created on demand, and each is used by one thread at a time."""

    def __init__(self, content: bytes, *, size: int) -> None:
        self._content = content
        self._free: queue.SimpleQueue[_Interpreter] = queue.SimpleQueue()
        self._left = threading.Semaphore(size)
        first = _Interpreter(content)
        self._inputs = _by_name(first.model.get_input_details())
        self._outputs = _by_name(first.model.get_output_details())
        self._small = _SMALL * sum(math.prod(each["shape"]) for each in self._inputs.values())
        self._recent = 0.0
        self._free.put(first)

    def signature(self) -> dict[str, meta_graph_pb2.SignatureDef]:
        """Return the signature that TensorFlow Serving creates, with the names of the tensors without their numbers.

        Names that differ only in the number keep it, because they must differ.
        """
        definition = meta_graph_pb2.SignatureDef(method_name=_PREDICT)
        for details, infos in (
            (self._inputs, definition.inputs),
            (self._outputs, definition.outputs),
        ):
            short = Counter(name.partition(":")[0] for name in details)
            for name, detail in details.items():
                start = name.partition(":")[0]
                info = infos[start if short[start] == 1 else name]
                info.name = name
                info.dtype = tf.as_dtype(detail["dtype"]).as_datatype_enum
                info.tensor_shape.CopyFrom(tf.TensorShape(detail["shape"]).as_proto())
        return {DEFAULT_SIGNATURE: definition}

    def run_of(
        self, definition: meta_graph_pb2.SignatureDef
    ) -> Callable[..., list[np.ndarray[Any, Any]]]:
        """Return a function that runs a signature. Its inputs and outputs are in the order of their names."""
        feeds = [_index(self._inputs, info.name) for _, info in sorted(definition.inputs.items())]
        fetches = [
            _index(self._outputs, info.name) for _, info in sorted(definition.outputs.items())
        ]
        if sorted(feeds) != sorted(detail["index"] for detail in self._inputs.values()):
            # A client could not send a missing input, which would then keep the value of another client.
            raise ValueError(
                f"its signature must name each of {len(self._inputs)} input tensors once, "
                f"got {sorted(info.name for info in definition.inputs.values())}"
            )
        details = {detail["index"]: detail for detail in self._inputs.values()}

        def run(*given: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
            arrays = [_as_in_file(details[i], array) for i, array in zip(feeds, given, strict=True)]
            with self._left:
                try:
                    interpreter = self._free.get_nowait()
                except queue.Empty:
                    interpreter = _Interpreter(self._content)
                # If the call fails, the interpreter is not kept, because it has the state of an unfinished call.
                found = interpreter.call(dict(zip(feeds, arrays, strict=True)), fetches)
                self._keep(interpreter, sum(array.size for array in arrays))
                return found

        return run

    def _keep(self, interpreter: _Interpreter, elements: int) -> None:
        """Keep an interpreter for later calls, unless a large call has made it too large."""
        interpreter.max_elements = max(interpreter.max_elements, elements)
        self._recent += (elements - self._recent) / _RECENT
        if interpreter.max_elements <= max(self._small, _UNUSUAL * self._recent):
            self._free.put(interpreter)


class _Interpreter:
    """LiteRT's interpreter, with the current shapes of its inputs."""

    def __init__(self, content: bytes) -> None:
        warnings.filterwarnings("ignore", message=_DEPRECATED)
        self.model = tf.lite.Interpreter(model_content=content, num_threads=1)
        self.model.allocate_tensors()
        self.max_elements = 0
        """Number of input elements of the interpreter's largest call."""
        self._shapes = {
            detail["index"]: tuple(detail["shape"]) for detail in self.model.get_input_details()
        }

    def call(
        self, feeds: Mapping[int, np.ndarray[Any, Any]], fetches: Sequence[int]
    ) -> list[np.ndarray[Any, Any]]:
        """Run the model once.

        Raises:
            ServeError: the model does not accept these inputs.
        """
        failure = "Failed to resize input tensor"
        try:
            changed = {
                i: array.shape for i, array in feeds.items() if array.shape != self._shapes[i]
            }
            for index, shape in changed.items():
                self.model.resize_tensor_input(index, shape)
            if changed:
                failure = "Failed to allocate tensors"
                self.model.allocate_tensors()
                self._shapes |= changed
            failure = "Failed to invoke TfLite interpreter"
            for index, array in feeds.items():
                self.model.set_tensor(index, array)
            self.model.invoke()
            return [np.asarray(self.model.get_tensor(index)) for index in fetches]
        except _FAILURES as error:
            raise ServeError(Code.INTERNAL, f"{failure}: {first_line(error)}") from error


def _by_name(details: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    found = {detail["name"]: detail for detail in details}
    if len(found) < len(details):
        raise ValueError("two of its inputs or outputs have the same name")
    return found


def _as_in_file(detail: Mapping[str, Any], array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return an input with the rank that the file declares: [1] is accepted for [1, 1].

    The shape must be checked, because LiteRT's operations trust it. A client chooses only the number of rows and the
    axes that the file leaves open.

    Raises:
        ServeError: the shape does not match the file's.
    """
    own = tuple(map(int, detail["shape"]))
    opened = tuple(map(int, detail["shape_signature"]))
    opened = opened if len(opened) == len(own) else own
    shape = array.shape
    if len(shape) < len(own) and -1 not in opened[1:]:
        inner = [size for size in shape[1:] if size != 1]
        if inner == [size for size in own[1:] if size != 1]:
            shape = (*shape[:1], *own[1:]) if shape else own
    fits = len(shape) == len(own) and all(
        size == there or (size > 0 and (number == 0 or is_open == -1))
        for number, (size, there, is_open) in enumerate(zip(shape, own, opened, strict=True))
    )
    if not fits or array.size != math.prod(shape):
        expected = ", ".join(
            "?" if n == 0 or size == -1 else str(size) for n, size in enumerate(opened)
        )
        raise ServeError(
            Code.INVALID_ARGUMENT,
            f"input {detail['name']!r} must have the shape [{expected}] and at least one row, "
            f"got {list(array.shape)}",
        )
    return array.reshape(shape)


def _index(details: Mapping[str, Mapping[str, Any]], name: str) -> int:
    """Return the index of the tensor with a name.

    An early converter wrote signatures with names that lack the number.
    """
    detail = details.get(name) or details.get(name.partition(":")[0])
    if detail is None:
        raise ValueError(f"its signature names an unknown tensor {name!r}")
    index: int = detail["index"]
    return index
