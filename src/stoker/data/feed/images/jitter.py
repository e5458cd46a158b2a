"""Colour jitter inside the compiled step, by factors that `augment.color_factors` draws."""

from __future__ import annotations

import tensorflow as tf


def jitter_colors(images: tf.Tensor, factors: tf.Tensor) -> tf.Tensor:
    """Change brightness, contrast and saturation; call it inside the compiled step.

    Args:
        images: [batch, height, width, channels] uint8.
        factors: [batch, 3] float32, as `color_factors` gives them.

    Returns:
        The same shape, uint8, rounded once at the end.

    Source: torchvision `adjust_brightness`, `adjust_contrast`, `adjust_saturation`, whose grey is
    ITU-R BT.601's.
    """
    brightness, contrast, saturation = (
        factors[:, place, tf.newaxis, tf.newaxis, tf.newaxis] for place in range(3)
    )
    pixels = _limited(tf.cast(images, tf.float32) * brightness)
    mean = tf.reduce_mean(_grey(pixels), axis=[1, 2, 3], keepdims=True)
    pixels = _limited(mean + contrast * (pixels - mean))
    grey = _grey(pixels)
    pixels = _limited(grey + saturation * (pixels - grey))
    return tf.cast(tf.round(pixels), tf.uint8)


def _grey(pixels: tf.Tensor) -> tf.Tensor:
    if pixels.shape[-1] == 1:
        return pixels
    weighted: tf.Tensor = pixels * tf.constant([0.299, 0.587, 0.114])
    return tf.reduce_sum(weighted, axis=-1, keepdims=True)


def _limited(pixels: tf.Tensor) -> tf.Tensor:
    return tf.clip_by_value(pixels, 0.0, 255.0)
