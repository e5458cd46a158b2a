"""Encoded bytes -> one uint8 tensor, inside the graph, so that the exported model takes bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.data.dataset import ImageShape
from stoker.data.features.images.decoding import decoded, turns


# AutoGraph has nothing to convert here, and takes a second to find that out.
@tf.autograph.experimental.do_not_convert
def decode_images(encoded: tf.Tensor, shape: ImageShape) -> tf.Tensor:
    """Decode JPEG, PNG, GIF and WebP, stand them upright, and bring every image to one size.

    Args:
        encoded: [batch] strings, the bytes of an image each.
        shape: What every image is brought to.

    Returns:
        [batch, height, width, channels] uint8. Another size is resized bilinearly and rounded; under
        `fit: crop` only the middle is, with antialias.
    """
    images: tf.Tensor = tf.map_fn(  # type: ignore[call-overload]  # the stubs know no TensorSpec
        lambda one: _decode(one[0], one[1], shape),
        (encoded, turns(encoded)),
        fn_output_signature=tf.TensorSpec([shape.height, shape.width, shape.channels], tf.uint8),
    )
    return tf.ensure_shape(images, [None, shape.height, shape.width, shape.channels])


def decode_whole(data: bytes, channels: int) -> NDArray[np.uint8]:
    """One image as the graph decodes it, upright, before it is brought to a size.

    Args:
        data: The encoded image.
        channels: 1 (grey) or 3 (RGB).

    Returns:
        [height, width, channels].

    Raises:
        ValueError: it cannot be decoded.
    """
    try:
        with tf.device("CPU:0"):
            return np.asarray(_whole_decoder(channels)(tf.constant([data])))
    except tf.errors.OpError as error:
        raise ValueError(str(error).splitlines()[0]) from error


@functools.cache
def _whole_decoder(channels: int) -> Callable[[tf.Tensor], tf.Tensor]:
    @tf.function(input_signature=[tf.TensorSpec([1], tf.string)], autograph=False)
    def decoder(encoded: tf.Tensor) -> tf.Tensor:
        return decoded(encoded[0], turns(encoded)[0], channels)

    return decoder


def _decode(encoded: tf.Tensor, turn: tf.Tensor, shape: ImageShape) -> tf.Tensor:
    image = decoded(encoded, turn, shape.channels)
    if shape.fit == "crop":
        image = _middle(image, shape)
    wanted = tf.constant([shape.height, shape.width])
    has_size = tf.reduce_all(tf.equal(tf.shape(image)[:2], wanted))
    antialias = shape.fit == "crop"
    sized = tf.cond(has_size, lambda: image, lambda: _resize(image, wanted, antialias=antialias))
    return tf.ensure_shape(sized, [shape.height, shape.width, shape.channels])


def _middle(image: tf.Tensor, shape: ImageShape) -> tf.Tensor:
    """The middle of an image in the shape that is wanted.

    In whole numbers, as `feed/augment.py` has the same formula: of floats the graph's optimiser makes
    others, by a reciprocal, and a box may differ by a pixel.
    """
    size = tf.shape(image, tf.int64)
    high, wide = size[0], size[1]
    is_tall = high * shape.width > wide * shape.height
    by_width = (wide * shape.height + shape.width // 2) // shape.width
    by_height = (high * shape.width + shape.height // 2) // shape.height
    sides = tf.stack([tf.where(is_tall, by_width, high), tf.where(is_tall, wide, by_height)])
    box = tf.maximum(tf.constant(1, tf.int64), (sides * round(shape.crop * 1000) + 500) // 1000)
    start = (size[:2] - box) // 2
    end = start + box
    return image[start[0] : end[0], start[1] : end[1]]


def _resize(image: tf.Tensor, size: tf.Tensor, *, antialias: bool) -> tf.Tensor:
    resized = tf.image.resize(image, size, antialias=antialias)
    return tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8)
