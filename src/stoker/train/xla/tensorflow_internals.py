"""TensorFlow's private API as needed for compiling with XLA (`random_numbers` has the rest).

A test calls `require_internals`: it names what an upgrade of TensorFlow has removed.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import ops
from tensorflow.python.ops import (  # type: ignore[attr-defined]  # TensorFlow has no types here
    gen_stateless_random_ops_v2,
    random_ops_util,
)

from stoker.core.errors import CheckFailed, Plain

_FIRST = 1 << 60
"""First steady number, far above those that TensorFlow assigns itself."""

_NUMBERS = 1 << 24
"""Numbers reserved for one trace: each symbolic tensor and each nested function takes one."""

_WANTED = {
    ops: ("uid",),
    concrete_function: ("_inference_name",),
    random_ops_util: ("get_key_counter_alg", "convert_alg_to_int", "Algorithm"),
    gen_stateless_random_ops_v2: (
        "stateless_random_uniform_v2",
        "stateless_random_uniform_full_int_v2",
    ),
    concrete_function.ConcreteFunction: ("_call_flat", "captured_inputs"),
}


def require_internals() -> None:
    """Check that TensorFlow still has everything that this module uses.

    Raises:
        CheckFailed: something is missing; the error names it.
    """
    gone = [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for owner, names in _WANTED.items()
        for name in names
        if not hasattr(owner, name)
    ]
    if gone:
        raise CheckFailed(
            "TensorFlow must have what compiling by XLA uses",
            got=Plain(f"TensorFlow {tf.__version__} without {', '.join(gone)}"),
            fix="Adapt src/stoker/train/xla/tensorflow_internals.py to this version.",
        )


def copies_of_captures(function: Any) -> list[tf.Variable]:
    """Copies of all variables that a concrete function uses: same devices, same values.

    Args:
        function: A concrete function.

    Returns:
        One variable per captured one, in the order of `function.captured_inputs`.
    """
    copies = []
    for variable in _captured(function):
        if variable is not None:
            with tf.device(variable.device):
                copies.append(tf.Variable(_copied(variable), trainable=False))
    return copies


def call_on_copies(function: Any, args: Any, copies: Sequence[tf.Variable]) -> Any:
    """Call a concrete function so that it reads and writes only copies of its variables.

    Args:
        function: A concrete function.
        args: Its arguments, nested; flattened in TensorFlow's order.
        copies: From `copies_of_captures`.
    """
    left = iter(copies)
    captures = [
        tensor if variable is None else next(left).handle
        for tensor, variable in zip(function.captured_inputs, _captured(function), strict=True)
    ]
    flat = tf.nest.flatten(args, expand_composites=True)
    return function._call_flat(flat, captures)  # noqa: SLF001 - no public call replaces captures


def _copied(variable: tf.Variable) -> tf.Tensor:
    """Its value in separate memory: a step may write a variable's memory in place."""
    value = variable.read_value()
    if value.dtype.is_floating or value.dtype.is_integer or value.dtype.is_complex:
        return value + tf.zeros([], value.dtype)
    return tf.zeros(value.shape, value.dtype)


def _captured(function: Any) -> list[tf.Variable | None]:
    """The variable of each captured input; None for a tensor or another resource."""
    variables = {id(variable.handle): variable for variable in function.graph.variables}
    return [variables.get(id(tensor)) for tensor in function.captured_inputs]


class SteadyNames:
    """Function names that do not depend on earlier traces in the process.

    TensorFlow numbers its functions: `__inference_body_3627`. The number is in the key of the
    persistent compilation cache, so a program is found again only if the numbers repeat.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._next: dict[int, int] = {}
        self._plain = ops.uid

    @contextmanager
    def __call__(self, content: str) -> Iterator[None]:
        """Number the functions that this thread traces by their content.

        Args:
            content: Identifies what is traced, with everything that changes the compiled program
                but is not in the graph. A second trace of the same content gets different numbers.
        """
        thread = threading.get_ident()
        with self._lock:
            if thread in self._next:
                raise RuntimeError("steady names cannot be nested")
            if not self._next:
                self._plain, ops.uid = ops.uid, self._uid
            self._next[thread] = self._free(content)
        try:
            yield
        finally:
            with self._lock:
                del self._next[thread]
                if not self._next:
                    ops.uid = self._plain

    def _free(self, content: str) -> int:
        for attempt in range(len(self._taken) + 1):
            place = zlib.crc32(f"{attempt} {content}".encode())
            if place not in self._taken:
                break
        self._taken.add(place)
        return _FIRST + place * _NUMBERS

    def _uid(self) -> int:
        thread = threading.get_ident()
        number = self._next.get(thread)
        if number is None:
            return int(self._plain())
        self._next[thread] = number + 1
        return number


steady_names = SteadyNames()
"""The steady names of this process."""
