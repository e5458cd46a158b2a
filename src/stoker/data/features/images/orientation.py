"""Pictures stood upright inside the graph, as the Exif of a JPEG asks.

A phone stores what its sensor saw and how it was held. Were that applied only when the data is
ingested, a model would be trained on upright pictures and be served lying ones.

The rules and bounds are those of `data/sources/images/headers.py`, a whole batch at a time: a walk over the
first segments, then one directory, and nothing of it where no image has Exif.
"""

from __future__ import annotations

import tensorflow as tf

from stoker.data.features.images.encoded_bytes import bytes_at, holds
from stoker.data.sources.images import headers
from stoker.data.sources.images.headers import (
    EXIF,
    MAX_ENTRIES,
    MAX_SEGMENTS,
    ORIENTATION_TAG,
    SHORT,
    TRANSPOSED,
)

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
    may_ask = holds(head, headers.JPEG) & _is_note(second)
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
