"""Compares both Adam updates of `train/optimizer/fused_kernels.py` with Keras's, by size of a weight.

python benchmarks/train/adam.py

Four weights of a size in a loop of TensorFlow's, by turns in one process; prints a line a size, at its end
how many times as long the kernel takes as our operations. `UNFUSED_SIZES` is the sizes of which that is
more than 1.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf

from stoker.train.optimizer import fused_kernels

SIZES = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 40000, 65536, 262144)
EVERY = range(2**31)
NONE = range(0)
WEIGHTS = 4
TURNS = 9


def make(size: int, *, apart: range | None) -> Callable[[tf.Tensor], Any]:
    """Steps that do nothing but update, by Keras or by ours with operations for these sizes."""
    weights = [keras.Variable(np.zeros(size, np.float32)) for _ in range(WEIGHTS)]
    optimizer = keras.optimizers.Adam(1e-4)
    optimizer.build(weights)
    fused_kernels.fuse(optimizer, wanted=apart is not None)
    gradients = [tf.random.stateless_normal([size], (0, number)) for number in range(WEIGHTS)]

    @tf.function(autograph=False)
    def steps(count: tf.Tensor) -> Any:
        def one(done: tf.Tensor) -> tuple[tf.Tensor]:
            # Not the same tensors in each step, which would be a constant's.
            scaled = [gradient * tf.cast(done, tf.float32) for gradient in gradients]
            optimizer.apply(scaled, weights)
            with tf.control_dependencies([tf.identity(weight.value) for weight in weights]):
                return (done + 1,)

        return tf.while_loop(
            lambda done: done < count, one, (tf.constant(0),), parallel_iterations=1
        )

    if apart is not None:
        fused_kernels.UNFUSED_SIZES = apart
    steps(tf.constant(1))
    return steps


def main() -> None:
    """Measure and say."""
    for size in SIZES:
        count = tf.constant(200 if size < 50_000 else 40)
        kinds = [make(size, apart=apart) for apart in (None, EVERY, NONE)]
        taken_us: list[list[float]] = [[], [], []]
        for turn in range(TURNS + 2):
            for steps, taken in zip(kinds, taken_us, strict=True):
                begun_s = time.perf_counter()
                steps(count)[0].numpy()
                if turn >= 2:
                    taken.append((time.perf_counter() - begun_s) / int(count) * 1e6)
        keras_us, apart_us, one_us = map(statistics.median, taken_us)
        sys.stdout.write(
            f"{size:7d}: Keras {keras_us:7.1f} us, apart {apart_us:7.1f} us, kernel {one_us:7.1f} us, "
            f"{one_us / apart_us:.2f}\n"
        )


if __name__ == "__main__":
    main()
