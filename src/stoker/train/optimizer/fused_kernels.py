"""Computes Keras's Adam and BatchNormalization with single kernels, where XLA does not fuse them.

Adam: Keras's update consists of a dozen operations, and each is a pass over memory. For a wide layer they
take more time than its matrix products. TensorFlow's own kernel computes the same formula in one pass. It
computes `1 - beta_2` in float32, and Keras computes it in float64: for 0.999 the two differ by 5e-5, and
the updates by 2e-5.

On a CPU, the kernel divides its work among threads if a weight has more than some hundred numbers, and
waits for them. Then the dozen operations are faster, unless an array is so large that each result needs
newly mapped memory.

Keras computes the values that all weights share, mainly the powers of both betas, once for each weight.
In a small model these are a third of all operations of a step. Here they are computed once per update.

BatchNormalization: Keras's layer consists of a dozen operations, and each is a pass over the layer's input.
In a convolutional model they take as long as the convolutions. TensorFlow's kernel computes the same formula
in one pass forward and one pass for the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from stoker.internals.keras_internals import UPDATE_ALL, adam_slots, update_all
from stoker.train.model.keras_model import walk_layers
from stoker.train.optimizer.masked_assign import assign_condition

UNFUSED_SIZES = range(512, 40_000)
"""Sizes of a weight for which separate operations are faster than the kernel on a CPU: the kernel takes up to
2.5 times as long as they do. For other sizes, it takes 0.4 to 0.6 times as long (`benchmarks/train/adam.py`,
2 cores)."""


class _Scalars(NamedTuple):
    """The scalars that the updates of all weights of the same dtype on the same device use."""

    learning_rate: tf.Tensor
    """Learning rate; 0 if the update must change nothing."""

    beta_1: tf.Tensor
    beta_2: tf.Tensor
    """Keras's `beta_2`; 1 (as is `beta_1`) if the update must change neither momentum nor velocity."""

    beta_1_power: tf.Tensor
    beta_2_power: tf.Tensor

    alpha: tf.Tensor
    """The learning rate with both bias corrections."""


class _FusedAdam:
    """The update of Keras's Adam or AdamW with fewer operations."""

    def __init__(self, optimizer: keras.optimizers.Adam) -> None:
        self._optimizer = optimizer
        # (device, dtype) -> scalars, while all weights are updated; else None.
        self._scalars: dict[tuple[str, tf.DType], _Scalars] | None = None

    def update_all(self, gradients: Any, variables: Any, learning_rate: Any) -> None:
        """Update all weights; set as the optimizer's `UPDATE_ALL`. Keras's method calls `update` for each weight."""
        optimizer = self._optimizer
        self._scalars = {}
        try:
            update_all(optimizer)(optimizer, gradients, variables, learning_rate)
        finally:
            self._scalars = None

    def update(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update a weight; the gradient has the weight's shape.

        Source: keras.optimizers.Adam.update_step, tf.raw_ops.ResourceApplyAdam.
        """
        optimizer = self._optimizer
        # The gradient of an Embedding has only the used rows.
        if isinstance(gradient, tf.IndexedSlices):
            type(optimizer).update_step(optimizer, gradient, variable, learning_rate)
            return
        momentum, velocity = adam_slots(optimizer, variable)
        gradient = tf.cast(gradient, variable.dtype)
        scalars = self._shared(variable, learning_rate)
        if _on_cpu() and math.prod(variable.shape) in UNFUSED_SIZES:
            self._by_operations(variable, gradient, momentum, velocity, scalars.alpha)
        else:
            self._by_kernel(variable, gradient, momentum, velocity, scalars)

    def _shared(self, variable: tf.Variable, learning_rate: Any) -> _Scalars:
        kept = {} if self._scalars is None else self._scalars
        key = variable.device, variable.dtype
        if key not in kept:
            kept[key] = _scalars_of(self._optimizer, learning_rate, variable.dtype)
        return kept[key]

    def _by_operations(
        self,
        variable: tf.Variable,
        gradient: tf.Tensor,
        momentum: tf.Variable,
        velocity: tf.Variable,
        alpha: tf.Tensor,
    ) -> None:
        """Update with separate operations, which round as Keras's operations do."""
        optimizer = self._optimizer
        before = momentum.read_value(), velocity.read_value()
        first = before[0] + (gradient - before[0]) * (1 - optimizer.beta_1)
        second = before[1] + (tf.square(gradient) - before[1]) * (1 - optimizer.beta_2)
        momentum.assign(first)
        velocity.assign(second)
        variable.assign_sub(first * alpha / (tf.sqrt(second) + optimizer.epsilon))

    def _by_kernel(
        self,
        variable: tf.Variable,
        gradient: tf.Tensor,
        momentum: tf.Variable,
        velocity: tf.Variable,
        scalars: _Scalars,
    ) -> None:
        optimizer, dtype = self._optimizer, variable.dtype
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=momentum.handle,
            v=velocity.handle,
            beta1_power=scalars.beta_1_power,
            beta2_power=scalars.beta_2_power,
            lr=scalars.learning_rate,
            beta1=scalars.beta_1,
            beta2=scalars.beta_2,
            epsilon=tf.constant(optimizer.epsilon, dtype),
            grad=gradient,
        )


