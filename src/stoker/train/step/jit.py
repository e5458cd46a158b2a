"""Compiles functions with XLA, with the same random numbers as without, and the same name in every process.

With and without XLA, a seed gives the same random bits, but XLA converts them to floats differently. Here
uniform numbers (Dropout, random flips and crops) are converted as TensorFlow's kernels convert them, so that
a run can switch to XLA. Other distributions keep XLA's own numbers.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from stoker.core.threads import Replaced
from stoker.internals.tensorflow_internals import (
    gen_stateless_random_ops_v2,
    is_op_determinism_enabled,
    ops,
    random_ops_util,
)

_key_counter_alg = random_ops_util.get_key_counter_alg
_uniform = gen_stateless_random_ops_v2.stateless_random_uniform_v2

_MANTISSA = {
    tf.float32: (tf.uint32, 0x7FFFFF, 0x3F800000),
    tf.float16: (tf.uint16, 0x3FF, 15 << 10),
    tf.bfloat16: (tf.uint16, 0x7F, 127 << 7),
}
"""Float dtype -> integer dtype of the same size, number of mantissa bits, and bits of the number 1.0.

Source: tensorflow/core/lib/random/random_distributions_utils.h, `Uint32ToFloat`; and
random_distributions.h, `Uint16ToHalf`, `Uint16ToGfloat16`.
"""


def _by_philox(seed: Any, alg: Any) -> Any:
    """Use TensorFlow's algorithm on a CPU and on a GPU; XLA's default algorithm draws other bits."""
    automatic = random_ops_util.Algorithm.AUTO_SELECT
    if alg is None or random_ops_util.convert_alg_to_int(alg) == automatic.value:
        alg = random_ops_util.Algorithm.PHILOX.value
    return _key_counter_alg(seed, alg)


def _from_bits(
    shape: Any, key: Any, counter: Any, alg: Any, dtype: Any = tf.float32, name: Any = None
) -> Any:
    dtype = tf.as_dtype(dtype)
    if dtype not in _MANTISSA:
        return _uniform(shape, key=key, counter=counter, alg=alg, dtype=dtype, name=name)
    integer, mantissa, one = _MANTISSA[dtype]
    bits = gen_stateless_random_ops_v2.stateless_random_uniform_full_int_v2(
        shape, key=key, counter=counter, alg=alg, dtype=tf.uint32, name=name
    )
    bits = tf.cast(tf.bitwise.bitwise_and(bits, tf.constant(mantissa, tf.uint32)), integer)
    from_one_to_two = tf.bitwise.bitwise_or(bits, tf.constant(one, integer))
    return tf.bitcast(from_one_to_two, dtype) - tf.constant(1, dtype)


SAME_BITS = Replaced(random_ops_util, get_key_counter_alg=_by_philox)
"""Context in which the same random bits are drawn as without XLA, together with `SAME_FLOATS`; it is used
while a function is traced for XLA."""

SAME_FLOATS = Replaced(gen_stateless_random_ops_v2, stateless_random_uniform_v2=_from_bits)
"""Context in which random bits are converted to floats as without XLA; see `SAME_BITS`."""


_FIRST = 1 << 60
"""First number that is assigned here: far above the numbers that TensorFlow assigns itself."""

_NUMBERS = 1 << 24
"""Number of numbers that are reserved for a trace: each symbolic tensor and each nested function takes one."""


class SteadyNames:
    """Gives functions names that do not depend on earlier traces in the process.

    TensorFlow numbers its functions: `__inference_body_3627`. The number is part of the key in the
    persistent compilation cache, so another process finds a program only if the number is the same.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: set[int] = set()
        self._next: dict[int, int] = {}
        self._plain = ops.uid

    @contextmanager
    def __call__(self, content: str) -> Iterator[None]:
        """In the `with` block, derive the numbers of functions that this thread traces from their content.

        Args:
            content: Identifies what is traced, with everything that changes the compiled program but is
                not in the graph. A second trace of the same content gets other numbers.
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
"""The `SteadyNames` of this process."""


def jit(function: Callable[..., Any], *, role: str) -> Callable[..., Any]:
    """Let XLA compile a function of tensors, under a name that other processes find in the cache.

    Args:
        function: The function, as for `tf.function`.
        role: Role of the function in the step; functions with different roles get different names.
    """
    compiled = tf.function(function, jit_compile=True)

    @tf.autograph.experimental.do_not_convert
    def call(*args: Any) -> Any:
        with SAME_BITS, SAME_FLOATS, steady_names(f"{role} {_specs(args)} {_switches()}"):
            return compiled(*args)

    return call


def _specs(args: Any) -> str:
    return " ".join(
        "-" if each is None else f"{each.dtype.name}{each.shape}"
        for each in tf.nest.flatten(args, expand_composites=True)
    )


def _switches() -> str:
    """Return switches that change a compiled program, but are neither in its graph nor in the cache's key."""
    exact = is_op_determinism_enabled()
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    return f"deterministic={exact} tf32={bool(tf32)}"
