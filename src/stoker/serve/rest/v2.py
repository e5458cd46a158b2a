"""The paths below `/v2`: the Open Inference Protocol over HTTP, with the extension for binary tensors."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.core.errors import Plain, UserError
from stoker.registry.exported_model import Signature, shape_text
from stoker.serve.dataplane import open_inference
from stoker.serve.dataplane.open_inference import invalid
from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.dataplane.requests import PredictRequest, PredictResponse, Tensors
from stoker.serve.errors import Code, ServeError, SignatureNotFound
from stoker.serve.rest import decode
from stoker.serve.rest.encode import number_texts
from stoker.serve.rest.json_text import parse_json, shown
from stoker.serve.rest.messages import RAW, Answer, HttpRequest
from stoker.serve.rest.numbers import NumberList, read_lists
from stoker.serve.tensor_bytes import MAX_RANK, checked_shape, from_bytes, to_bytes

HEADER_LENGTH = "inference-header-content-length"
"""Header with the length of the JSON in a body, bytes; the binary tensors follow the JSON."""

_MODEL = re.compile(
    r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?(?:/(?P<verb>ready|infer))?"
)
_MAX_OUTPUTS = 1024


def answer(plane: DataPlane, request: HttpRequest) -> Answer:
    """Answer a request.

    Raises:
        ServeError: the path is unknown, or the dataplane refused the request.
    """
    method, path = request.method, request.path.rstrip("/")
    if path == "/v2" and method == "GET":
        said = {"name": open_inference.SERVER_NAME, "version": open_inference.SERVER_VERSION}
        return _json({**said, "extensions": list(open_inference.EXTENSIONS)})
    found = _MODEL.fullmatch(path)
    if found is None:
        raise ServeError(Code.NOT_FOUND, f"unknown path: {method} {path}")
    spec = open_inference.spec_of(found["name"], found["version"] or "")
    if found["verb"] == "infer" and method == "POST":
        return _infer(plane, spec, request)
    if found["verb"] == "ready" and method == "GET":
        ready = open_inference.is_ready(plane, spec)
        status = 200 if ready else Code.UNAVAILABLE.http_status
        return dataclasses.replace(_json({"name": spec.name, "ready": ready}), status=status)
    if found["verb"] is None and method == "GET":
        metadata = dataclasses.asdict(open_inference.model_metadata(plane, spec))
        return _json({**metadata, "platform": open_inference.PLATFORM})
    raise ServeError(Code.INVALID_ARGUMENT, f"Malformed request: {method} {path}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Input:
    """An input as the client sent it. Either `raw` or `data` is set."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    raw: memoryview | None = None
    data: Any = None

    def array(self) -> np.ndarray[Any, Any]:
        if self.raw is not None:
            return from_bytes(self.raw, dtype=self.dtype, shape=self.shape, name=self.name)
        data = self.data
        if isinstance(data, NumberList):
            array = data.as_dtype(self.dtype)
            if array is not None and array.size == math.prod(self.shape):
                return array.reshape(self.shape)
            data = parse_json(data.raw)
        flat: list[Any] = []
        _flatten(data, flat, 0, self.name)
        if len(flat) != math.prod(self.shape):
            raise UserError(
                f"input {self.name!r} must have the values of shape {shape_text(self.shape)}",
                got=Plain(f"{len(flat):,} values"),
            )
        return decode.typed(flat, name=self.name, dtype=self.dtype).reshape(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RequestedOutputs:
    """The requested outputs, and whether each is sent as a binary tensor."""

    names: tuple[str, ...]
    binary: frozenset[str]
    all_binary: bool

    def is_binary(self, name: str) -> bool:
        return name in self.binary or (self.all_binary and name not in self.names)


def _infer(plane: DataPlane, spec: Any, request: HttpRequest) -> Answer:
    try:
        head, tail = _parts(request)
        text = bytes(head)
        body = _object(read_lists(text) or parse_json(text), "the body")
        name = body.get("id", "")
        if not isinstance(name, str):
            raise invalid("'id' must be a string")
        parameters = _object(body.get("parameters", {}), "'parameters'")
        requested = _requested_outputs(body.get("outputs", []), parameters)
        inputs = _inputs(body.get("inputs"), tail)

        def read_inputs(_signature: Signature) -> Tensors:
            return {one.name: one.array() for one in inputs}

        response = plane.predict(
            PredictRequest(
                model=spec,
                read_inputs=read_inputs,
                signature=open_inference.signature_of(parameters),
                output_filter=tuple(requested.names),
                entrypoint="REST",
                deadline=request.deadline,
            )
        )
        return _answered(response, requested, request_id=name)
    except UserError as error:
        raise invalid(error.line()) from error
    except SignatureNotFound as error:
        raise invalid(error.message) from error


def _parts(request: HttpRequest) -> tuple[memoryview, memoryview]:
    """Split a body into the JSON and the bytes after it."""
    body, said = memoryview(request.body), request.header(HEADER_LENGTH)
    if not said:
        return body, memoryview(b"")
    if not (said.isascii() and said.isdecimal()) or len(said) > 12 or int(said) > len(body):
        raise invalid(f"Inference-Header-Content-Length must be 0..{len(body)}: {said[:40]}")
    return body[: int(said)], body[int(said) :]


def _inputs(sent: Any, tail: memoryview) -> list[_Input]:
    if not isinstance(sent, list) or not sent:
        raise invalid("'inputs' must be a list of tensors")
    found: list[_Input] = []
    for one in sent:
        tensor = _object(one, "each of 'inputs'")
        size = _object(tensor.get("parameters", {}), "'parameters'").get("binary_data_size")
        name = _text(tensor.get("name"), "the name of an input")
        if name in {other.name for other in found}:
            raise invalid(f"input {name!r} must be given only once")
        if (size is None) == ("data" not in tensor):
            raise invalid(f"input {name!r} must have either data or binary_data_size")
        raw = None
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(tail):
                raise invalid(f"binary_data_size of {name!r} must be 0..{len(tail)}: {shown(size)}")
            raw, tail = tail[:size], tail[size:]
        found.append(
            _Input(
                name=name,
                dtype=open_inference.dtype_of(tensor.get("datatype"), name=name),
                shape=_shape(tensor.get("shape"), name),
                raw=raw,
                data=tensor.get("data"),
            )
        )
    if len(tail):
        raise invalid(f"{len(tail):,} bytes follow the last tensor")
    return found


def _requested_outputs(sent: Any, parameters: Mapping[str, Any]) -> _RequestedOutputs:
    if not isinstance(sent, list) or len(sent) > _MAX_OUTPUTS:
        raise invalid("'outputs' must be a list")
    all_binary = _truth(parameters.get("binary_data_output", False), "binary_data_output")
    names: list[str] = []
    binary: set[str] = set()
    for one in sent:
        output = _object(one, "each of 'outputs'")
        name = _text(output.get("name"), "the name of an output")
        own = _object(output.get("parameters", {}), "'parameters'")
        if "classification" in own:
            raise invalid("the parameter classification is not supported")
        if name in names:
            raise invalid(f"output {name!r} must be requested only once")
        names.append(name)
        if _truth(own.get("binary_data", all_binary), "binary_data"):
            binary.add(name)
    return _RequestedOutputs(names=tuple(names), binary=frozenset(binary), all_binary=all_binary)


def _answered(
    response: PredictResponse, requested: _RequestedOutputs, *, request_id: str
) -> Answer:
    described: list[str] = []
    tensors: list[bytes] = []
    for name, array in response.outputs.items():
        said: dict[str, Any] = {
            "name": name,
            "datatype": open_inference.datatype_of(array, name=name),
            "shape": list(array.shape),
        }
        data = ""
        if requested.is_binary(name):
            tensors.append(to_bytes(array))
            said["parameters"] = {"binary_data_size": len(tensors[-1])}
        else:
            data = f', "data": [{", ".join(_texts(array, name))}]'
        described.append(json.dumps(said)[:-1] + data + "}")
    head = {"model_name": response.model.name, "model_version": str(response.model.version)}
    if request_id:
        head["id"] = request_id
    text = json.dumps(head)[:-1] + f', "outputs": [{", ".join(described)}]}}'
    if not tensors:
        return Answer(body=text)
    raw = text.encode()
    return Answer(
        body=b"".join([raw, *tensors]),
        content_type=RAW,
        headers=((HEADER_LENGTH.encode(), str(len(raw)).encode()),),
    )


def _texts(array: np.ndarray[Any, Any], name: str) -> list[str]:
    """Return the JSON of each value.

    Raises:
        UserError: a string is not UTF-8, so it can only be sent in a binary tensor.
    """
    if array.dtype != object:
        if array.dtype.kind in "iub":
            return [json.dumps(item) for item in array.reshape(-1).tolist()]
        return number_texts(array)
    try:
        return [json.dumps(item.decode()) for item in array.reshape(-1).tolist()]
    except UnicodeDecodeError:
        raise UserError(
            f"output {name!r} holds bytes that are not UTF-8",
            fix="Request it as a binary tensor: set the output's parameter binary_data.",
        ) from None


def _flatten(value: Any, flat: list[Any], level: int, name: str) -> None:
    if level > MAX_RANK:
        raise UserError(f"input {name!r} must have at most {MAX_RANK} axes")
    if not isinstance(value, list):
        raise UserError(f"the data of input {name!r} must be a list", got=Plain(shown(value)))
    if list not in set(map(type, value)):
        flat.extend(value)
        return
    for item in value:
        _flatten(item, flat, level + 1, name)


def _shape(sent: Any, name: str) -> tuple[int, ...]:
    if not isinstance(sent, list) or not all(type(size) is int for size in sent):
        raise invalid(f"the shape of {name!r} must be a list of whole numbers")
    return checked_shape(sent, name=name)


def _object(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise invalid(f"{what} must be an object")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise invalid(f"{what} must be a string")
    return value


def _truth(value: Any, what: str) -> bool:
    if not isinstance(value, bool):
        raise invalid(f"{what} must be true or false")
    return value


def _json(value: Mapping[str, Any] | Sequence[Any]) -> Answer:
    return Answer(body=json.dumps(value))
