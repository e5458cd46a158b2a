"""One encoded image -> its pixels, inside the graph, by the decoder that is right for its bytes.

TensorFlow's `decode_image` alone will not do: it takes its JPEG pixels from a less exact transform,
and an animated WebP without alpha makes TensorFlow 2.21 write past the end of its buffer.
"""

from __future__ import annotations

import tensorflow as tf

from stoker.data.features.images.encoded_bytes import heads, holds
from stoker.data.features.images.orientation import orientations, upright
from stoker.data.sources.images import headers

_REFUSED, _EXACT, _COLOUR = range(3)
"""Not decoded; JPEG and PNG; GIF and still WebP, which are always in colour."""

_OTHER = 0
"""In place of an orientation: neither JPEG nor PNG."""


def turns(encoded: tf.Tensor) -> tf.Tensor:
    """What `decoded` must know of each image beforehand: [batch] strings -> [batch] int32."""
    head = heads(encoded)
    return tf.where(_is_exact(head), orientations(encoded, head), _OTHER)


def decoded(encoded: tf.Tensor, turn: tf.Tensor, channels: int) -> tf.Tensor:
    """Decode one image and stand it upright.

    Args:
        encoded: Scalar string: a JPEG, PNG, GIF (its first frame) or still WebP; others are
            refused.
        turn: Scalar, what `turns` says of it.
        channels: 1 (grey) or 3 (RGB). Alpha is left out; what is transparent in a GIF is black.

    Returns:
        [height, width, channels] uint8.
    """
    # One branch for nearly every image: each costs some microseconds, an image.
    image: tf.Tensor = tf.cond(
        tf.equal(turn, 1),
        lambda: _exact_pixels(encoded, channels),
        lambda: upright(_pixels(encoded, channels), turn),
    )
    return image


def _is_exact(head: tf.Tensor) -> tf.Tensor:
    """Where an image is a JPEG or PNG: [batch, HEAD_BYTES] -> [batch] bool."""
    return holds(head, headers.JPEG) | holds(head, headers.PNG)


def _exact_pixels(encoded: tf.Tensor, channels: int) -> tf.Tensor:
    """Decode a JPEG or PNG: scalar string -> [height, width, channels] uint8.

    Source: `tf.io.decode_jpeg` also decodes PNG; with INTEGER_ACCURATE its pixels equal those of
    libjpeg-turbo's slow path, which the quick decoders of the feed use.
    """
    return tf.io.decode_jpeg(encoded, channels=channels, dct_method="INTEGER_ACCURATE")


def _pixels(encoded: tf.Tensor, channels: int) -> tf.Tensor:
    head = heads(tf.expand_dims(encoded, 0))
    animated = holds(head, b"VP8X", 12) & tf.not_equal(head[:, 20] & headers.ANIMATED, 0)
    colour = (
        holds(head, headers.WEBP) & holds(head, headers.WEBP_KIND, 8) & tf.logical_not(animated)
    )
    for magic in headers.GIF:
        colour |= holds(head, magic)
    image: tf.Tensor = tf.switch_case(
        tf.where(_is_exact(head), _EXACT, tf.where(colour, _COLOUR, _REFUSED))[0],
        {
            _REFUSED: lambda: _refused(channels),
            _EXACT: lambda: _exact_pixels(encoded, channels),
            _COLOUR: lambda: _coloured(encoded, channels),
        },
    )
    return tf.ensure_shape(image, [None, None, channels])


def _coloured(encoded: tf.Tensor, channels: int) -> tf.Tensor:
    image = tf.io.decode_image(encoded, expand_animations=False)[:, :, :3]
    return image if channels == 3 else tf.image.rgb_to_grayscale(image)


def _refused(channels: int) -> tf.Tensor:
    rule = "an image must be a JPEG, a PNG, a GIF or a WebP that is not animated"
    with tf.control_dependencies([tf.debugging.Assert(False, [rule])]):
        return tf.zeros([1, 1, channels], tf.uint8)
