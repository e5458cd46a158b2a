"""What the dataplane is asked and answers: the messages that REST and gRPC convert to and from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker.registry.callpath import Signature
from stoker.serve.deadline import Deadline
from stoker.serve.servables.examples import Inferred, Task
from stoker.serve.servables.model_config import RequestLogConfig
from stoker.serve.servables.servable import State

Tensors = Mapping[str, np.ndarray[Any, Any]]
"""Name -> array."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """Which model is meant."""

    name: str
    """The model's name."""

    version: int | None = None
    """One version, the newest if None."""

    label: str | None = None
    """The version that has this label; not together with `version`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictRequest:
    """One question to a model."""

    model: ModelSpec
    """Which model is asked."""

    read_inputs: Callable[[Signature], Tensors]
    """Input name -> array, read against the signature of the very version that will answer."""

    signature: str = ""
    """The signature's name, `serving_default` if empty."""

    output_filter: tuple[str, ...] = ()
    """The outputs that are wanted, all if empty."""

    entrypoint: str = ""
    """The protocol that brought it, for the metrics: "REST" or "GRPC"."""

    is_counted: bool = False
    """Whether the protocol counts it in the metrics, even if it never reaches a model."""

    deadline: Deadline = field(default_factory=Deadline)
    """How long the client waits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictResponse:
    """The answer, and who gave it."""

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
    """Which model is asked."""

    tasks: Sequence[Task]
    """What is asked of it, at least one; each signature once."""

    examples: Sequence[bytes]
    """Serialized `tf.train.Example`s, one a row."""

    context: bytes = b""
    """A serialized Example whose features every row has too."""

    entrypoint: str = ""
    """The protocol that brought it."""

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
    """Where it goes, and how often one does."""

    response: PredictResponse | InferResponse
    """The answer."""

    inputs: Tensors = field(default_factory=dict)
    """What was predicted on."""

    examples: Sequence[bytes] = ()
    """What was classified or regressed."""

    context: bytes = b""
    """The features that all of those have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionStatus:
    """The state of one version."""

    version: int
    """Its number."""

    state: State
    """Where it is in its life."""

    reason: str
    """Why it ended, empty if it did as it should."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """How a version is called."""

    model: ModelSpec
    """The model with the version that was found."""

    signature_defs: Mapping[str, Any]
    """Signature name -> TensorFlow's `SignatureDef`."""
