"""Features of a user's dataset kept and sent as uint8: a quarter of float32's bytes, the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.data.feed.calls import plain
from stoker.data.feed.options import as_written
from stoker.data.own.description import Description
from stoker.data.own.elements import parts_of

NUMBERS = ("float", "int", "uint")
"""How the names of the types begin that may be numbers from 0 to 255."""

SCALES = (1.0, 255.0)
"""Pixels are written from 0 to 255, or from 0 to 1."""

LOOKED_AT = 4
"""Batches that are looked at to know whether a feature is such numbers."""

LEAST_BYTES = 1024
"""Of a row's feature, from which on sending it in fewer bytes is worth a try."""


class Bytes:
    """What becomes of the features that are named, on their way to the step."""

    def __init__(self, description: Description, scales: Mapping[str, float]) -> None:
        """Check what is named.

        Args:
            description: What an element holds.
            scales: Feature -> what its numbers are multiplied by to be whole ones from 0 to 255.

        Raises:
            ConfigError: a feature is not there, or is no numbers.
        """
        types = {column.name: column.dtype for column in description.features}
        for name, scale in scales.items():
            if name not in types:
                raise ConfigError(
                    f"train.feed.uint8 must name features of the dataset, not {name!r}",
                    got=Plain(", ".join(types)),
                    fix="Name one of these.",
                )
            if not types[name].startswith(NUMBERS):
                raise ConfigError(
                    f"train.feed.uint8: the feature {name!r} must be numbers",
                    got=Plain(types[name]),
                    fix="Leave it out.",
                )
            if scale != 1 and not types[name].startswith("float"):
                raise ConfigError(
                    f"train.feed.uint8: the feature {name!r} must be multiplied by 1",
                    got=Plain(f"{scale:g}, of {types[name]} numbers"),
                    fix=f"Write `{name}: 1`.",
                )
        self._kept = {name: _Scale(scale, types[name]) for name, scale in scales.items()}

    def kept(self, dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
        """The dataset with the named features as uint8; its iterator fails at any other number."""
        if not self._kept:
            return dataset

        @plain
        def narrow(*element: Any) -> Any:
            features, *rest = parts_of(element)
            narrowed = {
                name: _narrowed(features[name], scale, name=name)
                for name, scale in self._kept.items()
            }
            return features | narrowed, *rest

        return dataset.map(narrow, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)

    def loaded(self, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """A batch with the features as they were; call it inside the compiled step."""
        if not self._kept:
            return parts
        features, *rest = parts
        widened = {name: scale.widened(features[name]) for name, scale in self._kept.items()}
        return dict(features) | widened, *rest


class _Scale:
    """What a feature's numbers are multiplied by."""

    def __init__(self, scale: float, dtype: str) -> None:
        self.value = scale
        self._dtype = dtype
        # A tensor that a function captures, and no constant in it: TensorFlow and XLA multiply by the
        # inverse of a constant, which gives other numbers than a quotient.
        self._divisor = tf.cast(tf.constant(scale, tf.float64), dtype)

    def rounded(self, value: tf.Tensor) -> tf.Tensor:
        """As uint8, whatever is lost."""
        if not value.dtype.is_floating:
            value = tf.cast(value, tf.float64)
        number = tf.round(value * tf.cast(self.value, value.dtype))
        return tf.cast(tf.clip_by_value(number, 0, 255), tf.uint8)

    def widened(self, value: tf.Tensor) -> tf.Tensor:
        """As it was."""
        number = tf.cast(value, self._dtype)
        return number if self.value == 1 else number / self._divisor


def byte_scales(dataset: tf.data.Dataset[Any]) -> dict[str, float]:
    """Features that could be sent as uint8, as `train.feed.uint8` has it.

    Args:
        dataset: Batches of (features, label, ...); its first ones are looked at, what differs later
            is not seen.
    """
    found: dict[str, set[float]] = {}
    for element in as_written(dataset.take(LOOKED_AT)):
        for name, value in dict(parts_of(element)[0]).items():
            possible = found.setdefault(name, set(SCALES))
            possible.intersection_update(scale for scale in SCALES if _is_bytes(value, scale))
    # Of zeros and ones alone both are true.
    return {name: max(scales) for name, scales in found.items() if scales}


def _is_bytes(value: tf.Tensor, scale: float) -> bool:
    wide = value.dtype.name.startswith(NUMBERS) and value.dtype.size > 1
    rows = max(1, int(value.shape[0] or 0))
    if not wide or int(tf.size(value)) * value.dtype.size < LEAST_BYTES * rows:
        return False
    if not value.dtype.is_floating and scale != 1:
        return False
    by = _Scale(scale, value.dtype.name)
    return bool(tf.reduce_all(tf.equal(by.widened(by.rounded(value)), value)))


def _narrowed(value: tf.Tensor, scale: _Scale, *, name: str) -> tf.Tensor:
    found = scale.rounded(value)
    same = tf.reduce_all(tf.equal(scale.widened(found), value))
    said = (
        f"train.feed.uint8: the feature {name!r} times {scale.value:g} must be whole numbers from 0 to 255; "
        "leave it out there"
    )
    with tf.control_dependencies([tf.debugging.Assert(same, [said])]):
        return tf.identity(found)
