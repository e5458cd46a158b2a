"""What once differed from TensorFlow Serving: its answers, to the word, for the same requests."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import tensor_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc
from tests.integration.serve.conftest import started

from stoker.core.errors import DataError
from stoker.registry.exported_model import load_model
from stoker.serve.config import ServeConfig
from stoker.serve.errors import ServeError
from stoker.serve.grpc.predict import read_inputs
from stoker.serve.loading.safety import check_model
from stoker.serve.loading.session import load_checked
from stoker.serve.process.server import Server
from stoker.serve.servables.servable import LoadOptions, Servable

Ask = Callable[..., Any]
PREDICT = "/v1/models/{}:predict"


@pytest.fixture(scope="module")
def predict(server: Server) -> Any:
    """Calls Predict by gRPC: `predict(model, x=...)`."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)

        def call(model: str, *, outputs: tuple[str, ...] = (), **inputs: Any) -> Any:
            return stub.Predict(request_of(model, outputs=outputs, **inputs), timeout=30)

        yield call


def request_of(
    model: str, *, outputs: tuple[str, ...] = (), **inputs: Any
) -> predict_pb2.PredictRequest:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    request.output_filter.extend(outputs)
    for name, value in inputs.items():
        request.inputs[name].CopyFrom(tf.make_tensor_proto(value))
    return request


def refusal(call: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error: Any = caught.value
    return error.code().name, error.details()


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("AAEC\n/w==", b"\0\1\2\xff"),
        ("AAEC/w", b"\0\1\2\xff"),
        ("\tAA EC / w = =\r\n", b"\0\1\2\xff"),
        ("AAEC/w..", b"\0\1\2\xff"),
        ("AAECAw=.", b"\0\1\2\3"),
        ("AAE", b"\0\1"),
        ("AAE=", b"\0\1"),
        ("AAF", b"\0\1"),
        ("", b""),
        (" ", b""),
    ],
)
def test_base64_may_have_white_space_and_no_padding(ask: Ask, text: str, bytes_: bytes) -> None:
    answer = ask(PREDICT.format("words"), {"instances": [{"b64": text}]})

    assert answer.status == 200, answer.body
    (row,) = answer.json()["predictions"]
    back = row["raw_bytes"]
    sent = ask(PREDICT.format("words"), {"instances": [row["raw_bytes"]]}).json()
    assert sent["predictions"][0]["raw_bytes"] == back
    assert back["b64"] == tf.io.encode_base64(bytes_, pad=True).numpy().decode().replace(
        "_", "/"
    ).replace("-", "+")


@pytest.mark.parametrize(
    "text", ["A", "AAEC/w=", "AAEC/w===", "AAEC=", "AAE==", "AA=EC", "AAEC_w", "AAEC/w==x", "ä"]
)
def test_what_is_not_base64_is_refused(ask: Ask, text: str) -> None:
    answer = ask(PREDICT.format("words"), {"instances": [{"b64": text}]})

    assert (answer.status, "Unable to base64 decode" in answer.body) == (400, True)


@pytest.mark.parametrize(
    ("method", "path", "body", "said"),
    [
        ("GET", "/v1/models", None, "Missing model name in request."),
        ("GET", "/v1/models/versions/1", None, "Missing model name in request."),
        ("GET", "/v1/models/labels/x/metadata", None, "Missing model name in request."),
        ("GET", "/v1/models/", None, "Malformed request: GET /v1/models/"),
        ("POST", "/v1/models:predict", {}, "Malformed request: POST /v1/models:predict"),
        (
            "POST",
            "/v1/models/half_plus_two:predict",
            {"instances": 1},
            """JSON Value: {"instances": 1} Expecting 'instances' to be an list/array""",
        ),
        (
            "POST",
            "/v1/models/judge:classify",
            {"examples": 1},
            """JSON Value: {"examples": 1} Expecting 'examples' value to be an list/array""",
        ),
        (
            "POST",
            "/v1/models/judge:classify",
            {"examples": [{"f": 2**63}]},
            "Feature: f has uint64_t element. Only int64_t is supported.",
        ),
    ],
)
def test_wrong_requests_are_errors_in_tensorflow_servings_words(
    ask: Ask, method: str, path: str, body: Any, said: str
) -> None:
    answer = ask(path, body, method=method)

    assert (answer.status, answer.json()) == (400, {"error": said})


