"""The paths below `/v1/models`: each is a call of the dataplane.

The body of a `:predict` request and of its answer may also be a single tensor as bytes, without JSON and base64:

| header | of a request | of an answer |
|---|---|---|
| `X-Tensor-Dtype` | TensorFlow's name of the dtype; `string`: the whole body is one string | the same |
| `X-Tensor-Shape` | e.g. `1,224,224,3`; not for `string` | the same |
| `X-Tensor-Name` | name of the input; not needed if the model has one input | name of the output |
| `X-Signature-Name` | name of the signature; without it, the default signature | |
| `X-Output-Name` | name of the requested output; needed if the model has several outputs | |
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict
from tensorflow_serving.apis import get_model_metadata_pb2

from stoker.core.errors import Plain, UserError
from stoker.registry.exported_model import DEFAULT_SIGNATURE, Signature
from stoker.registry.repository import MAX_VERSION
from stoker.serve.dataplane.plane import Counted, DataPlane
from stoker.serve.dataplane.requests import (
    InferRequest,
    Metadata,
    ModelSpec,
    PredictRequest,
    Tensors,
    VersionStatus,
)
from stoker.serve.errors import Code, ServeError, SignatureNotFound
from stoker.serve.rest import decode, encode, tf_serving_errors
from stoker.serve.rest.messages import RAW, Answer, HttpRequest
from stoker.serve.rest.numbers import read_numbers
from stoker.serve.servables.examples import CLASSIFY, REGRESS, Inferred, Task
from stoker.serve.tensor_bytes import DTYPES, checked_shape, from_bytes, to_bytes

_NAME = r"/(?P<name>[^/:]+)"
_VERSION = r"(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
_POST_PATH = re.compile(
    rf"/v1/models{_NAME}{_VERSION}:(?P<method>predict|classify|regress)", re.IGNORECASE | re.ASCII
)
_GET_PATH = re.compile(
    rf"/v1/models(?:{_NAME})?{_VERSION}(?P<metadata>/metadata)?", re.IGNORECASE | re.ASCII
)
"""Read-only paths. A path without the model's name matches, too, because TensorFlow Serving's error says what is
missing."""

_MODEL_PATH = re.compile(rf"/v[12]/models{_NAME}", re.IGNORECASE | re.ASCII)
"""Beginning of a path that names a model, below `/v1` or `/v2`."""

_COUNTS_PATH = re.compile(rf"/v1/rollouts{_NAME}/counts", re.ASCII)

_MAX_VERSION_DIGITS = 19
"""Number of digits of the largest 64-bit integer."""


def answer(plane: DataPlane, request: HttpRequest) -> Answer:
    """Answer a request, and count it as TensorFlow Serving does.

    Raises:
        ServeError: the path is unknown, or the dataplane refused the request.
    """
    began_s, code = time.monotonic(), Code.OK
    found = (_POST_PATH if request.method == "POST" else _GET_PATH).fullmatch(request.path)
    try:
        return _answer(plane, request, found)
    except ServeError as error:
        code = error.code
        raise
    except Exception:
        code = Code.INTERNAL
        raise
    finally:
        named = found.groupdict() if found is not None else {}
        method = (named.get("method") or "").lower()
        counted = Counted(named.get("name") or "", method, "REST")
        plane.count(counted, code, took_s=time.monotonic() - began_s)


def preflight(plane: DataPlane, *, origin: str) -> Answer:
    """Answer a CORS preflight request as TensorFlow Serving does.

    Args:
        plane: Counts the request.
        origin: The origin of the page. If it is not a web page's, the answer is an error.
    """
    is_web = re.search("https?://", origin) is not None
    code = Code.OK if is_web else Code.FAILED_PRECONDITION
    plane.count(Counted("", "", "REST"), code, took_s=0.0)
    return Answer(status=code.http_status, body="", content_type="text/plain")


def count_refused(plane: DataPlane, path: str) -> None:
    """Count a request that was refused because the server is overloaded, for the model that its path names."""
    found = _MODEL_PATH.match(path)
    plane.count_refused("" if found is None else found["name"], "REST", Code.UNAVAILABLE)


def _answer(plane: DataPlane, request: HttpRequest, found: re.Match[str] | None) -> Answer:
    if found is None or request.method not in ("GET", "POST"):
        raise ServeError(
            Code.INVALID_ARGUMENT, f"Malformed request: {request.method} {request.path}"
        )
    spec = _spec(found)
    if request.method == "POST":
        return _METHODS[found["method"].lower()](plane, spec, request)
    if not spec.name:
        raise ServeError(Code.INVALID_ARGUMENT, "Missing model name in request.")
    if found["metadata"]:
        return Answer(body=_metadata_text(plane.metadata(spec)))
    return Answer(body=_status_text(plane.status(spec)))


def rollout_counts(plane: DataPlane, path: str) -> Callable[[], Answer] | None:
    """Return the function that answers a request for a rollout's unwritten counts; None for other paths."""
    found, router = _COUNTS_PATH.fullmatch(path), plane.router
    if found is None or router is None or found["name"] not in router.routes:
        return None
    return lambda: Answer(body=json.dumps(router.counts(found["name"])))


