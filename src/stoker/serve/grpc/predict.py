"""Predict over gRPC: converts messages to and from the dataplane's, and answers small calls in the event loop."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tensorflow_serving.apis import predict_pb2

from stoker.core.errors import UserError
from stoker.registry.exported_model import Signature
from stoker.serve.batching.joined import MANY, in_runs
from stoker.serve.dataplane.joined_runs import JoinedRequests, JoinedRun, of_version
from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.dataplane.requests import ModelSpec, Tensors
from stoker.serve.errors import Code, ServeError
from stoker.serve.grpc.calls import Calls, name_version, value_of
from stoker.serve.grpc.inference import fill_spec, read_spec
from stoker.serve.grpc_server.call import Context
from stoker.serve.request_record import RequestRecord
from stoker.serve.routing import Route
from stoker.serve.tensor_protos import fill, to_array

PREDICT = "/tensorflow.serving.PredictionService/Predict"
"""Full name of the gRPC method."""


def read_inputs(request: predict_pb2.PredictRequest, signature: Signature) -> Tensors:
    """Return the tensors of a request, with the signature's defaults for missing tensors.

    Raises:
        UserError: a tensor is damaged.
        ServeError: a tensor is missing, or is not an input of the signature.

    Source of the messages: TensorFlow Serving, `predict_util.cc`, and TensorFlow, `saved_model/util.cc`.
    """
    if request.inputs.keys() != signature.inputs.keys():
        _check_number(set(request.inputs), signature)
    found: dict[str, np.ndarray[Any, Any]] = {}
    for name, feed_name in sorted(signature.feed_names.items()):
        sent = request.inputs if name in request.inputs else signature.defaults
        if name not in sent:
            raise _invalid(
                f"Signature input alias: {name}(feed name: {feed_name}) not found in request and no "
                f"default value provided. Inputs expected to be in the request "
                f"{{{_listed(request.inputs)}}}, or default input alias set: "
                f"{_listed(signature.defaults)}"
            )
        found[name] = to_array(sent[name], name=name)
    if request.inputs.keys() - found.keys():
        used = _listed(found.keys() & request.inputs.keys())
        raise _invalid(
            f"Inputs contains invalid name. Used request inputs: {used}, "
            f"request input: {_listed(request.inputs)}"
        )
    return found


def _check_number(sent: set[str], signature: Signature) -> None:
    wanted = set(signature.inputs)
    if len(sent) > len(wanted) or (len(sent) < len(wanted) and not signature.defaults):
        raise _invalid(
            f"input size does not match signature: {len(sent)}!={len(wanted)} "
            f"len({{{_listed(sent)}}}) != len({{{_listed(wanted)}}}). "
            f"Sent extra: {{{_listed(sent - wanted)}}}. "
            f"Missing but required: {{{_listed(wanted - sent)}}}."
        )


def _listed(names: Iterable[str]) -> str:
    return ",".join(sorted(names))


def _invalid(message: str) -> ServeError:
    return ServeError(Code.INVALID_ARGUMENT, message)


def response_of(
    model: ModelSpec, signature: str, outputs: Tensors, *, as_content: bool = False
) -> predict_pb2.PredictResponse:
    """Return the response message; with `as_content`, numbers are sent as bytes (`tensor_content`).

    Raises:
        UserError: the protocol has no field for the dtype of an output.
    """
    response = predict_pb2.PredictResponse()
    fill_spec(response.model_spec, model, signature)
    for name, array in outputs.items():
        fill(response.outputs[name], array, as_content=as_content)
    return response


Alike = tuple[ModelSpec, bool, str, tuple[tuple[str, str, tuple[int, ...]], ...]]
"""The properties that calls must share to be answered by one run: the model, whether a rollout chose its version, the
signature, and each input's name, dtype and shape of a row."""


@dataclass(kw_only=True, slots=True)
class _Small:
    """One small call."""

    number: int
    """Its index among the calls that arrived together."""

    request: predict_pb2.PredictRequest
    context: Context
    inputs: Tensors
    left_s: float
    """How long its client waits, seconds."""

    route: Route | None
    """Where a rollout sends it."""


