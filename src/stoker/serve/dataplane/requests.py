"""The messages of the dataplane, which REST and gRPC convert to and from."""

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
    """One version, the newest if None."""

    label: str | None = None
    """The version that has this label; not together with `version`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictRequest:
    """A Predict request."""

    model: ModelSpec
    """The requested model."""

    read_inputs: Callable[[Signature], Tensors]
    """Input name -> array, read according to the signature of the version that answers."""

    signature: str = ""
    """The signature's name, `serving_default` if empty."""

    output_filter: tuple[str, ...] = ()
    """The requested outputs; empty: all."""

    entrypoint: str = ""
    """The protocol of the request, for the metrics: "REST" or "GRPC"."""

    is_counted: bool = False
    """Whether the protocol counts it in the metrics, even if it never reaches a model."""

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
    """The tasks, at least one; each signature once."""

    examples: Sequence[bytes]
    """Serialized `tf.train.Example`s, one per row."""

    context: bytes = b""
    """A serialized Example whose features every row has as well."""

    entrypoint: str = ""
    """The protocol of the request."""

    is_counted: bool = False
    """Whether the protocol counts it in the metrics, even if it never reaches a model."""

    deadline: Deadline = field(default_factory=Deadline)
    """How long the client waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InferResponse:
    """The answers, one for each task."""

    model: ModelSpec
    """The model with the version that answered."""

    results: Sequence[Inferred]
    """In the order of the tasks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """A request with its answer, for the log of requests."""

    log: RequestLogConfig
    """Which requests are logged, and where."""

    response: PredictResponse | InferResponse
    """The answer."""

    inputs: Tensors = field(default_factory=dict)
    """Inputs of a Predict request."""

    examples: Sequence[bytes] = ()
    """Examples of a Classify or Regress request."""

    context: bytes = b""
    """The features that all Examples have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionStatus:
    """The state of one version."""

    version: int
    """Its number."""

    state: State
    """Its state."""

    reason: str
    """Why it ended; empty without an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """How a version can be called."""

    model: ModelSpec
    """The model with the version that was found."""

    signature_defs: Mapping[str, Any]
    """Signature name -> TensorFlow's `SignatureDef`."""