@pytest.mark.parametrize(
    ("sent", "found"),
    [
        ([[1.0, 3.0]], [[2.5, 3.5]]),
        ([[[1.0]]], [[[2.5]]]),
        (1.0, 2.5),
        ([1.0, 3.0], [2.5, 3.5]),
        ([[]], [[]]),
    ],
)
def test_a_shape_that_the_graph_takes_is_taken(
    ask: Ask, predict: Any, sent: Any, found: Any
) -> None:
    """The signature declares [-1, 1]."""
    answer = ask(PREDICT.format("half_plus_two"), {"inputs": sent})
    by_grpc = predict("half_plus_two", x=np.array(sent, np.float32))

    assert (answer.status, answer.json()) == (200, {"outputs": found})
    assert tf.make_ndarray(by_grpc.outputs["y"]).tolist() == found


def test_a_shape_that_the_graph_refuses_gets_tensorflows_words(ask: Ask, predict: Any) -> None:
    answer = ask(PREDICT.format("sums"), {"inputs": 1.0})
    by_grpc = refusal(lambda: predict("sums", x=np.float32(1.0)))

    said = "Invalid reduction dimension (1 for input with 0 dimension(s)"
    assert answer.status == 400
    assert answer.json()["error"].startswith(said)
    assert by_grpc[0] == "INVALID_ARGUMENT"
    assert by_grpc[1].startswith(said)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1435774380", 1435774336.0),
        ("16777217", 16777216.0),
        ("18446744073709551616", 2.0**64),
        ("-9223372036854775809", -(2.0**63)),
        ("1e39", float("inf")),
        ("-1" + "0" * 39, float("-inf")),
        ("1e-400", 0.0),
        ("1e-40", float(np.float32(1e-40))),
        ("4503599761588225", 4503599627370496.0),  # through float64: a tie, rounded to even
    ],
)
@pytest.mark.parametrize("padding", [0, 1 << 15])
def test_a_number_is_rounded_to_float32(ask: Ask, text: str, value: float, padding: int) -> None:
    """A large body has its own readers."""
    body = f'{{"inputs": {{"x": [[{text}]], {" " * padding}"other": 0}}}}'.encode()

    answer = ask("/v1/models/half_plus_two:predict", body)

    assert answer.status == 200, answer.body
    with np.errstate(over="ignore"):
        wanted = np.float32(value) * np.float32(0.5) + np.float32(2.0)
    ((found,),) = answer.json()["outputs"]
    assert np.float32(found) == wanted


@pytest.mark.parametrize("text", ["1e309", "-1e309", "1" + "0" * 309, "-" + "9" * 400])
@pytest.mark.parametrize("path", ["half_plus_two:predict", "judge:classify"])
def test_a_number_beyond_float64_is_not_json(ask: Ask, text: str, path: str) -> None:
    key = "instances" if path.endswith("predict") else "examples"

    answer = ask(f"/v1/models/{path}", f'{{"{key}": [{text}]}}'.encode())

    assert answer.status == 400
    assert answer.json()["error"] == "JSON Parse error: Number too big to be stored in double."


def test_an_example_takes_a_number_beyond_64_bits_as_a_float(ask: Ask) -> None:
    answer = ask(
        "/v1/models/judge:regress", {"signature_name": "regress", "examples": [{"x": 2**65}]}
    )

    assert answer.status == 200, answer.body
    (found,) = answer.json()["results"]
    assert np.float32(found) == np.float32(2.0**64)


def test_outputs_that_are_missing_or_requested_twice_are_refused(predict: Any) -> None:
    fare, place = np.ones(1, np.float32), np.ones((1, 2), np.int64)

    def error_of(*outputs: str) -> tuple[str, str]:
        return refusal(lambda: predict("two", outputs=outputs, fare=fare, place=place))

    assert error_of("a") == (
        "INVALID_ARGUMENT",
        (
            "output tensor alias not found in signature: a "
            "Outputs expected to be in the set {double,sum}."
        ),
    )
    assert error_of("sum", "sum") == ("INVALID_ARGUMENT", "duplicate output tensor alias: sum")