def _scalars_of(optimizer: keras.optimizers.Adam, learning_rate: Any, dtype: tf.DType) -> _Scalars:
    step = tf.cast(optimizer.iterations.value + 1, dtype)
    rate = tf.cast(learning_rate, dtype)
    betas = [tf.constant(beta, dtype) for beta in (optimizer.beta_1, optimizer.beta_2)]
    power_1, power_2 = (beta**step for beta in betas)
    alpha = rate * tf.sqrt(1 - power_2) / (1 - power_1)
    counts = assign_condition()
    if counts is not None:
        # The kernel writes through handles, which cannot be masked. If `counts` is False, the gradients are zero, and
        # with these values the kernel changes nothing.
        rate = tf.where(counts, rate, 0.0)
        betas = [tf.where(counts, beta, 1.0) for beta in betas]
    return _Scalars(
        learning_rate=rate,
        beta_1=betas[0],
        beta_2=betas[1],
        beta_1_power=power_1,
        beta_2_power=power_2,
        alpha=alpha,
    )


def _on_cpu() -> bool:
    return not tf.config.list_logical_devices("GPU")


def fuse(optimizer: keras.optimizers.Optimizer, *, wanted: bool) -> None:
    """Let Keras's Adam and AdamW use one kernel per weight, or their own operations again.

    Args:
        optimizer: The optimizer; other types, and `amsgrad`, are not changed.
        wanted: Whether to use the kernel: True unless XLA compiles the step, because XLA fuses Keras's
            operations itself.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if type(inner) not in (keras.optimizers.Adam, keras.optimizers.AdamW) or inner.amsgrad:
        return
    for method in ("update_step", UPDATE_ALL):
        vars(inner).pop(method, None)
    if wanted:
        fused = _FusedAdam(inner)
        inner.update_step = fused.update
        setattr(inner, UPDATE_ALL, fused.update_all)


_MIN_EPSILON = 1.001e-5
"""Minimum epsilon for cuDNN. Source: tf.nn.fused_batch_norm, which replaces a smaller one by this."""

_OURS = "fused"
"""Name of the attribute that marks a `call` from this module."""


def fuse_batch_norms(model: keras.Model, *, wanted: bool) -> None:
    """Let Keras's BatchNormalization layers use one kernel, or their own operations again.

    A layer that is frozen, or called without `training` or with a mask, uses Keras's operations.

    Args:
        model: A built model; inference and export do not change.
        wanted: Whether to use the kernel: True unless XLA compiles the step, because XLA fuses Keras's
            operations itself.
    """
    for _, layer in walk_layers(model):
        if type(layer) is not keras.layers.BatchNormalization:
            continue
        if getattr(layer.call, _OURS, False):
            del layer.call
        # Do not replace another `call`: it belongs to rematerialization, or to the user.
        if wanted and "call" not in vars(layer) and _is_plain(layer):
            layer.call = _fused(layer)


def _is_plain(layer: Any) -> bool:
    rank = layer.input_spec.ndim
    return (
        rank in (2, 3, 4)
        and layer.axis in (-1, rank - 1)
        and layer.epsilon >= _MIN_EPSILON
        and not layer.renorm
        and not layer.synchronized
    )


def _fused(layer: Any) -> Callable[..., Any]:
    plain = layer.call

    def call(self: Any, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        fits = inputs.dtype in (tf.float32, tf.float16, tf.bfloat16)
        if not training or not self.trainable or mask is not None or not fits:
            return plain(inputs, training=training, mask=mask)
        return _normalized(self, inputs)

    setattr(call, _OURS, True)
    return MethodType(call, layer)


def _normalized(layer: Any, inputs: tf.Tensor) -> tf.Tensor:
    """Normalize [batch, ..., channels], and update the moving statistics.

    The input keeps its dtype; scale, offset, mean and variance are float32. On a GPU, cuDNN's persistent
    kernel, which works on NHWC without transposes, is used only for 16-bit input and only if
    `TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT=1` is set (`stoker.app.import_tensorflow`).
    Four-dimensional input needs no reshape, so in float16 TensorFlow's remapper can fuse the following
    addition and ReLU with the kernel, if the number of channels is a multiple of 4. Not yet run on a GPU.

    Source: keras.layers.BatchNormalization.call, tf.raw_ops.FusedBatchNormV3; TensorFlow,
    core/kernels/fused_batch_norm_op.cc, core/grappler/optimizers/remapper.cc.
    """
    has_four_axes = inputs.shape.rank == 4
    x = inputs if has_four_axes else tf.reshape(inputs, _four_axes(inputs))
    channels = layer.moving_mean.shape[0]
    outputs, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=x,
        scale=tf.cast(layer.gamma, tf.float32) if layer.scale else tf.ones([channels]),
        offset=tf.cast(layer.beta, tf.float32) if layer.center else tf.zeros([channels]),
        mean=tf.zeros([0]),
        variance=tf.zeros([0]),
        epsilon=layer.epsilon,
        is_training=True,
    )
    # The kernel returns the unbiased variance, which is n / (n - 1) times the variance that Keras uses.
    count = tf.cast(tf.size(x) // channels, tf.float32)
    variance *= tf.where(count > 1.0, (count - 1.0) / count, 1.0)
    for moving, found in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        before = tf.cast(moving, tf.float32)
        moving.assign(before * layer.momentum + found * (1.0 - layer.momentum))
    shaped = outputs if has_four_axes else tf.reshape(outputs, tf.shape(inputs))
    return tf.cast(shaped, layer.compute_dtype)


def _four_axes(x: tf.Tensor) -> tf.Tensor:
    """Insert axes of length 1 before the last axis, because the kernel needs four axes."""
    shape = tf.shape(x)
    return tf.concat([shape[:-1], [1] * (4 - x.shape.rank), shape[-1:]], 0)
