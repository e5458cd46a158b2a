"""The client's messages are TensorFlow Serving's own, field by field."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from tensorflow.core.framework import tensor_pb2, tensor_shape_pb2, types_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis import (
    get_model_metadata_pb2,
    get_model_status_pb2,
    model_management_pb2,
    model_pb2,
    predict_pb2,
    status_pb2,
)
from tensorflow_serving.config import model_server_config_pb2

from stoker.client.messages import METADATA, MODEL_STATUS, PREDICT, RELOAD_CONFIG, message
from stoker.client.tensors import fill_tensor, to_array
from stoker.core.errors import DataError, UserError

TRUE: dict[str, Any] = {
    "Dim": tensor_shape_pb2.TensorShapeProto.Dim,
    "TensorShapeProto": tensor_shape_pb2.TensorShapeProto,
    "TensorProto": tensor_pb2.TensorProto,
    "ModelSpec": model_pb2.ModelSpec,
    "PredictRequest": predict_pb2.PredictRequest,
    "PredictResponse": predict_pb2.PredictResponse,
    "GetModelMetadataRequest": get_model_metadata_pb2.GetModelMetadataRequest,
    "GetModelMetadataResponse": get_model_metadata_pb2.GetModelMetadataResponse,
    "SignatureDefMap": get_model_metadata_pb2.SignatureDefMap,
    "TensorInfo": meta_graph_pb2.TensorInfo,
    "SignatureDef": meta_graph_pb2.SignatureDef,
    "GetModelStatusRequest": get_model_status_pb2.GetModelStatusRequest,
    "GetModelStatusResponse": get_model_status_pb2.GetModelStatusResponse,
    "ModelVersionStatus": get_model_status_pb2.ModelVersionStatus,
    "ReloadConfigResponse": model_management_pb2.ReloadConfigResponse,
    "StatusProto": status_pb2.StatusProto,
}


@pytest.mark.parametrize("name", sorted(TRUE))
def test_every_field_has_the_number_and_wire_type_of_the_true_one(name: str) -> None:
    ours, true = message(name).DESCRIPTOR, TRUE[name].DESCRIPTOR

    for field in ours.fields:
        other = true.fields_by_name[field.name]
        enumerated = other.type == other.TYPE_ENUM
        assert field.number == other.number
        assert field.is_repeated == other.is_repeated
        assert field.type == (field.TYPE_INT32 if enumerated else other.type), field.name


def test_the_methods_are_those_of_the_true_service() -> None:
    from tensorflow_serving.apis import model_service_pb2, prediction_service_pb2

    services = (
        prediction_service_pb2.DESCRIPTOR.services_by_name["PredictionService"],
        model_service_pb2.DESCRIPTOR.services_by_name["ModelService"],
    )
    paths = {f"/{each.full_name}/{method.name}" for each in services for method in each.methods}

    assert {PREDICT, METADATA, MODEL_STATUS, RELOAD_CONFIG} <= paths


def test_a_configuration_is_carried_as_its_bytes() -> None:
    ours = message("ReloadConfigRequest")
    config = model_server_config_pb2.ModelServerConfig()
    config.model_config_list.config.add(name="taxi", version_labels={"stable": 3})
    ours.config = config.SerializeToString()

    true = model_management_pb2.ReloadConfigRequest.FromString(ours.SerializeToString())
    assert true.config == config


@given(
    st.sampled_from(
        ["float16", "float32", "float64", "int8", "uint16", "int64", "uint64", "bool"]
    ).flatmap(lambda name: arrays.arrays(name, arrays.array_shapes(min_dims=0, min_side=0)))
)
def test_tensorflow_reads_our_tensors_and_we_read_its(array: Any) -> None:
    ours = message("TensorProto")
    fill_tensor(ours, array)
    theirs = tensor_pb2.TensorProto.FromString(ours.SerializeToString())
    np.testing.assert_array_equal(tf.make_ndarray(theirs), array)

    back = message("TensorProto")
    back.MergeFromString(tf.make_tensor_proto(array).SerializeToString())
    np.testing.assert_array_equal(to_array(back), array)


def test_one_value_that_stands_for_all_is_repeated() -> None:
    short = message("TensorProto")
    short.MergeFromString(
        tensor_pb2.TensorProto(
            dtype=types_pb2.DT_FLOAT,
            float_val=[1.0, 2.0],
            tensor_shape=tf.TensorShape([2, 2]).as_proto(),
        ).SerializeToString()
    )

    assert to_array(short).tolist() == [[1.0, 2.0], [2.0, 2.0]]


def test_a_value_that_is_not_a_dense_tensor_is_refused() -> None:
    odd = message("TensorProto")
    odd.dtype = 21  # a variant
    with pytest.raises(DataError, match="dense tensor"):
        to_array(odd)
    odd.dtype = 1
    odd.tensor_shape.dim.add(size=3)
    with pytest.raises(DataError, match="3 values"):
        to_array(odd)
    with pytest.raises(UserError, match="datetime64"):
        fill_tensor(message("TensorProto"), np.array(["2026-01-01"], "datetime64[s]"))
    with pytest.raises(UserError, match="only strings"):
        fill_tensor(message("TensorProto"), np.array([b"a", 1], dtype=object))
