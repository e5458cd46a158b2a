"""The transform for a user's dataset, which already holds features and labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from stoker.core.multi_output import alone
from stoker.data.features.preprocessing.transform import Transform
from stoker.data.features.spec import FeatureSpec, LabelSpec, TransformOutput, TransformSpec
from stoker.data.user_dataset.description import Description, TensorColumn


class OwnFeatures:
    """Returns features and labels unchanged; has the interface of `...preprocessing.transform.Transform`."""

    def __init__(self, description: Description) -> None:
        """Use this description of the dataset's elements."""
        self._description = description
        self.features = tuple(_spec(column) for column in description.features)
        # A user's labels are numbers, without class names.
        self.labels = {output: _label(column) for output, column in description.labels.items()}
        self.output = TransformOutput(
            TransformSpec(
                features=self.features,
                labels=self.labels,
                serving_columns=(),
                label_columns=(),
                weight=None,
                weight_columns=(),
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
        """The labels."""
        return tuple(self._description.labels.values())

    @property
    def columns(self) -> tuple[TensorColumn, ...]:
        """The features and the labels."""
        return self._description.columns

    def module(self) -> tf.Module:
        """Return an empty module for an export to track."""
        return tf.Module()

    def apply_features(self, inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Return the features unchanged."""
        return {column.name: inputs[column.name] for column in self.serving_columns}

    def apply_label(self, inputs: Mapping[str, tf.Tensor]) -> Any:
        """Return the labels unchanged; see `Transform.apply_label`."""
        labels = self._description.labels
        return alone({output: inputs[column.name] for output, column in labels.items()})


AnyTransform = Transform | OwnFeatures
"""The transform that later stages use: for shards (`Transform`), or for a user's dataset (`OwnFeatures`)."""


def _spec(column: TensorColumn) -> FeatureSpec:
    return FeatureSpec(name=column.name, dtype=column.dtype, shape=column.shape)


def _label(column: TensorColumn) -> LabelSpec:
    return LabelSpec(name=column.name, dtype=column.dtype, shape=column.shape, classes=None)
