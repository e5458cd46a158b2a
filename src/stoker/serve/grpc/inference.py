"""Converts the messages of Classify, Regress and MultiInference to and from the dataplane."""

from __future__ import annotations

from collections.abc import Sequence

from tensorflow_serving.apis import (
    classification_pb2,
    inference_pb2,
    input_pb2,
    model_pb2,
    regression_pb2,
)

from stoker.registry.exported_model import DEFAULT_SIGNATURE
from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.dataplane.requests import InferRequest, InferResponse, ModelSpec
from stoker.serve.deadline import Deadline
from stoker.serve.errors import Code, ServeError
from stoker.serve.servables.examples import CLASSIFY, REGRESS, Inferred, Task


def read_spec(request: object) -> ModelSpec:
    """Return the model that a request names.

    Raises:
        ServeError: the request names no model.
    """
    if not request.HasField("model_spec"):  # type: ignore[attr-defined] # a generated message
        raise ServeError(Code.INVALID_ARGUMENT, "Missing ModelSpec")
    return spec_of(request.model_spec)  # type: ignore[attr-defined]  # both requests have it


def spec_of(spec: model_pb2.ModelSpec) -> ModelSpec:
    """Return the model that a spec names.

    Raises:
        ServeError: the spec names no model.
    """
    if not spec.name:
        raise ServeError(Code.INVALID_ARGUMENT, "ModelSpec has no name specified.")
    version = spec.version.value if spec.HasField("version") else None
    return ModelSpec(name=spec.name, version=version, label=spec.version_label or None)


def spec_proto(spec: ModelSpec, signature: str) -> model_pb2.ModelSpec:
    """Return a message of the model, the version and the signature that answered."""
    proto = model_pb2.ModelSpec()
    fill_spec(proto, spec, signature)
    return proto


def fill_spec(proto: model_pb2.ModelSpec, spec: ModelSpec, signature: str) -> None:
    """Fill an empty message with the fields that `spec_proto` sets."""
    proto.name, proto.signature_name = spec.name, signature
    if spec.version is not None:
        proto.version.value = spec.version


def classify(
    plane: DataPlane, request: classification_pb2.ClassificationRequest, deadline: Deadline
) -> classification_pb2.ClassificationResponse:
    """Classify the Examples of a request."""
    task = Task(method=CLASSIFY, signature=_signature(request.model_spec))
    answer = _infer(plane, read_spec(request), [task], request.input, deadline)
    response = classification_pb2.ClassificationResponse(
        result=classification_of(answer.results[0])
    )
    response.model_spec.CopyFrom(spec_proto(answer.model, task.signature))
    return response


def regress(
    plane: DataPlane, request: regression_pb2.RegressionRequest, deadline: Deadline
) -> regression_pb2.RegressionResponse:
    """Regress the Examples of a request."""
    task = Task(method=REGRESS, signature=_signature(request.model_spec))
    answer = _infer(plane, read_spec(request), [task], request.input, deadline)
    response = regression_pb2.RegressionResponse(result=regression_of(answer.results[0]))
    response.model_spec.CopyFrom(spec_proto(answer.model, task.signature))
    return response


def multi_inference(
    plane: DataPlane, request: inference_pb2.MultiInferenceRequest, deadline: Deadline
) -> inference_pb2.MultiInferenceResponse:
    """Run several signatures of one model on the same Examples."""
    tasks = _tasks(request)
    answer = _infer(plane, spec_of(request.tasks[0].model_spec), tasks, request.input, deadline)
    response = inference_pb2.MultiInferenceResponse()
    for inferred in answer.results:
        result = response.results.add()
        result.model_spec.CopyFrom(spec_proto(answer.model, inferred.task.signature))
        if inferred.task.method == CLASSIFY:
            result.classification_result.CopyFrom(classification_of(inferred))
        else:
            result.regression_result.CopyFrom(regression_of(inferred))
    return response


def _tasks(request: inference_pb2.MultiInferenceRequest) -> list[Task]:
    """Return the tasks of a request. Source of the checks and their order: TensorFlow Serving, `multi_inference.cc`."""
    if not request.tasks:
        raise _invalid("ModelSpec has no name specified.")
    tasks: list[Task] = []
    known: set[str] = set()
    for task in request.tasks:
        if not task.model_spec.name:
            raise _invalid("Found ModelSpec with an empty model name.")
        if task.model_spec.name != request.tasks[0].model_spec.name:
            raise _invalid(
                "All ModelSpecs in a MultiInferenceRequest must access the same model name."
            )
        signature = _signature(task.model_spec)
        if signature in known:
            raise _invalid(f"Duplicate evaluation of signature: {signature}")
        if task.method_name not in (CLASSIFY, REGRESS):
            raise ServeError(
                Code.UNIMPLEMENTED, f"Unsupported signature method_name: {task.method_name[:200]}"
            )
        known.add(signature)
        tasks.append(Task(method=task.method_name, signature=signature))
    return tasks


def _infer(
    plane: DataPlane,
    model: ModelSpec,
    tasks: Sequence[Task],
    inputs: input_pb2.Input,
    deadline: Deadline,
) -> InferResponse:
    context = b""
    examples = inputs.example_list.examples
    if inputs.WhichOneof("kind") == "example_list_with_context":
        examples = inputs.example_list_with_context.examples
        context = inputs.example_list_with_context.context.SerializeToString()
    request = InferRequest(
        model=model,
        tasks=tasks,
        examples=[example.SerializeToString() for example in examples],
        context=context,
        entrypoint="GRPC",
        deadline=deadline,
    )
    return plane.infer(request)


def _signature(spec: model_pb2.ModelSpec) -> str:
    return spec.signature_name or DEFAULT_SIGNATURE


def classification_of(answer: Inferred) -> classification_pb2.ClassificationResult:
    """Return the classes of each row as a message."""
    result = classification_pb2.ClassificationResult()
    for row in answer.classes:
        found = result.classifications.add()
        for label, score in row:
            found.classes.add(label=label.decode(errors="replace"), score=score)
    return result


def regression_of(answer: Inferred) -> regression_pb2.RegressionResult:
    """Return the value of each row as a message."""
    result = regression_pb2.RegressionResult()
    for value in answer.values:
        result.regressions.add(value=value)
    return result


def _invalid(message: str) -> ServeError:
    return ServeError(Code.INVALID_ARGUMENT, message)
