"""SavedModels with a fault in them: errors, delays, NaN, other predictions, hangs and crashes, by the input.

A request has one number x in 0..99. Both versions answer x / 100 + 1 and their version; a fault concerns the
requests with x below its percentage, or all. The faults are TensorFlow operations, so the server knows nothing of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow as tf
from keras.export import ExportArchive

OPERATIONS = ("Abort", "TensorDataset", "SleepDataset", "DatasetToSingleElement")
"""Operations of the faults that a server accepts only with --allow-ops."""

OUTAGE = 200.0
"""Requests with this x or a larger one are errors of every version: what both depend on is down."""

_HANG_US = 3_600_000_000


@dataclass(frozen=True, kw_only=True)
class Planted:
    """What is wrong with a version."""

    errors: float = 0.0
    """Percentage of the requests that end as an error."""

    nans: float = 0.0
    """Percentage of the answers that are not a number."""

    delay_ms: int = 0
    """What each run takes longer, without using a core."""

    shift: float = 0.0
    """What is added to each prediction; those of a healthy version are uniform over an interval of length 1."""

    hangs: float = 0.0
    """Percentage of the requests that are never answered."""

    crashes: float = 0.0
    """Percentage of the requests that end the process."""

    retrained: int | None = None
    """Seed of a model that is fitted to a sample of its own; None: answers are exact."""

    def concerns(self, x: float) -> bool:
        """Whether the answer to x is bad."""
        always = (
            self.delay_ms > 0 or self.shift > 0 or self.hangs > 0
        )  # a hanging run takes others with it
        return always or x < max(self.errors, self.nans, self.crashes)


HEALTHY = Planted()


def export(path: Path, *, version: int, planted: Planted = HEALTHY) -> Path:
    """Write a version; its answers say which one it is.

    Args:
        path: folder of the SavedModel.
        version: number that is part of each answer.
        planted: its fault.
    """
    fitted = None if planted.retrained is None else _fitted(planted.retrained)

    def call(x: tf.Tensor) -> dict[str, tf.Tensor]:
        with tf.control_dependencies(_faults(x, planted)):
            answer = x / 100.0 + 1.0 if fitted is None else _model(x, fitted)
            answer = tf.where(x < planted.nans, np.nan, answer + planted.shift)
            return {"answer": answer, "version": tf.zeros_like(x) + float(version)}

    archive = ExportArchive()
    spec = [tf.TensorSpec([None, 1], tf.float32, name="x")]
    archive.add_endpoint("serving_default", tf.function(call), input_signature=spec)
    archive.write_out(str(path), verbose=False)
    return path


def _faults(x: tf.Tensor, planted: Planted) -> list[tf.Tensor]:
    """What must happen before an answer."""
    found = [_checked(x < OUTAGE, x), _checked(x >= planted.errors, x)]
    if planted.delay_ms or planted.hangs:
        hangs = tf.reduce_any(x < planted.hangs)
        found.append(_slept(tf.where(hangs, _HANG_US, planted.delay_ms * 1000)))
    if planted.crashes:
        found.append(tf.cond(tf.reduce_any(x < planted.crashes), _aborted, lambda: True))
    return found


def _checked(condition: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """x, or an error unless a condition holds for all of it."""
    with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(condition), [x])]):
        return tf.identity(x)


def _slept(time_us: tf.Tensor) -> tf.Tensor:
    """True, later."""
    one = tf.raw_ops.TensorDataset(components=[tf.constant(True)], output_shapes=[[]])
    kind = {"output_types": [tf.bool], "output_shapes": [[]]}
    slept = tf.raw_ops.SleepDataset(
        input_dataset=one, sleep_microseconds=tf.cast(time_us, tf.int64), **kind
    )
    return tf.raw_ops.DatasetToSingleElement(dataset=slept, **kind)[0]


def _aborted() -> tf.Tensor:
    with tf.control_dependencies([tf.raw_ops.Abort(error_msg="a planted crash")]):
        return tf.constant(True)


_Weights = tuple[np.ndarray, np.ndarray, np.ndarray]


def _fitted(seed: int) -> _Weights:
    """A network of one random layer, fitted to 2,000 rows with noise."""
    random = np.random.default_rng(seed)
    x = random.uniform(0.0, 100.0, (2_000, 1)).astype(np.float32)
    y = x / 100.0 + 1.0 + random.normal(0.0, 0.1, x.shape)
    kernel = random.normal(0.0, 2.0, (1, 16)).astype(np.float32)
    bias = random.uniform(-2.0, 2.0, 16).astype(np.float32)
    hidden = np.tanh(x / 50.0 @ kernel - kernel + bias)
    out, *_ = np.linalg.lstsq(hidden, y, rcond=None)
    return kernel, bias, out.astype(np.float32)


def _model(x: tf.Tensor, weights: _Weights) -> tf.Tensor:
    kernel, bias, out = weights
    return tf.matmul(tf.tanh(tf.matmul(x / 50.0, kernel) - kernel + bias), out)
