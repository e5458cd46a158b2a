"""Decode images inside the graph, so that the exported model takes encoded bytes.

A phone stores pixels as its sensor saw them; Exif says how the phone was held. If only ingest applied this
orientation, a model would be trained on upright images but served with rotated ones. The rules and limits
are those of `data/sources/images/headers.py`, applied to a whole batch at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.data.dataset import ImageShape
from stoker.data.sources.images import headers as image_headers
from stoker.data.sources.images.headers import (
    EXIF,
    MAX_ENTRIES,
    MAX_SEGMENTS,
    ORIENTATION_TAG,
    SHORT,
    TRANSPOSED,
)


# AutoGraph has nothing to convert here, but takes a second to find that out.
@tf.autograph.experimental.do_not_convert
def decode_images(encoded: tf.Tensor, shape: ImageShape) -> tf.Tensor:
    """Decode JPEG, PNG, GIF and WebP, apply Exif's orientation, and resize all images to one size.

    Args:
        encoded: [batch] strings, each the bytes of an image.
        shape: Size and channels of the result.

    Returns:
        [batch, height, width, channels] uint8. Images of a different size are resized bilinearly and
        rounded; with `fit: crop`, only their middle is used and resized with antialiasing.
    """
    images: tf.Tensor = tf.map_fn(  # type: ignore[call-overload]  # the stubs know no TensorSpec
        lambda one: _decode(one[0], one[1], shape),
        (encoded, orientations_of(encoded)),
        fn_output_signature=tf.TensorSpec([shape.height, shape.width, shape.channels], tf.uint8),
    )
    return tf.ensure_shape(images, [None, shape.height, shape.width, shape.channels])


def decode_whole(data: bytes, channels: int) -> NDArray[np.uint8]:
    """Return one image as the graph decodes it, upright, in its own size.

    Args:
        data: The encoded image.
        channels: 1 (gray) or 3 (RGB).

    Returns:
        [height, width, channels].

    Raises:
        ValueError: the image cannot be decoded.
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
        return decode_one(encoded[0], orientations_of(encoded)[0], channels)

    return decoder


def _decode(encoded: tf.Tensor, orientation_code: tf.Tensor, shape: ImageShape) -> tf.Tensor:
    image = decode_one(encoded, orientation_code, shape.channels)
    if shape.fit == "crop":
        image = _middle(image, shape)
    wanted = tf.constant([shape.height, shape.width])
    has_size = tf.reduce_all(tf.equal(tf.shape(image)[:2], wanted))
    antialias = shape.fit == "crop"
    sized = tf.cond(has_size, lambda: image, lambda: _resize(image, wanted, antialias=antialias))
    return tf.ensure_shape(sized, [shape.height, shape.width, shape.channels])


