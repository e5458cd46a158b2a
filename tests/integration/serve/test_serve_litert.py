"""A version's `model.tflite` by LiteRT, where it is preferred, as TensorFlow Serving serves it."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import flatbuffers
import grpc
import numpy as np
import pytest
import tensorflow as tf
from flatbuffers import flexbuffers
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow.lite.python import schema_py_generated as schema
from tensorflow_serving.apis import predict_pb2, prediction_service_pb2_grpc
from tests.integration.serve.conftest import started

from stoker.core.errors import DataError
from stoker.serve.config import ServeConfig
from stoker.serve.errors import ServeError
from stoker.serve.process.server import Server
from stoker.serve.servables.litert import load_litert
from stoker.serve.servables.servable import LoadOptions, Servable

Ask = Callable[..., Any]
FILE = "model.tflite"
WEIGHTS = [[1.0], [2.0]]


def converted(call: Callable[..., Any], *inputs: tf.TensorSpec) -> bytes:
    function = tf.function(call, input_signature=inputs).get_concrete_function()
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function], tf.Module())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content: bytes = converter.convert()
    return content


@pytest.fixture(scope="module")
def weighed() -> bytes:
    """y = x @ [[1], [2]], for any number of rows."""
    return converted(
        lambda x: {"y": tf.matmul(x, WEIGHTS)}, tf.TensorSpec([None, 2], tf.float32, name="x")
    )


def changed(content: bytes, change: Callable[[schema.ModelT], None]) -> bytes:
    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))
    change(model)
    builder = flatbuffers.Builder(len(content))
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


class Raw(bytes):
    """Text that is none: the builder asks it for its bytes."""

    def encode(self, _: str) -> bytes:
        return self


def with_signature(content: bytes, **tensors: str) -> bytes:
    """With TensorFlow's own signature in its metadata; its names lead to tensors."""
    definition = meta_graph_pb2.SignatureDef(method_name="tensorflow/serving/predict")
    for name, tensor in tensors.items():
        infos = definition.outputs if name == "total" else definition.inputs
        infos[name].name = tensor
        infos[name].dtype = tf.float32.as_datatype_enum
        infos[name].tensor_shape.CopyFrom(tf.TensorShape([None, None]).as_proto())
    written = flexbuffers.Builder()
    with written.Map():
        written.Key("serving_default")
        written.String(Raw(definition.SerializeToString()))
    text = bytes(written.Finish())

    def change(model: schema.ModelT) -> None:
        buffer, metadata = schema.BufferT(), schema.MetadataT()
        buffer.data = np.frombuffer(text, np.uint8)
        metadata.name, metadata.buffer = b"signature_defs_metadata", len(model.buffers)
        model.buffers.append(buffer)
        model.metadata = [*(model.metadata or []), metadata]

    return changed(content, change)


def in_folder(folder: Path, content: bytes) -> Path:
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(content)
    return folder