class InlineGrpcPredict:
    """Answers small calls in the event loop. Similar calls that arrive together share one run."""

    def __init__(self, plane: DataPlane, calls: Calls) -> None:
        """Args: plane: runs the models; calls: writes the access log."""
        self._plane = plane
        self._calls = calls

    def answer(
        self, calls: Sequence[tuple[predict_pb2.PredictRequest, Context]]
    ) -> list[bytes | None]:
        """Answer the calls whose model is quick and idle; return None for each call that needs a thread."""
        came_s = time.monotonic()
        answers: list[bytes | None] = [None] * len(calls)
        groups: dict[Alike, list[_Small]] = {}
        for number, (request, context) in enumerate(calls):
            read = self._read(request, context, number)
            if read is not None:
                groups.setdefault(read[0], []).append(read[1])
        for (model, _, signature, _), group in groups.items():
            for part in self._parts(model, group):
                found = self._run(model, signature, part, came_s)
                for small, answer in zip(part, found, strict=False):
                    answers[small.number] = answer
        return answers

    def _read(
        self, request: predict_pb2.PredictRequest, context: Context, number: int
    ) -> tuple[Alike, _Small] | None:
        """Return a call, and its key for grouping; None if a thread must answer it."""
        left_s = context.time_remaining()
        if request.output_filter or (left_s is not None and left_s <= 0) or not _is_plain(request):
            return None
        try:
            spec = read_spec(request)
            inputs = {name: to_array(proto, name=name) for name, proto in request.inputs.items()}
        except (ServeError, UserError):  # the thread reports the error
            return None
        kinds = tuple((name, array.dtype.str, array.shape[1:]) for name, array in inputs.items())
        route = self._plane.route(spec, functools.partial(value_of, context))
        if route is not None:
            context.route = route  # a thread that answers the call must not choose a version again
            spec = of_version(spec.name, route.version)
        small = _Small(
            number=number,
            request=request,
            context=context,
            inputs=inputs,
            left_s=math.inf if left_s is None else left_s,
            route=route,
        )
        return (spec, route is not None, request.model_spec.signature_name, kinds), small

    def _parts(self, model: ModelSpec, group: list[_Small]) -> list[list[_Small]]:
        """Group calls so that each group fits in one run."""
        if len(group) < MANY:
            return [group]
        max_rows = self._plane.max_rows(model)
        return in_runs(group, lambda small: _rows(small.inputs), max_rows=max_rows)

    def _run(
        self, model: ModelSpec, signature: str, group: list[_Small], came_s: float
    ) -> list[bytes]:
        """Answer a group with one run; return an empty list if each call must run alone."""
        inputs = [small.inputs for small in group]
        sizes = [_rows(each) for each in inputs] if len(group) > 1 else []
        if not all(sizes):
            return []
        joined = JoinedRequests(
            model=model,
            signature=signature,
            came_s=[came_s] * len(group),
            sizes=sizes,
            entrypoint="GRPC",
            routes=[small.route for small in group if small.route is not None],
            patience_s=[small.left_s for small in group if small.route is not None],
        )
        found = self._plane.predict_joined(
            joined, lambda _: inputs[0] if len(group) == 1 else _joined(inputs)
        )
        if found is None:
            return []
        parts = [found.outputs] if not sizes else _parted(found.outputs, sizes)
        if not parts:
            return []
        named = ModelSpec(name=model.name, version=found.version)
        try:
            as_content = self._plane.tensor_content
            responses = [
                response_of(named, found.signature, part, as_content=as_content) for part in parts
            ]
        except UserError:
            return []
        self._plane.answered_joined(joined, found)
        for small in group:
            name_version(small.context, found.version)
        if self._calls.noted:
            for small, response in zip(group, responses, strict=False):
                self._note(small, response, found, came_s)
        return [response.SerializeToString() for response in responses]

    def _note(
        self,
        small: _Small,
        response: predict_pb2.PredictResponse,
        found: JoinedRun,
        came_s: float,
    ) -> None:
        record = RequestRecord(
            began_s=came_s,
            model=found.model,
            version=found.version,
            signature=found.signature,
            rows=_rows(small.inputs),
            code="OK",
        )
        record.ran(found.began_s, found.ended_s, came_s=came_s)
        self._calls.note(small.context, "Predict", small.request, response=response, record=record)


def _is_plain(request: predict_pb2.PredictRequest) -> bool:
    """Whether no tensor's shape has more values than the request has bytes.

    TensorFlow repeats one stored value to fill a shape, so a small request may declare millions of values.
    """
    size = request.ByteSize()
    return all(
        math.prod(dim.size for dim in proto.tensor_shape.dim) <= size
        for proto in request.inputs.values()
    )


def _rows(inputs: Tensors) -> int:
    """The number of rows of each input; 0 if the inputs differ in it, or have no rows."""
    sizes = {len(array) if array.ndim else 0 for array in inputs.values()}
    return next(iter(sizes)) if len(sizes) == 1 else 0


def _joined(inputs: Sequence[Tensors]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.concatenate([each[name] for each in inputs]) for name in inputs[0]}


def _parted(outputs: Tensors, sizes: Sequence[int]) -> list[Tensors]:
    """Split the outputs by call; return an empty list if an output does not have as many rows as the inputs."""
    if any(not array.ndim or len(array) != sum(sizes) for array in outputs.values()):
        return []
    ends = np.cumsum(sizes)
    return [
        {name: array[end - size : end] for name, array in outputs.items()}
        for end, size in zip(ends, sizes, strict=True)
    ]
