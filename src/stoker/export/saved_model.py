"""Exports a trained model and its transform as one SavedModel that takes raw features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

from stoker.core.config import nearest
from stoker.core.errors import ConfigError
from stoker.core.files import write_atomic
from stoker.data.user_dataset.features import AnyTransform
from stoker.export.signatures import (
    EXAMPLES_INPUT,
    SERVING_DEFAULT,
    SERVING_EXAMPLES,
    SERVING_TRANSFORMED,
    TRANSFORM_FEATURES,
    argument_names,
    arguments_of,
    feature_specs,
    parse_examples,
    takes_examples,
)

Features = Mapping[str, tf.Tensor]
"""Transformed features by name, each [batch, ...]."""


def export_saved_model(
    model: keras.Model,
    adapt: Callable[[Features], Any],
    transform: AnyTransform,
    folder: Path,
) -> None:
    """Write the SavedModel: it takes raw features (for images: encoded bytes) and gives float32 answers.

    Uses Keras's ExportArchive: TensorFlow Serving's session loader does not restore a Keras 3 model
    that was saved in another way.

    Args:
        model: The trained model.
        adapt: Named features -> the model's input (from `input_adapter`).
        transform: The transform; its graph becomes part of the SavedModel and runs before the model.
        folder: The folder to write; must not exist.
    """
    columns = transform.serving_columns

    def answer(features: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        return named_outputs(
            model, model(adapt(transform.apply_features(features)), training=False)
        )

    def answer_examples(examples: tf.Tensor) -> dict[str, tf.Tensor]:
        return answer(parse_examples(examples, columns))

    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.track(transform.module())
    archive.add_endpoint(SERVING_DEFAULT, answer, input_signature=[feature_specs(columns)])
    if takes_examples(columns):
        archive.add_endpoint(
            SERVING_EXAMPLES,
            answer_examples,
            input_signature=[tf.TensorSpec([None], tf.string, name=EXAMPLES_INPUT)],
        )
    names = {SERVING_DEFAULT: argument_names(columns)}
    transformed = _transformed_specs(transform)
    if transformed:

        def answer_transformed(features: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            return named_outputs(model, model(adapt(features), training=False))

        archive.add_endpoint(
            TRANSFORM_FEATURES, transform.apply_features, input_signature=[feature_specs(columns)]
        )
        archive.add_endpoint(SERVING_TRANSFORMED, answer_transformed, input_signature=[transformed])
        names[TRANSFORM_FEATURES] = names[SERVING_DEFAULT]
        names[SERVING_TRANSFORMED] = arguments_of(list(transformed))
    archive.write_out(str(folder), verbose=False)
    _rename_inputs(folder, names)


def input_adapter(model: keras.Model, features: Mapping[str, str]) -> Callable[[Features], Any]:
    """Return a function that turns named features into the model's input structure.

    Args:
        model: A functional, sequential or subclassed model.
        features: Feature name -> the name of the `keras.Input` made for it.

    Returns:
        A function of named features. A functional model gets exactly its own inputs, in its own
        structure; any other model gets the whole mapping.

    Raises:
        ConfigError: the model has an input that is not a feature.
    """
    structure = _input_structure(model)
    if structure is None:
        return dict
    feature_of = {input_name: name for name, input_name in features.items()}
    for tensor in keras.tree.flatten(structure):
        if tensor.name not in feature_of:
            raise ConfigError(
                "every input of the model must be one of the features that build received",
                got=tensor.name,
                fix=nearest(tensor.name, feature_of),
            )

    def adapt(values: Features) -> Any:
        return keras.tree.map_structure(lambda tensor: values[feature_of[tensor.name]], structure)

    return adapt


def _input_structure(model: keras.Model) -> Any:
    if isinstance(model, keras.Sequential):
        # Before its first call, a Sequential model has `inputs` but no `input`.
        return model.inputs[0] if model.inputs else None
    return model.input if hasattr(model, "operations") else None


def named_outputs(model: keras.Model, outputs: Any) -> dict[str, tf.Tensor]:
    """Return the answers of a model by the names of its outputs; floats as float32."""
    flat = keras.tree.flatten(outputs)
    if isinstance(outputs, Mapping):
        # Keras flattens a dict in an order of its own, not in the order of the dict.
        names = keras.tree.flatten({name: name for name in outputs})
    else:
        names = list(getattr(model, "output_names", None) or [])
    if len(names) != len(flat):
        names = [f"output_{index}" for index in range(len(flat))]
    # Mixed precision must not change the type that clients see.
    floats = [tf.cast(t, tf.float32) if t.dtype.is_floating else t for t in flat]
    return dict(zip(names, floats, strict=True))


def _transformed_specs(transform: AnyTransform) -> dict[str, tf.TensorSpec]:
    """Feature -> its spec as an input of the model; empty if the transform does not change the raw columns."""
    traced = tf.function(transform.apply_features, autograph=False).get_concrete_function(
        feature_specs(transform.serving_columns)
    )
    if {operation.type for operation in traced.graph.get_operations()} <= _NO_WORK:
        return {}
    features = traced.structured_outputs
    arguments = arguments_of(list(features))
    return {
        name: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype, name=arguments[name])
        for name, tensor in features.items()
    }


_NO_WORK = {"Placeholder", "Identity", "NoOp"}
"""The only types of operations in the graph of a transform that does not change its columns."""


def _rename_inputs(folder: Path, signatures: Mapping[str, Mapping[str, str]]) -> None:
    """Rename the inputs of the signatures to the names of the columns ("mean radius").

    A traced function's arguments must be identifiers; the names in a SignatureDef, which clients
    of TensorFlow Serving use, need not be.
    """
    path = folder / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(path.read_bytes())
    for graph in saved.meta_graphs:
        for signature, names in signatures.items():
            inputs = graph.signature_def[signature].inputs
            by_argument = dict(inputs.items())
            copies = {raw: by_argument[name].SerializeToString() for raw, name in names.items()}
            inputs.clear()
            for raw, tensor in copies.items():
                inputs[raw].ParseFromString(tensor)
    write_atomic(path, saved.SerializeToString(deterministic=True))
