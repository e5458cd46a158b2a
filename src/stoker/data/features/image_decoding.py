"""Encoded bytes -> one uint8 tensor, inside the graph, so that the exported model takes bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.data.dataset import ImageShape
from stoker.data.sources.images import formats, jpeg
from stoker.data.sources.images.exif import (
    EXIF,
    MAX_ENTRIES,
    MAX_SEGMENTS,
    ORIENTATION_TAG,
    SHORT,
    TRANSPOSED,
)


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
    return holds(head, jpeg.MAGIC) | holds(head, formats.PNG)


def _exact_pixels(encoded: tf.Tensor, channels: int) -> tf.Tensor:
    """Decode a JPEG or PNG: scalar string -> [height, width, channels] uint8.

    Source: `tf.io.decode_jpeg` also decodes PNG; with INTEGER_ACCURATE its pixels equal those of
    libjpeg-turbo's slow path, which the quick decoders of the feed use.
    """
    return tf.io.decode_jpeg(encoded, channels=channels, dct_method="INTEGER_ACCURATE")


def _pixels(encoded: tf.Tensor, channels: int) -> tf.Tensor:
    head = heads(tf.expand_dims(encoded, 0))
    animated = holds(head, b"VP8X", 12) & tf.not_equal(head[:, 20] & formats.ANIMATED, 0)
    colour = (
        holds(head, formats.WEBP) & holds(head, formats.WEBP_KIND, 8) & tf.logical_not(animated)
    )
    for magic in formats.GIF:
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


_JFIF = b"\xff\xe0\x00\x10"
_AFTER_JFIF = 21
"""Where the marker behind a JFIF segment of the usual length stands."""

_SEGMENT_BYTES = 4
_ENTRY_BYTES = 12


def orientations(encoded: tf.Tensor, head: tf.Tensor) -> tf.Tensor:
    """How each image must be turned to stand upright.

    Args:
        encoded: [batch] strings, the bytes of an image each.
        head: [batch, HEAD_BYTES] uint8, how they begin.

    Returns:
        [batch] int32, 1 (as it is) to 8; 1 where an image is no JPEG, says nothing, or its Exif is
        damaged.

    Source: Exif 2.32 (CIPA DC-008), 4.5.4 and 4.6.4; TIFF 6.0, section 2.
    """
    # Most JPEGs begin with JFIF's 16 bytes and go on with their tables: nothing to look for.
    second = tf.where(holds(head, _JFIF, 2), head[:, _AFTER_JFIF], head[:, 3])
    may_ask = holds(head, jpeg.MAGIC) & _is_note(second)
    asks: tf.Tensor = tf.cond(
        tf.reduce_any(may_ask),
        lambda: _directory_says(_tiff(encoded, may_ask)),
        lambda: tf.ones_like(encoded, tf.int32),
    )
    return asks


def upright(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Turn one image.

    Args:
        image: [height, width, channels].
        orientation: Scalar, as Exif means it: where the picture's first row and column lie.

    Returns:
        The same pixels, height and width changed where it lay on its side.
    """

    def turned() -> tf.Tensor:
        lies = orientation >= TRANSPOSED
        standing = tf.raw_ops.Transpose(x=image, perm=tf.where(lies, [1, 0, 2], [0, 1, 2]))
        upside_down = _is_one_of(orientation, 3, 4, 7, 8)
        mirrored = _is_one_of(orientation, 2, 3, 6, 7)
        flips = tf.stack([upside_down, mirrored, tf.constant(False)])
        return tf.raw_ops.Reverse(tensor=standing, dims=flips)

    result: tf.Tensor = tf.cond(orientation > 1, turned, lambda: image)
    return result


def _is_one_of(value: tf.Tensor, *among: int) -> tf.Tensor:
    return tf.reduce_any(tf.equal(value, among))


def _is_note(marker: tf.Tensor) -> tf.Tensor:
    """Where a marker is APP0 to APP15 or a comment, which alone may stand before Exif."""
    return tf.equal(marker & 0xF0, 0xE0) | tf.equal(marker, 0xFE)