def model_of(path: str) -> ModelSpec | None:
    """Return the model of a path that ends with `:predict`; None for other paths.

    Raises:
        ServeError: the version is out of range.
    """
    found = _POST_PATH.fullmatch(path)
    return None if found is None else _spec(found)


def _spec(found: re.Match[str]) -> ModelSpec:
    version, number = found["version"], None
    if version is not None:
        digits = version.lstrip("0") or "0"
        number = int(digits) if len(digits) <= _MAX_VERSION_DIGITS else MAX_VERSION + 1
        if number > MAX_VERSION:
            raise ServeError(
                Code.INVALID_ARGUMENT, f"Failed to convert version: {version[:40]} to numeric."
            )
    return ModelSpec(name=found["name"] or "", version=number, label=found["label"])


def _predict(plane: DataPlane, spec: ModelSpec, request: HttpRequest) -> Answer:
    try:
        body, read_inputs = _body_of(request)
        answers_raw = _wants_raw(request)
        outputs = plane.predict(
            PredictRequest(
                model=spec,
                read_inputs=read_inputs,
                signature=request.header("x-signature-name") if body is None else body.signature,
                output_filter=_output_filter(request) if answers_raw or body is None else (),
                entrypoint="REST",
                is_counted=True,
                deadline=request.deadline,
            )
        ).outputs
        if answers_raw:
            return _raw_answer(outputs)
        rows = body is None or body.rows
        return Answer(body=encode.predictions(outputs) if rows else encode.columns(outputs))
    except SignatureNotFound as error:
        message = f'Serving signature name: "{error.signature}" not found in signature def'
        raise ServeError(Code.INVALID_ARGUMENT, message) from error
    except UserError as error:
        raise ServeError(Code.INVALID_ARGUMENT, error.line()) from error


def _body_of(
    request: HttpRequest,
) -> tuple[decode.PredictBody | None, Callable[[Signature], Tensors]]:
    """Return the outer form of a JSON body (None for a raw tensor), and a function that reads the body's inputs."""
    if _is_raw(request):
        return None, _raw_input_reader(request)
    numbers = read_numbers(request.body)
    if numbers is None:
        body = decode.parse_body(request.body)
    else:
        body = decode.PredictBody(signature=numbers.signature, rows=numbers.rows, value=None)

    def read_inputs(signature: Signature) -> Tensors:
        found = None if numbers is None else numbers.as_inputs(signature)
        if found is not None:
            return found
        whole = body if numbers is None else decode.parse_body(request.body)
        try:
            return decode.read_inputs(whole, signature)
        except (UserError, ServeError) as error:
            known = tf_serving_errors.tf_serving_error(whole, signature)
            raise (known or error) from error

    return body, read_inputs


_SHAPE = re.compile(r"\d{1,12}(?:\s*,\s*\d{1,12})*|")


def _is_raw(request: HttpRequest) -> bool:
    """Return whether the body is a raw tensor."""
    return request.media_type == RAW


def _wants_raw(request: HttpRequest) -> bool:
    """Return whether the client requests a raw tensor; `*/*` does not."""
    accepted = request.header("accept").lower().split(",")
    return any(one.partition(";")[0].strip() == RAW for one in accepted)


def _raw_input_reader(request: HttpRequest) -> Callable[[Signature], Tensors]:
    """Return a function that reads the body for a signature.

    Raises:
        UserError: the headers contradict each other, or do not describe the body.
    """
    dtype, shape_text = request.header("x-tensor-dtype").strip(), request.header("x-tensor-shape")
    if dtype != "string" and dtype not in DTYPES:
        raise UserError(
            "X-Tensor-Dtype must be string or one of " + ", ".join(sorted(DTYPES)), got=dtype
        )
    array = (
        _raw_text(request.body, shape_text)
        if dtype == "string"
        else _raw_values(request, dtype, shape_text)
    )

    def read(signature: Signature) -> Tensors:
        name = request.header("x-tensor-name") or _only(list(signature.inputs), "X-Tensor-Name")
        return {name: array}

    return read


