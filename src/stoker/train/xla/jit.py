"""Functions compiled by XLA: same random numbers, and the same name in every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import config

from stoker.train.xla.random_numbers import SAME_BITS, SAME_FLOATS
from stoker.train.xla.tensorflow_internals import steady_names


def jit(function: Callable[..., Any], *, role: str) -> Callable[..., Any]:
    """Let XLA compile a function of tensors, with a name that other processes find in the cache.

    Args:
        function: As for `tf.function`.
        role: Its role in the step. Functions with other roles get other names.
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
    """Switches that change a compiled program but are not in its graph, nor in the cache's key."""
    exact = config.is_op_determinism_enabled()  # type: ignore[no-untyped-call]  # TensorFlow has no types here
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    return f"deterministic={bool(exact)} tf32={bool(tf32)}"
