"""Features of a user's dataset kept and sent as uint8: a quarter of float32's bytes, the same numbers."""

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


class Bytes:
    """What becomes of the features that are named, on their way to the step."""

    def __init__(self, description: Description, forms: Mapping[str, ByteForm]) -> None:
        """Check what is named.

        Args:
            description: What an element holds.
            forms: Feature -> how its numbers were made of bytes.

        Raises:
            ConfigError: a feature is not there, or is no such numbers.
        """
        types = {column.name: column.dtype for column in description.features}
        for name, form in forms.items():
            if name not in types:
                raise ConfigError(
                    f"train.feed.uint8 must name features of the dataset, not {name!r}",
                    got=Plain(", ".join(types)),
                    fix="Name one of these.",
                )
            possible = ("float", "int", "uint") if form == "x" else "float"
            if not types[name].startswith(possible):
                raise ConfigError(
                    f"train.feed.uint8: the feature {name!r} must be numbers that {form} makes",
                    got=Plain(types[name]),
                    fix="Leave it out.",
                )
        self._kept = {name: _Form(form, types[name]) for name, form in forms.items()}

    def kept(self, dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        """The dataset with the named features as uint8; its iterator fails at any other number."""
        if not self._kept:
            return dataset

        @plain
        def narrow(*element: Any) -> Any:
            features, *rest = parts_of(element)
            narrowed = {
                name: _narrowed(features[name], form, name=name)
                for name, form in self._kept.items()
            }
            return features | narrowed, *rest

        return dataset.map(narrow, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def loaded(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """A batch with the features as they were; call it inside the compiled step."""
        if not self._kept:
            return parts
        features, *rest = parts
        widened = {name: form.widened(features[name]) for name, form in self._kept.items()}
        return dict(features) | widened, *rest


class _Form:
    """How a feature's numbers were made of bytes."""

    def __init__(self, form: ByteForm, dtype: str) -> None:
        self.form = form
        self._dtype = dtype
        # A tensor that a function captures, and no constant in it: TensorFlow and XLA multiply by the
        # inverse of a constant, which gives other numbers than a quotient.
        by = 1 / 255 if form == "x*(1/255)" else 255
        self._by = tf.cast(tf.constant(by, tf.float64), dtype)

    def rounded(self, value: tf.Tensor) -> tf.Tensor:
        """As uint8, whatever is lost."""
        if not value.dtype.is_floating:
            value = tf.cast(value, tf.float64)
        number = tf.round(value if self.form == "x" else value * tf.cast(255, value.dtype))
        return tf.cast(tf.clip_by_value(number, 0, 255), tf.uint8)

    def widened(self, value: tf.Tensor) -> tf.Tensor:
        """As it was."""
        number = tf.cast(value, self._dtype)
        if self.form == "x":
            return number
        return number / self._by if self.form == "x/255" else number * self._by


def _narrowed(value: tf.Tensor, form: _Form, *, name: str) -> tf.Tensor:
    found = form.rounded(value)
    said = (
        f"train.feed.uint8: the feature {name!r} must be what {form.form} makes of whole numbers from 0 "
        "to 255; leave it out there"
    )
    same = tf.reduce_all(tf.equal(_bits(form.widened(found)), _bits(value)))
    with tf.control_dependencies([tf.debugging.Assert(same, [said])]):
        return tf.identity(found)


def _bits(value: tf.Tensor) -> tf.Tensor:
    """A zero below zero is another number to whoever divides by it."""
    kinds = {2: tf.int16, 4: tf.int32, 8: tf.int64}
    return tf.bitcast(value, kinds[value.dtype.size]) if value.dtype.is_floating else value


FORMS: Final[tuple[ByteForm, ...]] = get_args(ByteForm)

LEAST_BYTES = 1024
"""Of a record's feature, from which on it is worth a look."""


class ByteForms:
    """The forms that are possible after all that was seen; none where it is another kind of feature."""

    def __init__(self) -> None:
        self._possible: tuple[ByteForm, ...] = FORMS

    def add(self, values: NDArray[Any]) -> None:
        """Take in a batch, [batch, ...]."""
        self._possible = tuple(form for form in self._possible if _holds(values, form))

    @property
    def form(self) -> ByteForm | None:
        """The first one that is possible; of 0 and 1 alone several are."""
        return self._possible[0] if self._possible else None


def _holds(values: NDArray[Any], form: ByteForm) -> bool:
    kind = values.dtype.kind
    if kind not in "fiu" or values.dtype.itemsize == 1 or (kind != "f" and form != "x"):
        return False
    if values.size * values.dtype.itemsize < LEAST_BYTES * max(1, len(values)):
        return False
    wide = np.nan_to_num(values.astype(np.float64)) * (1 if form == "x" else 255)
    places = np.clip(np.rint(wide), 0, 255).astype(np.uint8)
    bits = np.dtype(f"u{values.dtype.itemsize}")
    # By their bits: a zero below zero is another number to whoever divides by it.
    made = _table(form, values.dtype.name)[places]
    return bool((made.view(bits) == np.ascontiguousarray(values).view(bits)).all())


@functools.cache
def _table(form: ByteForm, dtype: str) -> NDArray[Any]:
    """What each byte becomes."""
    numbers = np.arange(256).astype(dtype)
    if form == "x/255":
        return numbers / numbers.dtype.type(255)
    if form == "x*(1/255)":
        return numbers * numbers.dtype.type(1 / 255)
    return numbers