def _tiff(encoded: tf.Tensor, among: tf.Tensor) -> tf.Tensor:
    """The content of each image's first Exif segment, "" where there is none."""
    nowhere = tf.zeros_like(encoded, tf.int32)

    def look(
        at: tf.Tensor, walking: tf.Tensor, start: tf.Tensor, length: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        head = bytes_at(encoded, at, _SEGMENT_BYTES + len(EXIF))
        marker, size = head[:, 1], head[:, 2] * 256 + head[:, 3]
        walking &= tf.equal(head[:, 0], 0xFF) & _is_note(marker) & (size >= 2)
        names = tf.reduce_all(tf.equal(head[:, _SEGMENT_BYTES:], list(EXIF)), axis=1)
        found = walking & tf.equal(marker, 0xE1) & names
        before = _SEGMENT_BYTES + len(EXIF)
        return (
            at + 2 + size,
            walking & ~found,
            tf.where(found, at + before, start),
            tf.where(found, tf.maximum(size + 2 - before, 0), length),
        )

    *_, start, length = tf.while_loop(
        lambda _at, walking, *_: tf.reduce_any(walking),
        look,
        (nowhere + 2, among, nowhere, nowhere),
        maximum_iterations=MAX_SEGMENTS,
    )
    return tf.strings.substr(encoded, tf.minimum(start, tf.strings.length(encoded)), length)


def _directory_says(tiff: tf.Tensor) -> tf.Tensor:
    head = bytes_at(tiff, tf.zeros_like(tiff, tf.int32), 8)
    big = tf.reduce_all(tf.equal(head[:, :4], list(b"MM\x00*")), axis=1)
    little = tf.reduce_all(tf.equal(head[:, :4], list(b"II*\x00")), axis=1)
    at = _number(head[:, 4:], big)
    beyond = tf.cast(tf.strings.length(tiff), tf.int64)
    directory = bytes_at(
        tiff, tf.cast(tf.minimum(at, beyond), tf.int32), 2 + _ENTRY_BYTES * MAX_ENTRIES
    )
    count = _number(directory[:, :2], big)
    entries = tf.reshape(directory[:, 2:], [-1, MAX_ENTRIES, _ENTRY_BYTES])
    big_entries = big[:, tf.newaxis]
    is_it = tf.equal(_number(entries[:, :, :2], big_entries), ORIENTATION_TAG)
    is_it &= tf.range(MAX_ENTRIES, dtype=tf.int64) < count[:, tf.newaxis]
    entry = tf.gather(entries, tf.argmax(is_it, axis=1), batch_dims=1)
    value = _number(entry[:, 8:10], big)
    valid = (little | big) & tf.reduce_any(is_it, axis=1) & (value >= 1) & (value <= 8)
    valid &= tf.equal(_number(entry[:, 2:4], big), SHORT) & tf.equal(_number(entry[:, 4:8], big), 1)
    return tf.where(valid, tf.cast(value, tf.int32), 1)


def _number(digits: tf.Tensor, big: tf.Tensor) -> tf.Tensor:
    """[..., bytes] -> [...] int64, its first byte the highest where `big`."""
    wide = tf.cast(digits, tf.int64)
    places = tf.range(tf.shape(digits)[-1])
    shifts = tf.cast(tf.where(tf.expand_dims(big, -1), places[::-1], places) * 8, tf.int64)
    return tf.reduce_sum(tf.bitwise.left_shift(wide, shifts), axis=-1)


HEAD_BYTES = 22
"""How much of each image is looked at to tell what it is."""


def heads(encoded: tf.Tensor) -> tf.Tensor:
    """How images begin: [batch] strings -> [batch, HEAD_BYTES] uint8, zeros behind their end."""
    start = tf.strings.substr(encoded, 0, HEAD_BYTES)
    return tf.io.decode_raw(start, tf.uint8, fixed_length=HEAD_BYTES)


def holds(head: tf.Tensor, text: bytes, at: int = 0) -> tf.Tensor:
    """Where `text` stands at byte `at` of each head: [batch, HEAD_BYTES] -> [batch] bool."""
    part = head[:, at : at + len(text)]
    return tf.reduce_all(tf.equal(part, tf.constant(list(text), tf.uint8)), axis=1)


def bytes_at(encoded: tf.Tensor, at: tf.Tensor, count: int) -> tf.Tensor:
    """`count` bytes of each string from `at` on: [batch, count] int32, zeros behind its end."""
    start = tf.minimum(at, tf.strings.length(encoded))
    part = tf.strings.substr(encoded, start, tf.fill(tf.shape(start), count))
    return tf.cast(tf.io.decode_raw(part, tf.uint8, fixed_length=count), tf.int32)