@pytest.fixture(scope="module")
def served(
    weighed: bytes, exported: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """A model that is only a `model.tflite`, one that is both, and one that is only a SavedModel."""
    root = tmp_path_factory.mktemp("litert")
    in_folder(root / "only" / "7", weighed)
    for name in ("both", "half"):
        shutil.copytree(exported["half_plus_two"], root / name / "1")
    (root / "both" / "1" / FILE).write_bytes(weighed)
    config = ServeConfig(
        models={name: root / name for name in ("only", "both", "half")},
        litert_interpreters=2,
        rest_port=0,
        grpc_port=0,
        poll_s=0.05,
        lame_duck_s=0.0,
        drain_s=5,
    )
    with started(config) as server:
        yield server


def test_a_version_with_a_model_of_litert_is_served_by_it_and_another_as_before(
    served: Server, ask_at: Ask
) -> None:
    rows = {"instances": [[1.0, 1.0], [2.0, 3.0]]}

    for name in ("only", "both"):
        answer = ask_at(served.rest_port, f"/v1/models/{name}:predict", rows)
        assert answer.json() == {"predictions": [[3.0], [8.0]]}
    half = ask_at(served.rest_port, "/v1/models/half:predict", {"instances": [[1.0]]})
    status = ask_at(served.rest_port, "/v1/models/only").json()

    assert half.json() == {"predictions": [[2.5]]}
    assert status["model_version_status"][0]["version"] == "7"


def test_without_a_signature_of_its_own_the_tensors_names_are_the_inputs(
    served: Server, ask_at: Ask
) -> None:
    """As in TensorFlow Serving: what the converter wrote of names is not read."""
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "only"
    request.inputs["serving_default_x"].CopyFrom(tf.make_tensor_proto([[1.0, 1.0]]))
    with grpc.insecure_channel(f"127.0.0.1:{served.grpc_port}") as channel:
        stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        answer = stub.Predict(request, timeout=20)
    described = ask_at(served.rest_port, "/v1/models/only/metadata").json()

    ((name, output),) = answer.outputs.items()
    assert list(output.float_val) == [3.0]
    definition = described["metadata"]["signature_def"]["signature_def"]["serving_default"]
    (shape,) = (info["tensor_shape"]["dim"] for info in definition["inputs"].values())
    assert [size["size"] for size in shape] == ["1", "2"]
    assert definition["outputs"].keys() == {name}


def test_where_it_is_not_preferred_the_saved_model_is_served(
    weighed: bytes, exported: dict[str, Path], tmp_path: Path
) -> None:
    shutil.copytree(exported["half_plus_two"], tmp_path / "1")
    (tmp_path / "1" / FILE).write_bytes(weighed)
    servable = Servable(1, tmp_path / "1", LoadOptions())

    assert servable.load(), servable.reason
    with servable.use() as model:
        assert model is not None
        assert list(model.signatures["serving_default"].inputs) == ["x"]
    servable.unload()


def test_a_signature_of_tensorflow_in_the_file_names_inputs_and_outputs(
    weighed: bytes, tmp_path: Path
) -> None:
    content = with_signature(weighed, x="serving_default_x:0", total="PartitionedCall:0")
    model, _ = load_litert(in_folder(tmp_path / "1", content), interpreters=1)

    rows = np.array([[1.0, 1.0], [2.0, 3.0], [0.0, 0.5]], np.float32)
    answer = model.call("serving_default", {"x": rows})

    assert answer["total"][:, 0].tolist() == [3.0, 8.0, 1.0]
    gone = with_signature(weighed, x="gone:0", total="PartitionedCall:0")
    with pytest.raises(DataError, match="unknown tensor 'gone:0'"):
        load_litert(in_folder(tmp_path / "2", gone), interpreters=1)


def test_wrong_inputs_are_errors_and_the_next_call_is_answered(served: Server, ask_at: Ask) -> None:
    path = "/v1/models/only:predict"

    wrong: tuple[object, ...] = (
        [[1.0, 2.0, 3.0]],
        [[[1.0, 2.0]]],
        [[[1.0], [2.0]]] * 2,
        [],
        [[]],
        [[], []],
        1.0,
        [1.0, 2.0],
    )
    for inputs in wrong:
        refused = ask_at(served.rest_port, path, {"inputs": inputs})
        assert (refused.status, "must have the shape [?, 2]" in refused.json()["error"]) == (
            400,
            True,
        ), inputs
    after = ask_at(served.rest_port, path, {"instances": [[1.0, 1.0]]})
    assert after.json() == {"predictions": [[3.0]]}


def test_only_rows_and_what_the_file_leaves_open_are_the_clients(
    weighed: bytes, tmp_path: Path
) -> None:
    """And [3] is taken for [3, 1], as TensorFlow Serving's own test has it."""
    doubled = converted(lambda x: {"y": x * 2.0}, tf.TensorSpec([1, 1], tf.float32, name="x"))
    wide = converted(lambda x: {"y": x + 1.0}, tf.TensorSpec([None, None], tf.float32, name="x"))
    calls = {}
    for name, content in {"two": weighed, "one": doubled, "wide": wide}.items():
        model, _ = load_litert(in_folder(tmp_path / name, content), interpreters=1)
        calls[name] = model

    def answer(name: str, *shape: int) -> tuple[int, ...]:
        (found,) = calls[name].run("serving_default", [np.zeros(shape, np.float32)]).values()
        return tuple(found.shape)

    assert [answer("two", 3, 2), answer("one", 3), answer("one"), answer("wide", 2, 5)] == [
        (3, 1),
        (3, 1),
        (1, 1),
        (2, 5),
    ]
    for name, shape in [
        *(("two", shape) for shape in [(0, 4), (1, 0), (0, 2), (1, 4), (2,), (1, 1, 2)]),
        *(("one", shape) for shape in [(0,), (1, 2), (0, 1)]),
        *(("wide", shape) for shape in [(0, 4), (1, 0), (3,), (1, 1, 1)]),
    ]:
        with pytest.raises(ServeError, match=r"must have the shape .*, got \["):
            answer(name, *shape)


def test_memory_of_an_unusually_large_call_is_given_back(
    weighed: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = load_litert(in_folder(tmp_path / "1", weighed), interpreters=1)
    made: list[object] = []
    whole = tf.lite.Interpreter

    def counted(**given: Any) -> Any:
        made.append(whole(**given))
        return made[-1]

    monkeypatch.setattr(tf.lite, "Interpreter", counted)

    def made_in(*sizes: int) -> int:
        made.clear()
        for rows in sizes:
            model.run("serving_default", [np.zeros((rows, 2), np.float32)])
        return len(made)

    assert made_in(1, 200, 7, 256) == 0
    assert made_in(100_000, 1) == 1
    assert made_in(*[100_000] * 20) < 10, "what is usual is kept"
    assert made_in(*[1] * 40) == 1, "and given back when it is so no more"


def renamed(content: bytes, tensors: str, *names: bytes) -> bytes:
    """With other names of its inputs or outputs."""

    def change(model: schema.ModelT) -> None:
        graph = model.subgraphs[0]
        for index, name in zip(getattr(graph, tensors), names, strict=True):
            graph.tensors[index].name = name

    return changed(content, change)


def test_tensors_whose_names_differ_only_in_the_number_stay_apart(tmp_path: Path) -> None:
    spec = tf.TensorSpec([1], tf.float32)
    content = converted(lambda a, b: {"s": a + b, "d": a - b}, spec, spec)
    content = renamed(renamed(content, "inputs", b"x:0", b"x:1"), "outputs", b"P:0", b"P:1")
    model, _ = load_litert(in_folder(tmp_path / "1", content), interpreters=1)

    found = model.call(
        "serving_default", {"x:0": np.array([5], np.float32), "x:1": np.array([3], np.float32)}
    )

    assert sorted(found) == ["P:0", "P:1"]
    assert sorted(abs(float(value[0])) for value in found.values()) == [2.0, 8.0]
    mixed = renamed(content, "inputs", b"x:0", b"y:1")
    model, _ = load_litert(in_folder(tmp_path / "2", mixed), interpreters=1)
    assert sorted(model.signature_defs["serving_default"].inputs) == ["x", "y"]
    for number, tensors in enumerate(({"a": "x:0"}, {"a": "x:0", "b": "x:0"})):
        lacking = with_signature(content, **tensors, total="P:0")
        with pytest.raises(DataError, match="must name each of 2 input tensors once"):
            load_litert(in_folder(tmp_path / f"lacking{number}", lacking), interpreters=1)


def test_many_at_once_of_many_sizes_get_each_their_own_answer(
    weighed: bytes, tmp_path: Path
) -> None:
    model, _ = load_litert(in_folder(tmp_path / "1", weighed), interpreters=2)

    def ask(number: int) -> bool:
        rows = np.random.default_rng(number).normal(size=(1 + number % 7, 2)).astype(np.float32)
        (found,) = model.run("serving_default", [rows]).values()
        return np.allclose(found, rows @ np.array(WEIGHTS, np.float32), atol=1e-6)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(ask, range(200)))


def test_texts_go_in_and_out_with_every_byte(tmp_path: Path) -> None:
    content = converted(
        lambda word: {"o": tf.gather(word, [1, 0])}, tf.TensorSpec([None], tf.string, name="word")
    )
    model, endless = load_litert(in_folder(tmp_path / "1", content), interpreters=1)

    words = np.array([b"a\0b\0", b"\xff"], dtype=object)
    (found,) = model.run("serving_default", [words]).values()

    assert found.tolist() == [b"\xff", b"a\0b\0"]
    assert not endless


def test_a_file_that_is_damaged_or_has_other_operations_is_refused(
    weighed: bytes, tmp_path: Path
) -> None:
    def custom(model: schema.ModelT) -> None:
        model.operatorCodes[0].customCode = b"FlexReadFile"
        model.operatorCodes[0].builtinCode = schema.BuiltinOperator.CUSTOM

    def loops(**codes: int) -> bytes:
        def change(model: schema.ModelT) -> None:
            code = schema.OperatorCodeT()
            for field, value in codes.items():
                setattr(code, field, value)
            model.operatorCodes.append(code)

        return changed(weighed, change)

    for number, (content, said) in enumerate(
        [
            (weighed[:-200], "one complete LiteRT model"),
            (b"no model", "one complete LiteRT model"),
            (b"", "one complete LiteRT model"),
            (changed(weighed, custom), "only LiteRT's built-in operations.*FlexReadFile"),
        ]
    ):
        with pytest.raises(DataError, match=said):
            load_litert(in_folder(tmp_path / str(number), content), interpreters=1)
    for number, content in enumerate(
        [
            loops(builtinCode=119, deprecatedBuiltinCode=119),
            loops(deprecatedBuiltinCode=119),  # as older converters wrote it
        ]
    ):
        _, endless = load_litert(in_folder(tmp_path / f"loop{number}", content), interpreters=1)
        assert endless, "a loop is run where something watches over it"
    outside = tmp_path / "outside"
    outside.write_bytes(weighed)
    (tmp_path / "10").mkdir()
    (tmp_path / "10" / FILE).symlink_to(outside)
    with pytest.raises(DataError, match="points outside"):
        load_litert(tmp_path / "10", interpreters=1)
