"""The requests and answers of the dataplane; REST and gRPC convert theirs to and from these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker.registry.exported_model import Signature
from stoker.serve.deadline import Deadline
from stoker.serve.servables.examples import Inferred, Task
from stoker.serve.servables.model_config import RequestLogConfig
from stoker.serve.servables.servable import State

Tensors = Mapping[str, np.ndarray[Any, Any]]
"""Name -> array."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The requested model."""

    name: str
    """The model's name."""

    version: int | None = None
    """The requested version; None: the newest."""

    label: str | None = None
    """Label of the requested version; None if `version` is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictRequest:
    """A Predict request."""

    model: ModelSpec
    """The requested model."""

    read_inputs: Callable[[Signature], Tensors]
    """Returns input name -> array, given the signature of the version that answers."""

    signature: str = ""
    """The signature's name; empty: `serving_default`."""

    output_filter: tuple[str, ...] = ()
    """The requested outputs; empty: all."""

    entrypoint: str = ""
    """The protocol of the request, for the metrics: "REST" or "GRPC"."""

    is_counted: bool = False
    """Whether the REST or gRPC code counts the request in the metrics, so that the dataplane must not."""

    deadline: Deadline = field(default_factory=Deadline)
    """How long the client waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictResponse:
    """The answer, and the version that gave it."""

    model: ModelSpec
    """The model with the version that answered."""

    signature: str
    """The signature that was called."""

    outputs: Tensors
    """Output name -> array."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferRequest:
    """Examples to be classified, regressed, or both."""

    model: ModelSpec
    """The requested model."""

    tasks: Sequence[Task]
    """The tasks, at least one; their signatures differ."""

    examples: Sequence[bytes]
    """Serialized `tf.train.Example`s, one per row."""

    context: bytes = b""
    """A serialized Example whose features are added to every row."""

    entrypoint: str = ""
    """The protocol of the request."""

    is_counted: bool = False
    """Whether the REST or gRPC code counts the request in the metrics, so that the dataplane must not."""

    deadline: Deadline = field(default_factory=Deadline)
    """How long the client waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferResponse:
    """The answers, one for each task."""

    model: ModelSpec
    """The model with the version that answered."""

    results: Sequence[Inferred]
    """The results, in the order of the tasks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A request with its answer, for the log of requests."""

    log: RequestLogConfig
    """The settings of the model's request log."""

    response: PredictResponse | InferResponse
    """The answer."""

    inputs: Tensors = field(default_factory=dict)
    """Inputs of a Predict request."""

    examples: Sequence[bytes] = ()
    """Examples of a Classify or Regress request."""

    context: bytes = b""
    """A serialized Example whose features are added to every Example."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionStatus:
    """The state of one version."""

    version: int
    """Its number."""

    state: State
    """Its state."""

    reason: str
    """The error that ended it; empty: no error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """How a version can be called."""

    model: ModelSpec
    """The model with the version that the request selected."""

    signature_defs: Mapping[str, Any]
    """Signature name -> TensorFlow's `SignatureDef`."""
