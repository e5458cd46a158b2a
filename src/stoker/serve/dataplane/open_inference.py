"""The parts of the Open Inference Protocol, version 2, that HTTP and gRPC share: names of types, metadata, requests.

Source: kserve/open-inference-protocol, `specification/protocol/inference_rest.md` and
`inference_grpc.md`; triton-inference-server, `extension_binary_data.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.core.errors import UserError
from stoker.core.version import __version__
from stoker.registry.exported_model import DEFAULT_SIGNATURE, TensorSpec
from stoker.registry.repository import MAX_VERSION
from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.dataplane.requests import ModelSpec
from stoker.serve.errors import Code, ServeError
from stoker.serve.servables.servable import State

SERVER_NAME = "stoker"
SERVER_VERSION = __version__
PLATFORM = "tensorflow_savedmodel"
EXTENSIONS = ("binary_tensor_data",)

SIGNATURE_PARAMETER = "signature_name"
"""Name of the request parameter that chooses a signature; without it, the default signature is called. An extension of
Stoker."""

DATATYPES = {
    "bool": "BOOL",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
    "string": "BYTES",
    **{f"int{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
}
"""TensorFlow's name of a dtype -> the protocol's name."""

_DTYPES = {datatype: dtype for dtype, datatype in DATATYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorMetadata:
    """One input or output, as the protocol describes it."""

    name: str
    """Its name."""

    datatype: str
    """The protocol's name of its dtype."""

    shape: tuple[int, ...]
    """The length of each axis; -1: variable."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelMetadata:
    """One version, as the protocol describes it."""

    name: str
    """The model's name."""

    versions: tuple[str, ...]
    """The versions that can be called."""

    inputs: tuple[TensorMetadata, ...]
    """The inputs of the default signature; of the only signature if the model has no default one."""

    outputs: tuple[TensorMetadata, ...]
    """The outputs of the same signature."""


def spec_of(name: str, version: str) -> ModelSpec:
    """Return the requested model and version; without a version, the newest one will answer.

    Raises:
        ServeError: the name is missing, or the version is not a number.
    """
    if not name:
        raise invalid("the model's name must not be empty")
    if not version:
        return ModelSpec(name=name)
    digits = version.lstrip("0") or "0"
    known = version.isascii() and version.isdecimal() and len(digits) <= len(str(MAX_VERSION))
    if not known or int(digits) > MAX_VERSION:
        raise invalid(f"the version must be a whole number: {version[:40]}")
    return ModelSpec(name=name, version=int(digits))


def is_ready(plane: DataPlane, spec: ModelSpec) -> bool:
    """Whether a model can be called; if a version is given, whether this version can."""
    try:
        return any(one.state is State.AVAILABLE for one in plane.status(spec))
    except ServeError:
        return False


def model_metadata(plane: DataPlane, spec: ModelSpec) -> ModelMetadata:
    """Return the model's versions, inputs and outputs as the protocol describes them.

    Raises:
        ServeError: the model cannot be called.
    """
    signatures = plane.signatures(spec)
    signature = signatures.get(DEFAULT_SIGNATURE) or next(iter(signatures.values()))
    every = ModelSpec(name=spec.name)
    available = [one.version for one in plane.status(every) if one.state is State.AVAILABLE]
    return ModelMetadata(
        name=spec.name,
        versions=tuple(str(version) for version in sorted(available)),
        inputs=_described(signature.inputs),
        outputs=_described(signature.outputs),
    )


def signature_of(parameters: Mapping[str, Any]) -> str:
    """Return the signature that a request names in its parameters; empty: the default.

    Raises:
        ServeError: the parameters ask for something that this server does not have.
    """
    signature = parameters.get(SIGNATURE_PARAMETER, "")
    if not isinstance(signature, str):
        raise invalid(f"the parameter {SIGNATURE_PARAMETER} must be a string")
    if parameters.get("sequence_id"):
        raise invalid(
            "this server keeps no state of sequences; leave out the parameter sequence_id"
        )
    return signature


def dtype_of(datatype: Any, *, name: str) -> str:
    """Return TensorFlow's name of one of the protocol's dtypes.

    Raises:
        UserError: the type is unknown.
    """
    found = _DTYPES.get(datatype) if isinstance(datatype, str) else None
    if found is None:
        raise UserError(
            f"the datatype of {name!r} must be one of {', '.join(sorted(_DTYPES))}", got=datatype
        )
    return found


def datatype_of(array: Any, *, name: str) -> str:
    """Return the protocol's name of an output's dtype.

    Raises:
        UserError: the protocol does not have the type.
    """
    dtype = "string" if array.dtype == object else array.dtype.name
    if dtype not in DATATYPES:
        raise UserError(f"output {name!r} has a type that the protocol does not have", got=dtype)
    return DATATYPES[dtype]


def invalid(message: str) -> ServeError:
    """Return an error that the client has to fix."""
    return ServeError(Code.INVALID_ARGUMENT, message)


def _described(specs: Mapping[str, TensorSpec]) -> tuple[TensorMetadata, ...]:
    return tuple(
        TensorMetadata(
            name=name,
            datatype=DATATYPES.get(spec.dtype, spec.dtype.upper()),
            shape=tuple(-1 if size is None else size for size in spec.shape or (None,)),
        )
        for name, spec in specs.items()
    )