def test_inputs_that_are_missing_or_unknown_are_named(predict: Any) -> None:
    fare, place = np.ones(1, np.float32), np.ones((1, 2), np.int64)

    assert refusal(lambda: predict("half_plus_two"))[1] == (
        "input size does not match signature: 0!=1 len({}) != len({x}). "
        "Sent extra: {}. Missing but required: {x}."
    )
    assert refusal(lambda: predict("two", fare=fare, place=place, z=fare))[1] == (
        "input size does not match signature: 3!=2 len({fare,place,z}) != len({fare,place}). "
        "Sent extra: {z}. Missing but required: {}."
    )
    code, said = refusal(lambda: predict("two", fare=fare, z=place))
    assert code == "INVALID_ARGUMENT"
    assert said.startswith("Signature input alias: place(feed name: ")
    assert said.endswith(
        "not found in request and no default value provided. Inputs expected to be in the request "
        "{fare,z}, or default input alias set: "
    )


def test_defaults_of_a_signature_fill_inputs_that_are_not_sent(
    exported: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(exported["two"], tmp_path / "1")
    file = folder / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    default: tensor_pb2.TensorProto = tf.make_tensor_proto(np.array([[3, 4]], np.int64))
    signature_def = saved.meta_graphs[0].signature_def["serving_default"]
    signature_def.defaults["place"].CopyFrom(default)
    file.write_bytes(saved.SerializeToString())
    model = load_model(folder)
    signature = model.signatures["serving_default"]
    fare = np.ones(1, np.float32)

    inputs = read_inputs(request_of("two", fare=fare), signature)
    answer = model.call("serving_default", inputs)
    with pytest.raises(ServeError, match="not found in request and no default value provided"):
        read_inputs(request_of("two", place=[[1, 2]]), signature)
    with pytest.raises(
        ServeError, match=r"Inputs contains invalid name\. Used request inputs: fare"
    ):
        read_inputs(request_of("two", fare=fare, z=fare), signature)
    model.close()

    assert answer["sum"].tolist() == [7]


class Holder(tf.Module):
    """A Keras 3 model in a module: `tf.saved_model.save` writes its variables twice."""

    def __init__(self, read: str = "") -> None:
        super().__init__()
        layers = [keras.Input((2,)), keras.layers.Dense(3), keras.layers.BatchNormalization()]
        self.net = keras.Sequential(layers)
        self.read = read

    @tf.function(input_signature=[tf.TensorSpec((None, 2), tf.float32, name="x")])
    def serve(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"y": self.net(x, training=False)}

    @tf.function(input_signature=[])
    def other(self) -> tf.Tensor:
        return tf.io.read_file(self.read) if self.read else tf.constant("")


def test_a_keras_model_in_a_module_is_served_by_its_object_graph(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    module = Holder()
    tf.saved_model.save(module, str(tmp_path / "1"), signatures={"serving_default": module.serve})
    x = np.array([[1.0, 2.0], [-3.0, 0.5]], np.float32)
    servable = Servable(1, tmp_path / "1")

    assert servable.load(), servable.reason
    with servable.use() as served:
        assert served is not None
        found = served.call("serving_default", {"x": x})["y"]
        with pytest.raises(ServeError, match="Matrix size-incompatible"):
            served.call("serving_default", {"x": x[:, :1]})
    servable.unload()

    np.testing.assert_allclose(found, module.net(x), atol=1e-6)
    assert "is served through its object graph, which is slower" in caplog.text


def test_a_version_with_a_variable_that_nothing_restores_is_not_served(tmp_path: Path) -> None:
    """It would refuse every request, whatever the client sends."""
    module, folder = Holder(), tmp_path / "1"
    tf.saved_model.save(module, str(folder), signatures={"serving_default": module.serve})
    file = folder / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    saved.meta_graphs[0].ClearField("object_graph_def")  # so no other way of loading is left
    file.write_bytes(saved.SerializeToString())
    servable = Servable(1, folder)

    assert not servable.load()
    assert "is not restored" in servable.reason


def test_a_fault_of_the_model_is_not_the_clients(
    exported: dict[str, Path], tmp_path: Path, ask_at: Ask
) -> None:
    folder = shutil.copytree(exported["words"], tmp_path / "words" / "1")
    file = folder / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    del saved.meta_graphs[0].signature_def["__saved_model_init_op"]
    saved.meta_graphs[0].collection_def.clear()  # nothing fills the table
    file.write_bytes(saved.SerializeToString())
    config = ServeConfig(
        models={"words": folder.parent}, rest_port=0, grpc_port=0, poll_s=0.05, lame_duck_s=0.0
    )
    with (
        started(config) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        answer = ask_at(server.rest_port, PREDICT.format("words"), {"instances": ["cash"]})
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        by_grpc = refusal(lambda: stub.Predict(request_of("words", word=["cash"]), timeout=30))

    said = "the model failed; see the server's log"
    assert (answer.status, answer.json()) == (500, {"error": said})
    assert by_grpc == ("INTERNAL", said)


def test_functions_that_only_the_object_graph_holds_are_checked_too(tmp_path: Path) -> None:
    module = Holder("/etc/hostname")
    tf.saved_model.save(module, str(tmp_path / "1"), signatures={"serving_default": module.serve})
    servable = Servable(1, tmp_path / "1")

    assert not servable.load()
    assert "ReadFile in its function" in servable.reason


class Writer(Holder):
    """A module with a second signature, which uses no variable."""

    @tf.function(input_signature=[tf.TensorSpec((None, 2), tf.float32, name="x")])
    def second(self, x: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"y": x * 2.0}


def hide_a_write(saved: saved_model_pb2.SavedModel, written: Path) -> str:
    """Have the first signature of the object graph, and the saver, name a function that writes a file.

    The graph, which the signature definitions describe, stays as it was.

    Returns:
        The function.
    """
    meta_graph = saved.meta_graphs[0]
    objects, graph, saver = meta_graph.object_graph_def, meta_graph.graph_def, meta_graph.saver_def
    (signatures,) = (n for n in objects.nodes if n.user_object.identifier == "signature_map")
    named = {child.local_name: objects.nodes[child.node_id] for child in signatures.children}
    evil = named["second"].bare_concrete_function.concrete_function_name
    for name in ("serving_default", "second"):
        named[name].bare_concrete_function.concrete_function_name = evil
    (function,) = (f for f in graph.library.function if f.signature.name == evil)
    for name, text in (("name", str(written)), ("text", "written")):
        node = function.node_def.add(name=name, op="Const")
        node.attr["dtype"].type = tf.string.as_datatype_enum
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(text))
    function.node_def.add(name="evil", op="WriteFile", input=["name:output:0", "text:output:0"])
    function.control_ret["evil"] = "evil"
    function.signature.control_output.append("evil")
    function.signature.is_stateful = True
    (saving,) = (n for n in graph.node if n.name == saver.save_tensor_name.split(":")[0])
    (own,) = (f for f in graph.library.function if f.signature.name == saving.attr["f"].func.name)
    graph.library.function.remove(own)
    saving.attr["f"].func.name = evil
    del meta_graph.signature_def["second"]
    return evil


def test_a_function_that_the_saver_names_is_checked_where_an_object_names_it_too(
    tmp_path: Path,
) -> None:
    module, folder, written = Writer(), tmp_path / "1", tmp_path / "written"
    signatures = {"serving_default": module.serve, "second": module.second}
    tf.saved_model.save(module, str(folder), signatures=signatures)
    file = folder / "saved_model.pb"
    saved = saved_model_pb2.SavedModel.FromString(file.read_bytes())
    evil = hide_a_write(saved, written)
    file.write_bytes(saved.SerializeToString())
    trusting = Servable(1, folder, LoadOptions(allow_ops=frozenset({"WriteFile"})))
    assert trusting.load(), trusting.reason
    with trusting.use() as served:
        assert served is not None
        served.call("serving_default", {"x": np.ones((1, 2), np.float32)})
    trusting.unload()
    assert written.read_text() == "written", "the model does no harm, so this test shows nothing"
    written.unlink()

    servable = Servable(1, folder)

    assert not servable.load()
    assert "WriteFile in its function" in servable.reason
    assert not written.exists()
    del saved.meta_graphs[0].object_graph_def.concrete_functions[evil]  # its nodes name it still
    file.write_bytes(saved.SerializeToString())
    with pytest.raises(DataError, match="WriteFile in its function"):
        check_model(folder)


def test_what_is_loaded_by_its_object_graph_is_what_was_checked(tmp_path: Path) -> None:
    module, folder = Holder(), tmp_path / "1"
    tf.saved_model.save(module, str(folder), signatures={"serving_default": module.serve})
    checked = check_model(folder)
    (folder / "saved_model.pb").write_bytes(b"not what was checked")

    model = load_checked(folder, checked)
    x = np.array([[1.0, 2.0]], np.float32)
    found = model.call("serving_default", {"x": x})["y"]
    model.close()

    np.testing.assert_allclose(found, module.net(x), atol=1e-6)
