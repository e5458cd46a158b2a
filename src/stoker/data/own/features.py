"""A user's dataset gives features already: what stands where later stages have a transform."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from stoker.data.features.spec import FeatureSpec, TransformOutput, TransformSpec
from stoker.data.features.transform import Transform
from stoker.data.own.description import Description, TensorColumn


class OwnFeatures:
    """Features and label as they are given; see `stoker.data.features.transform.Transform`."""

    classes: tuple[str, ...] | None = None
    """A user's label is numbers: no strings stand for them."""

    def __init__(self, description: Description) -> None:
        """Stand for the identity of what an element holds."""
        self._description = description
        self.features = tuple(_spec(column) for column in description.features)
        self.label: FeatureSpec | None = _spec(description.label)
        self.output = TransformOutput(
            TransformSpec(
                features=self.features,
                label=self.label,
                classes=None,
                serving_columns=(),
                label_columns=(),
                vocabularies={},
                ids={},
                analyzers=(),
            )
        )

    @property
    def serving_columns(self) -> tuple[TensorColumn, ...]:
        """The features."""
        return self._description.features

    @property
    def label_columns(self) -> tuple[TensorColumn, ...]:
        """The label."""
        return (self._description.label,)

    @property
    def columns(self) -> tuple[TensorColumn, ...]:
        """All of them."""
        return self._description.columns

    def module(self) -> tf.Module:
        """What an export tracks: nothing."""
        return tf.Module()

    def apply_features(self, inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """The features among the given tensors, as they are."""
        return {column.name: inputs[column.name] for column in self.serving_columns}

    def apply_label(self, inputs: Mapping[str, tf.Tensor]) -> tf.Tensor:
        """The label among the given tensors, as it is."""
        return inputs[self._description.label.name]


AnyTransform = Transform | OwnFeatures
"""What later stages have between raw rows and the model."""


def _spec(column: TensorColumn) -> FeatureSpec:
    return FeatureSpec(name=column.name, dtype=column.dtype, shape=column.shape)
