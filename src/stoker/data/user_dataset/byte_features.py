"""Features of a user's dataset that are cached and transferred as uint8, which needs a quarter of float32's bytes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final, get_args

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from stoker.core.errors import ConfigError, Plain
from stoker.data.feed.calls import plain
from stoker.data.feed.config import ByteForm
from stoker.data.user_dataset.description import Description
from stoker.data.user_dataset.load_dataset import parts_of


class ByteFeatures:
    """Converts features to uint8 for the transfer to the step, and back in the step."""

    def __init__(self, description: Description, forms: Mapping[str, ByteForm]) -> None:
        """Check that the features exist, and have types that can be made from bytes.

        Args:
            description: Description of an element.
            forms: Feature -> how its numbers were made from bytes; only these features are converted.

        Raises:
            ConfigError: a feature does not exist, or its type cannot have been made from bytes.
        """
        types = {column.name: column.dtype for column in description.features}
        for name, form in forms.items():
            if name not in types:
                raise ConfigError(
                    f"train.feed.uint8 must name features of the dataset, not {name!r}",
                    got=Plain(", ".join(types)),
                    fix="Use only names from this list.",
                )
            possible = ("float", "int", "uint") if form == "x" else "float"
            if not types[name].startswith(possible):
                raise ConfigError(
                    f"train.feed.uint8: the feature {name!r} must have a type that {form} can have",
                    got=Plain(types[name]),
                    fix="Leave it out.",
                )
        self._forms = {name: _Form(form, types[name]) for name, form in forms.items()}

    def narrowed(self, dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        """Return the dataset with the features as uint8; its iterator fails at a number that a byte cannot restore."""
        if not self._forms:
            return dataset

        @plain
        def to_bytes(*element: Any) -> Any:
            features, *rest = parts_of(element)
            narrowed = {
                name: _checked_bytes(features[name], form, name=name)
                for name, form in self._forms.items()
            }
            return features | narrowed, *rest

        return dataset.map(to_bytes, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def widened_batch(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a batch with the original numbers of the features; call it inside the compiled step."""
        if not self._forms:
            return parts
        features, *rest = parts
        from_uint8 = {name: form.from_uint8(features[name]) for name, form in self._forms.items()}
        return dict(features) | from_uint8, *rest


class _Form:
    """How a feature's numbers were made from bytes."""

    def __init__(self, form: ByteForm, dtype: str) -> None:
        self.form = form
        self._dtype = dtype
        # A captured tensor, not a constant: instead of dividing by a constant, TensorFlow and XLA multiply by its
        # inverse, which gives different numbers.
        by = 1 / 255 if form == "x*(1/255)" else 255
        self._by = tf.cast(tf.constant(by, tf.float64), dtype)

    def to_uint8(self, value: tf.Tensor) -> tf.Tensor:
        """Convert numbers to bytes, rounded; numbers that were not made from bytes change."""
        if not value.dtype.is_floating:
            value = tf.cast(value, tf.float64)
        number = tf.round(value if self.form == "x" else value * tf.cast(255, value.dtype))
        return tf.cast(tf.clip_by_value(number, 0, 255), tf.uint8)

    def from_uint8(self, value: tf.Tensor) -> tf.Tensor:
        """Convert bytes back to the original numbers."""
        number = tf.cast(value, self._dtype)
        if self.form == "x":
            return number
        return number / self._by if self.form == "x/255" else number * self._by


def _checked_bytes(value: tf.Tensor, form: _Form, *, name: str) -> tf.Tensor:
    found = form.to_uint8(value)
    rule = (
        f"train.feed.uint8: all numbers of the feature {name!r} must be {form.form} of a whole number x from 0 to "
        "255; remove the feature from this setting"
    )
    same = tf.reduce_all(tf.equal(_bits(form.from_uint8(found)), _bits(value)))
    with tf.control_dependencies([tf.debugging.Assert(same, [rule])]):
        return tf.identity(found)


def _bits(value: tf.Tensor) -> tf.Tensor:
    """Return the bits of numbers: they differ for -0.0 and 0.0, which are equal as numbers, but not as divisors."""
    kinds = {2: tf.int16, 4: tf.int32, 8: tf.int64}
    return tf.bitcast(value, kinds[value.dtype.size]) if value.dtype.is_floating else value


FORMS: Final[tuple[ByteForm, ...]] = get_args(ByteForm)

MIN_BYTES = 1024
"""Minimum size per record of a feature that is checked, bytes."""


class ByteForms:
    """Finds the form in which a feature's numbers were made from bytes, batch by batch."""

    def __init__(self) -> None:
        self._possible: tuple[ByteForm, ...] = FORMS

    def add(self, values: NDArray[Any]) -> None:
        """Add a batch, [batch, ...]."""
        self._possible = tuple(form for form in self._possible if _matches(values, form))

    @property
    def form(self) -> ByteForm | None:
        """The first form that matches all values (if all are 0 or 1, several match); None if none matches."""
        return self._possible[0] if self._possible else None


def _matches(values: NDArray[Any], form: ByteForm) -> bool:
    kind = values.dtype.kind
    if kind not in "fiu" or values.dtype.itemsize == 1 or (kind != "f" and form != "x"):
        return False
    if values.size * values.dtype.itemsize < MIN_BYTES * max(1, len(values)):
        return False
    wide = np.nan_to_num(values.astype(np.float64)) * (1 if form == "x" else 255)
    places = np.clip(np.rint(wide), 0, 255).astype(np.uint8)
    bits = np.dtype(f"u{values.dtype.itemsize}")
    # Bits are compared, because -0.0 and 0.0 are equal but differ as divisors.
    made = _table(form, values.dtype.name)[places]
    return bool((made.view(bits) == np.ascontiguousarray(values).view(bits)).all())


@functools.cache
def _table(form: ByteForm, dtype: str) -> NDArray[Any]:
    """Return the number that the form makes of each byte: [256]."""
    numbers = np.arange(256).astype(dtype)
    if form == "x/255":
        return numbers / numbers.dtype.type(255)
    if form == "x*(1/255)":
        return numbers * numbers.dtype.type(1 / 255)
    return numbers
