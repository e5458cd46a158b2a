"""Keras's BatchNormalization as one kernel, where XLA does not fuse it.

Keras 3 writes it as a dozen operations, each a pass over the layer's input: in a convolutional
model they take as long as its convolutions. TensorFlow's own kernel computes the same formula in
one pass forward and one for the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import keras
import tensorflow as tf

from stoker.train.model.layer_paths import walk_layers

_LEAST_EPSILON = 1.001e-5
"""Source: tf.nn.fused_batch_norm, which passes cuDNN no smaller one."""

_OURS = "fused"
"""Name of the attribute that marks a `call` from this module."""


def fuse_batch_norms(model: keras.Model, *, wanted: bool) -> None:
    """Let Keras's BatchNormalization layers use one kernel, or their own operations again.

    A layer that is frozen, or called without `training` or with a mask, computes as in Keras.

    model: A built model; inference and export do not change.
        wanted: True unless XLA compiles the step; XLA fuses Keras's operations itself.
        wanted: Outside of XLA, which fuses Keras's operations by itself.
    """
    for _, layer in walk_layers(model):
        if type(layer) is not keras.layers.BatchNormalization:
            continue
        if getattr(layer.call, _OURS, False):
            del layer.call
        # Any other `call` belongs to rematerialization, or to the user.
        if wanted and "call" not in vars(layer) and _is_plain(layer):
            layer.call = _fused(layer)


def _is_plain(layer: Any) -> bool:
    rank = layer.input_spec.ndim
    return (
        rank in (2, 3, 4)
        and layer.axis in (-1, rank - 1)
        and layer.epsilon >= _LEAST_EPSILON
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

    The kernel takes the input in its own dtype; scale, offset, mean and variance are float32. On a
    GPU, only 16-bit input uses cuDNN's persistent kernel, which works on NHWC without transposes,
    and only if `TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT=1` is set (`stoker.app.import_tensorflow`).
    Four-dimensional input needs no reshape, so in float16 TensorFlow's remapper can fuse the
    following addition and ReLU with the kernel (multiples of 4 channels only). Not yet run on a
    GPU.

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
    # The kernel returns the unbiased variance, n / (n - 1) of the batch's own, which Keras keeps.
    count = tf.cast(tf.size(x) // channels, tf.float32)
    variance *= tf.where(count > 1.0, (count - 1.0) / count, 1.0)
    for moving, found in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        before = tf.cast(moving, tf.float32)
        moving.assign(before * layer.momentum + found * (1.0 - layer.momentum))
    shaped = outputs if has_four_axes else tf.reshape(outputs, tf.shape(inputs))
    return tf.cast(shaped, layer.compute_dtype)


def _four_axes(x: tf.Tensor) -> tf.Tensor:
    """Insert axes of length 1 before the last one, because the kernel takes four axes."""
    shape = tf.shape(x)
    return tf.concat([shape[:-1], [1] * (4 - x.shape.rank), shape[-1:]], 0)
