"""Classification and regression, by REST and by TensorFlow Serving's own stubs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import text_format
from tensorflow.core.example import example_pb2
from tensorflow.core.protobuf import meta_graph_pb2
from tensorflow_serving.apis import (
    classification_pb2,
    inference_pb2,
    prediction_service_pb2_grpc,
    regression_pb2,
)

from stoker.serve.errors import ServeError
from stoker.serve.process.server import Server
from stoker.serve.servables.examples import CLASSIFY, REGRESS, Task, check_signature

Ask = Callable[..., Any]
JUDGE = "/v1/models/judge"


@pytest.fixture(scope="module")
def stub(server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield prediction_service_pb2_grpc.PredictionServiceStub(channel)


def example(**features: float) -> example_pb2.Example:
    found = example_pb2.Example()
    for name, value in features.items():
        found.features.feature[name].float_list.value.append(value)
    return found


def filled(request: Any, *examples: example_pb2.Example, signature: str = "") -> Any:
    request.model_spec.name = "judge"
    request.model_spec.signature_name = signature
    request.input.example_list.examples.extend(examples)
    return request


def test_classify_gives_label_and_score_of_each_class(ask: Ask) -> None:
    answer = ask(f"{JUDGE}:classify", {"examples": [{"x": 0.0}, {"x": [100.0]}]})

    assert answer.status == 200
    assert answer.json() == {
        "results": [[["low", 0.5], ["high", 0.5]], [["low", 0.0], ["high", 1.0]]]
    }


def test_regress_gives_a_value_a_row_and_the_context_is_every_rows(ask: Ask) -> None:
    body = {"signature_name": "regress", "context": {"x": 6.0}, "examples": [{}, {"x": 2.0}]}

    answer = ask(f"{JUDGE}/versions/1:REGRESS", body)

    assert (answer.status, answer.body) == (200, '{"results": [5.0, 3.0]}')


@pytest.mark.parametrize(
    ("method", "body", "words"),
    [
        (
            "classify",
            b"{}",
            "JSON Value: {} When method is classify, key 'examples' is expected and was not found",
        ),
        ("regress", b'{"examples": []}', "'examples' value is an empty array"),
        ("regress", b'{"examples": 1}', "Expecting 'examples' value to be an list/array"),
        ("regress", b'{"examples": [1]}', "Example must be JSON object but got JSON Number"),
        (
            "classify",
            b'{"examples": [{"x": null}]}',
            "Feature: x has element with unexpected JSON type: Null",
        ),
        (
            "classify",
            b'{"examples": [{"x": [[1.0]]}]}',
            "Feature: x has element with unexpected JSON type: Array",
        ),
        (
            "classify",
            b'{"examples": [{"x": [1.0, "a"]}]}',
            "Unexpected element type in feature: x expecting type: float",
        ),
        (
            "classify",
            b'{"examples": [{"x": 9223372036854775808}]}',
            "Feature: x has uint64_t element. Only int64_t is supported.",
        ),
        (
            "classify",
            b'{"signature_name": "nope", "examples": [{}]}',
            "No signature was found with the name: nope",
        ),
        (
            "regress",
            b'{"signature_name": "wide", "examples": [{}]}',
            (
                "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] "
                "but got [1,2]"
            ),
        ),
        ("regress", b'{"examples": [{}]}', "Expected one output Tensor."),
        ("classify", b'{"examples": [{"x": {"b64": "?"}}]}', "Unable to base64 decode"),
        ("classify", b'{"examples": [{"\\ud800": 1.0}]}', "surrogate"),
        ("classify", b'{"examples": [{"x": "\\ud800"}]}', "surrogate"),
        ("classify", b'{"examples": [{"x": 2}]}', "x"),
        ("classify", b'{"examples": ' + b"[" * 100_000, "JSON Parse error"),
    ],
)
def test_a_refusal_is_a_400_in_tensorflow_servings_words(
    ask: Ask, method: str, body: bytes, words: str
) -> None:
    answer = ask(f"{JUDGE}:{method}", body)

    assert answer.status == 400
    assert words in answer.json()["error"]


def test_a_signature_of_several_inputs_is_refused(ask: Ask) -> None:
    answer = ask("/v1/models/two:classify", {"examples": [{}]})

    assert (answer.status, answer.json()["error"]) == (400, "Expected one input Tensor.")


def test_grpc_classifies_and_regresses_and_names_the_version(stub: Any) -> None:
    rows = [example(x=0.0), example(x=2.0)]

    classified = stub.Classify(filled(classification_pb2.ClassificationRequest(), *rows))
    regressed = stub.Regress(filled(regression_pb2.RegressionRequest(), *rows, signature="regress"))

    first = classified.result.classifications[0]
    assert [(found.label, found.score) for found in first.classes] == [("low", 0.5), ("high", 0.5)]
    assert [found.value for found in regressed.result.regressions] == [2.0, 3.0]
    assert classified.model_spec.signature_name == "serving_default"
    assert regressed.model_spec.version.value == 1


def test_the_context_of_grpc_is_every_rows(stub: Any) -> None:
    request = regression_pb2.RegressionRequest()
    request.model_spec.name, request.model_spec.signature_name = "judge", "regress"
    request.input.example_list_with_context.context.CopyFrom(example(x=6.0))
    request.input.example_list_with_context.examples.extend([example_pb2.Example(), example(x=2.0)])

    answer = stub.Regress(request)

    assert [found.value for found in answer.result.regressions] == [5.0, 3.0]


def several(*tasks: tuple[str, str, str]) -> inference_pb2.MultiInferenceRequest:
    request = inference_pb2.MultiInferenceRequest()
    for model, signature, method in tasks:
        task = request.tasks.add(method_name=method)
        task.model_spec.name, task.model_spec.signature_name = model, signature
    request.input.example_list.examples.add().CopyFrom(example(x=2.0))
    return request


def test_multi_inference_runs_every_task_on_the_same_examples(stub: Any) -> None:
    answer = stub.MultiInference(
        several(("judge", "regress", REGRESS), ("judge", "serving_default", CLASSIFY))
    )

    assert [found.value for found in answer.results[0].regression_result.regressions] == [3.0]
    assert len(answer.results[1].classification_result.classifications[0].classes) == 2
    assert answer.results[0].model_spec.signature_name == "regress"


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (several(), "INVALID_ARGUMENT", "ModelSpec has no name specified."),
        (several(("", "", CLASSIFY)), "INVALID_ARGUMENT", "empty model name"),
        (
            several(("judge", "", CLASSIFY), ("two", "", CLASSIFY)),
            "INVALID_ARGUMENT",
            "must access the same model name",
        ),
        (
            several(("judge", "", CLASSIFY), ("judge", "serving_default", CLASSIFY)),
            "INVALID_ARGUMENT",
            "Duplicate evaluation of signature: serving_default",
        ),
        (
            several(("judge", "", "tensorflow/serving/predict")),
            "UNIMPLEMENTED",
            "Unsupported signature method_name: tensorflow/serving/predict",
        ),
        (
            several(("judge", "regress", REGRESS), ("judge", "x", REGRESS)),
            "INVALID_ARGUMENT",
            "Requested signature not found in model graph: x",
        ),
    ],
)
def test_multi_inference_refuses_in_tensorflow_servings_words(
    stub: Any, request_: Any, code: str, words: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        stub.MultiInference(request_)

    assert caught.value.code().name == code
    assert words in caught.value.details()


def test_grpc_without_examples_or_model_is_refused(stub: Any) -> None:
    for request, words in (
        (filled(classification_pb2.ClassificationRequest()), "Input is empty."),
        (classification_pb2.ClassificationRequest(), "Missing ModelSpec"),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            stub.Classify(request)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == words


def test_a_small_body_cannot_fill_the_memory_by_its_context(ask: Ask) -> None:
    body = {"context": {"x": "a" * 1_000_000}, "examples": [{}] * 1000}

    answer = ask(f"{JUDGE}:classify", body)

    assert answer.status == 400
    assert "context" in answer.json()["error"]


def test_a_long_name_comes_back_cut(ask: Ask, stub: Any) -> None:
    answer = ask(f"{JUDGE}:classify", {"examples": [{"n" * 1_000_000: None}]})
    assert answer.status == 400
    assert len(answer.body) < 3000

    request = filled(classification_pb2.ClassificationRequest(), example(x=1.0))
    request.model_spec.name = "n" * 1_000_000
    with pytest.raises(grpc.RpcError) as caught:
        stub.Classify(request)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    many = several(*[("judge", f"s{number}", CLASSIFY) for number in range(20_000)])
    with pytest.raises(grpc.RpcError) as caught:
        stub.MultiInference(many, timeout=20)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def definition(text: str) -> meta_graph_pb2.SignatureDef:
    return text_format.Parse(text, meta_graph_pb2.SignatureDef())


ONE = 'key: "inputs" value { name: "x:0" }'


@pytest.mark.parametrize(
    ("method", "text", "by_name", "words"),
    [
        (
            CLASSIFY,
            'method_name: "tensorflow/serving/predict"',
            True,
            (
                "Expected classification signature method_name to be tensorflow/serving/classify. "
                "Was: tensorflow/serving/predict"
            ),
        ),
        (REGRESS, "", False, "Expected one input Tensor."),
        (
            CLASSIFY,
            f"inputs {{ {ONE} }}",
            False,
            "Expected one or two output Tensors, found 0",
        ),
        (
            CLASSIFY,
            'inputs { key: "x" } outputs { key: "scores" }',
            False,
            "No classification inputs found in SignatureDef: ",
        ),
        (
            REGRESS,
            f'inputs {{ {ONE} }} outputs {{ key: "y" }}',
            False,
            "No regression outputs found in SignatureDef: ",
        ),
        (
            CLASSIFY,
            f'inputs {{ {ONE} }} outputs {{ key: "y" }}',
            False,
            (
                'Expected classification signature outputs to contain at least one of "classes" or '
                '"scores". Signature was: '
            ),
        ),
    ],
)
def test_a_signature_that_cannot_answer_is_refused(
    method: str, text: str, by_name: bool, words: str
) -> None:
    with pytest.raises(ServeError) as caught:
        check_signature(Task(method=method, signature="s"), definition(text), by_name=by_name)

    assert caught.value.message.startswith(words)