def _output_filter(request: HttpRequest) -> tuple[str, ...]:
    """Return the names of the requested outputs; (): all outputs."""
    name = request.header("x-output-name")
    return (name,) if name else ()


def _raw_answer(outputs: Tensors) -> Answer:
    """Return an answer whose body is the only output.

    Raises:
        UserError: there are several outputs, or the output's dtype cannot be sent as bytes.
    """
    name = _only(list(outputs), "X-Output-Name")
    array = outputs[name]
    is_text = array.dtype == object
    if is_text and array.size != 1:
        raise UserError(
            f"output {name!r} must be one string to be sent as the body",
            got=Plain(f"{array.size} strings"),
        )
    body = array.reshape(-1)[0] if is_text else to_bytes(array)
    return Answer(
        body=body,
        content_type=RAW,
        headers=(
            (b"x-tensor-name", _header_safe(name)),
            (b"x-tensor-dtype", b"string" if is_text else array.dtype.name.encode()),
            (b"x-tensor-shape", ",".join(map(str, array.shape)).encode()),
        ),
    )


def _raw_text(body: bytes, shape_text: str) -> np.ndarray[Any, Any]:
    if shape_text:
        raise UserError(
            "X-Tensor-Shape must not be set for string: the body is one string", got=shape_text
        )
    array = np.empty(1, dtype=object)
    array[0] = body
    return array


def _raw_values(request: HttpRequest, dtype: str, shape_text: str) -> np.ndarray[Any, Any]:
    given = any(name == b"x-tensor-shape" for name, _ in request.scope["headers"])
    if not given or not _SHAPE.fullmatch(shape_text.strip()):
        raise UserError("X-Tensor-Shape must be whole numbers separated by commas", got=shape_text)
    lengths = [int(part) for part in shape_text.split(",") if part.strip()]
    shape = checked_shape(lengths, name="X-Tensor-Shape")
    return from_bytes(request.body, dtype=dtype, shape=shape, name="the body")


def _only(names: list[str], header: str) -> str:
    if len(names) == 1:
        return names[0]
    raise UserError(f"{header} must name one of {', '.join(sorted(names))}", got=Plain("none"))


def _header_safe(name: str) -> bytes:
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in name).encode()


def _classify(plane: DataPlane, spec: ModelSpec, request: HttpRequest) -> Answer:
    return Answer(body=encode.classifications_text(_inferred(plane, CLASSIFY, spec, request)))


def _regress(plane: DataPlane, spec: ModelSpec, request: HttpRequest) -> Answer:
    return Answer(body=encode.regressions_text(_inferred(plane, REGRESS, spec, request)))


def _inferred(plane: DataPlane, method: str, spec: ModelSpec, request: HttpRequest) -> Inferred:
    body = decode.parse_examples(request.body)
    inferred = plane.infer(
        InferRequest(
            model=spec,
            tasks=(Task(method=method, signature=body.signature or DEFAULT_SIGNATURE),),
            examples=body.examples,
            context=body.context,
            entrypoint="REST",
            is_counted=True,
            deadline=request.deadline,
        )
    )
    return inferred.results[0]


_METHODS = {"predict": _predict, "classify": _classify, "regress": _regress}


def _status_text(statuses: list[VersionStatus]) -> str:
    return _pretty({"model_version_status": [_status(status) for status in statuses]})


def _status(status: VersionStatus) -> dict[str, Any]:
    code = Code.UNKNOWN if status.reason else Code.OK
    return {
        "version": str(status.version),  # 64-bit numbers are strings in protobuf's JSON
        "state": status.state.name,
        "status": {"error_code": code.name, "error_message": status.reason},
    }


def _metadata_text(metadata: Metadata) -> str:
    definitions = get_model_metadata_pb2.SignatureDefMap()
    for name, definition in metadata.signature_defs.items():
        definitions.signature_def[name].CopyFrom(definition)
    text = MessageToDict(
        definitions, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    spec = {
        "name": metadata.model.name,
        "signature_name": "",
        "version": str(metadata.model.version),
    }
    return _pretty({"model_spec": spec, "metadata": {"signature_def": text}})


def _pretty(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1) + "\n"