def _middle(image: tf.Tensor, shape: ImageShape) -> tf.Tensor:
    """Return the middle of an image, with the aspect ratio of `shape`.

    `feed/images/augment.py` has the same formula. Both use whole numbers: the graph's optimizer would
    replace a division of floats by a product with the reciprocal, and boxes could differ by a pixel.
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


_REFUSED, _EXACT, _COLOR = range(3)
"""Kinds of images: refused; JPEG and PNG; GIF and still WebP, which are always decoded in color."""

_OTHER = 0
"""Orientation code of images that are neither JPEG nor PNG."""


def orientations_of(encoded: tf.Tensor) -> tf.Tensor:
    """Return the orientation codes that `decode_one` needs: [batch] strings -> [batch] int32."""
    header = headers(encoded)
    return tf.where(_is_exact(header), orientations(encoded, header), _OTHER)


def decode_one(encoded: tf.Tensor, orientation_code: tf.Tensor, channels: int) -> tf.Tensor:
    """Decode one image and apply its orientation.

    Args:
        encoded: Scalar string: a JPEG, a PNG, a GIF (its first frame is used) or a WebP that is not
            animated; other formats are refused.
        orientation_code: Scalar, from `orientations_of`.
        channels: 1 (gray) or 3 (RGB). Alpha is dropped; transparent pixels of a GIF become black.

    Returns:
        [height, width, channels] uint8.
    """
    # Nearly every image needs only this branch; each further branch costs some microseconds per image.
    image: tf.Tensor = tf.cond(
        tf.equal(orientation_code, 1),
        lambda: _exact_pixels(encoded, channels),
        lambda: upright(_pixels(encoded, channels), orientation_code),
    )
    return image


def _is_exact(header: tf.Tensor) -> tf.Tensor:
    """Return which images are JPEG or PNG: [batch, HEADER_BYTES] -> [batch] bool."""
    return has_bytes(header, image_headers.JPEG) | has_bytes(header, image_headers.PNG)


def _exact_pixels(encoded: tf.Tensor, channels: int) -> tf.Tensor:
    """Decode a JPEG or PNG: scalar string -> [height, width, channels] uint8.

    Source: `tf.io.decode_jpeg` also decodes PNG; with INTEGER_ACCURATE its pixels equal those of
    libjpeg-turbo's slow path, which the fast decoders of the feed use.
    """
    return tf.io.decode_jpeg(encoded, channels=channels, dct_method="INTEGER_ACCURATE")


def _pixels(encoded: tf.Tensor, channels: int) -> tf.Tensor:
    header = headers(tf.expand_dims(encoded, 0))
    animated = has_bytes(header, b"VP8X", 12) & tf.not_equal(
        header[:, 20] & image_headers.ANIMATED, 0
    )
    color = (
        has_bytes(header, image_headers.WEBP)
        & has_bytes(header, image_headers.WEBP_KIND, 8)
        & tf.logical_not(animated)
    )
    for magic in image_headers.GIF:
        color |= has_bytes(header, magic)
    image: tf.Tensor = tf.switch_case(
        tf.where(_is_exact(header), _EXACT, tf.where(color, _COLOR, _REFUSED))[0],
        {
            _REFUSED: lambda: _refuse(channels),
            _EXACT: lambda: _exact_pixels(encoded, channels),
            _COLOR: lambda: _decode_color(encoded, channels),
        },
    )
    return tf.ensure_shape(image, [None, None, channels])


def _decode_color(encoded: tf.Tensor, channels: int) -> tf.Tensor:
    image = tf.io.decode_image(encoded, expand_animations=False)[:, :, :3]
    return image if channels == 3 else tf.image.rgb_to_grayscale(image)


def _refuse(channels: int) -> tf.Tensor:
    rule = "an image must be a JPEG, a PNG, a GIF or a WebP that is not animated"
    with tf.control_dependencies([tf.debugging.Assert(False, [rule])]):
        return tf.zeros([1, 1, channels], tf.uint8)


_JFIF = b"\xff\xe0\x00\x10"
_AFTER_JFIF = 21
"""Offset of the byte that names the segment after a JFIF segment of the usual length."""

_SEGMENT_BYTES = 4
_ENTRY_BYTES = 12


def orientations(encoded: tf.Tensor, header: tf.Tensor) -> tf.Tensor:
    """Return the Exif orientation of each image.

    Args:
        encoded: [batch] strings, each the bytes of an image.
        header: [batch, HEADER_BYTES] uint8, the first bytes of each image.

    Returns:
        [batch] int32, 1 (upright) to 8; 1 if an image is not a JPEG, or its Exif is missing or
        damaged.

    Source: Exif 2.32 (CIPA DC-008), 4.5.4 and 4.6.4; TIFF 6.0, section 2.
    """
    # Most JPEGs have only JFIF's 16 bytes before their tables, and no Exif.
    second = tf.where(has_bytes(header, _JFIF, 2), header[:, _AFTER_JFIF], header[:, 3])
    may_have_exif = has_bytes(header, image_headers.JPEG) & _is_metadata(second)
    orientation: tf.Tensor = tf.cond(
        tf.reduce_any(may_have_exif),
        lambda: _read_orientation(_tiff(encoded, may_have_exif)),
        lambda: tf.ones_like(encoded, tf.int32),
    )
    return orientation


def upright(image: tf.Tensor, orientation: tf.Tensor) -> tf.Tensor:
    """Turn one image upright.

    Args:
        image: [height, width, channels].
        orientation: Scalar, Exif's orientation, 1 to 8: it says which sides of the upright image the
            stored first row and first column are.

    Returns:
        The same pixels, upright; height and width are swapped if the stored image lies on its side.
    """

    def turned() -> tf.Tensor:
        is_transposed = orientation >= TRANSPOSED
        transposed = tf.raw_ops.Transpose(
            x=image, perm=tf.where(is_transposed, [1, 0, 2], [0, 1, 2])
        )
        upside_down = _is_one_of(orientation, 3, 4, 7, 8)
        mirrored = _is_one_of(orientation, 2, 3, 6, 7)
        flips = tf.stack([upside_down, mirrored, tf.constant(False)])
        return tf.raw_ops.Reverse(tensor=transposed, dims=flips)

    result: tf.Tensor = tf.cond(orientation > 1, turned, lambda: image)
    return result


def _is_one_of(value: tf.Tensor, *among: int) -> tf.Tensor:
    return tf.reduce_any(tf.equal(value, among))


def _is_metadata(marker: tf.Tensor) -> tf.Tensor:
    """Return which markers are APP0 to APP15 or a comment; only such segments may precede Exif."""
    return tf.equal(marker & 0xF0, 0xE0) | tf.equal(marker, 0xFE)


def _tiff(encoded: tf.Tensor, among: tf.Tensor) -> tf.Tensor:
    """Return the content of each image's first Exif segment; "" without one."""
    nowhere = tf.zeros_like(encoded, tf.int32)

    def look(
        at: tf.Tensor, searching: tf.Tensor, start: tf.Tensor, length: tf.Tensor
    ) -> tuple[tf.Tensor, ...]:
        header = bytes_at(encoded, at, _SEGMENT_BYTES + len(EXIF))
        marker, size = header[:, 1], header[:, 2] * 256 + header[:, 3]
        searching &= tf.equal(header[:, 0], 0xFF) & _is_metadata(marker) & (size >= 2)
        names = tf.reduce_all(tf.equal(header[:, _SEGMENT_BYTES:], list(EXIF)), axis=1)
        found = searching & tf.equal(marker, 0xE1) & names
        before = _SEGMENT_BYTES + len(EXIF)
        return (
            at + 2 + size,
            searching & ~found,
            tf.where(found, at + before, start),
            tf.where(found, tf.maximum(size + 2 - before, 0), length),
        )

    *_, start, length = tf.while_loop(
        lambda _at, searching, *_: tf.reduce_any(searching),
        look,
        (nowhere + 2, among, nowhere, nowhere),
        maximum_iterations=MAX_SEGMENTS,
    )
    return tf.strings.substr(encoded, tf.minimum(start, tf.strings.length(encoded)), length)


