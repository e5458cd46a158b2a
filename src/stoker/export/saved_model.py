"""A trained model and its transform -> one SavedModel that takes raw features."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2

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


def export_saved_model(
    model: keras.Model,
    adapt: Callable[[Mapping[str, tf.Tensor]], Any],
    transform: AnyTransform,
    folder: Path,
) -> None:
    """Write the SavedModel: raw features in (for images: encoded bytes), float32 answers out.

    Keras's ExportArchive is used, because a SavedModel that holds a Keras 3 model and was saved in
    another way is not restored by TensorFlow Serving's session loader.

    Args:
        model: The trained model.
        adapt: Named features -> what the model is called with.
        transform: Its graph is called first, inside the same SavedModel.
        folder: Where to; must not exist.
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


def named_outputs(model: keras.Model, outputs: Any) -> dict[str, tf.Tensor]:
    """What a model answers, by the names of its outputs; floats as float32."""
    flat = keras.tree.flatten(outputs)
    if isinstance(outputs, Mapping):
        # In the order in which Keras takes a dict apart, which is not that of the dict.
        names = keras.tree.flatten({name: name for name in outputs})
    else:
        names = list(getattr(model, "output_names", None) or [])
    if len(names) != len(flat):
        names = [f"output_{index}" for index in range(len(flat))]
    # Mixed precision must not change the type that clients see.
    floats = [tf.cast(t, tf.float32) if t.dtype.is_floating else t for t in flat]
    return dict(zip(names, floats, strict=True))


def _transformed_specs(transform: AnyTransform) -> dict[str, tf.TensorSpec]:
    """Feature -> what the model takes of it; nothing where the model takes the raw columns."""
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
"""Operations of a transform that hands columns on as they are."""


def _rename_inputs(folder: Path, signatures: Mapping[str, Mapping[str, str]]) -> None:
    """Give the signatures' inputs the columns' own names ("mean radius").

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