def _read_orientation(tiff: tf.Tensor) -> tf.Tensor:
    header = bytes_at(tiff, tf.zeros_like(tiff, tf.int32), 8)
    big = tf.reduce_all(tf.equal(header[:, :4], list(b"MM\x00*")), axis=1)
    little = tf.reduce_all(tf.equal(header[:, :4], list(b"II*\x00")), axis=1)
    at = _number(header[:, 4:], big)
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
    """Return [..., bytes] as [...] int64; the first byte is the highest if `big`."""
    wide = tf.cast(digits, tf.int64)
    places = tf.range(tf.shape(digits)[-1])
    shifts = tf.cast(tf.where(tf.expand_dims(big, -1), places[::-1], places) * 8, tf.int64)
    return tf.reduce_sum(tf.bitwise.left_shift(wide, shifts), axis=-1)


HEADER_BYTES = 22
"""Number of bytes at an image's start that are read to find its format."""


def headers(encoded: tf.Tensor) -> tf.Tensor:
    """Return the first bytes of images: [batch] strings -> [batch, HEADER_BYTES] uint8, zero-padded."""
    start = tf.strings.substr(encoded, 0, HEADER_BYTES)
    return tf.io.decode_raw(start, tf.uint8, fixed_length=HEADER_BYTES)


def has_bytes(header: tf.Tensor, text: bytes, at: int = 0) -> tf.Tensor:
    """Return which headers hold `text` at byte `at`: [batch, HEADER_BYTES] -> [batch] bool."""
    part = header[:, at : at + len(text)]
    return tf.reduce_all(tf.equal(part, tf.constant(list(text), tf.uint8)), axis=1)


def bytes_at(encoded: tf.Tensor, at: tf.Tensor, count: int) -> tf.Tensor:
    """Return `count` bytes of each string, starting at byte `at`: [batch, count] int32, zero-padded."""
    start = tf.minimum(at, tf.strings.length(encoded))
    part = tf.strings.substr(encoded, start, tf.fill(tf.shape(start), count))
    return tf.cast(tf.io.decode_raw(part, tf.uint8, fixed_length=count), tf.int32)
