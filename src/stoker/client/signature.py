"""Names a model to call, and describes its signatures."""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.core.errors import ConfigError, Plain, UserError, nearest

DEFAULT_SIGNATURE = "serving_default"
"""Name of the default signature. Source: TensorFlow Serving."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAt:
    """A model to call, with its version or label."""

    name: str
    """The model's name."""

    version: int | None = None
    """The version number; None for the version of `label`, or the newest."""

    label: str = ""
    """Label (alias) of a version; "" for none."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("the model must have a name", got=self.name)
        if self.version is not None and self.label:
            raise ConfigError(
                "a version is named by its number or by a label",
                got=Plain(f"both, {self.version} and {self.label!r}"),
            )

    @property
    def path(self) -> str:
        """URL path of the model over REST."""
        path = f"/v1/models/{urllib.parse.quote(self.name, safe='')}"
        if self.version is not None:
            return f"{path}/versions/{self.version}"
        return f"{path}/labels/{urllib.parse.quote(self.label, safe='')}" if self.label else path


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """The dtype and shape of an input or output."""

    dtype: str
    """TensorFlow's name in lower case: "float32", "string"."""

    shape: tuple[int | None, ...] | None
    """Length of each axis, None for any length; None instead of a tuple if the rank is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignatureSpec:
    """The inputs and outputs of one signature: a way to call a model."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    @property
    def encoded(self) -> list[str]:
        """Names of inputs with one string per row, which may be encoded images."""
        return [
            name
            for name, spec in self.inputs.items()
            if spec.dtype == "string" and spec.shape is not None and len(spec.shape) == 1
        ]


def chosen(signatures: Mapping[str, SignatureSpec], name: str) -> SignatureSpec:
    """Return the signature named `name`; "" is the default signature.

    Raises:
        UserError: the model does not have this signature.
    """
    wanted = name or DEFAULT_SIGNATURE
    if wanted not in signatures:
        # Leave out names with `__`: a model also lists its initializer as a signature, which clients do not call.
        known = sorted(name for name in signatures if not name.startswith("__"))
        raise UserError(f"{wanted!r} must be a signature of the model", fix=nearest(wanted, known))
    return signatures[wanted]


PADDING: dict[str, Any] = {"int64": -(2**63), "float32": math.nan, "string": ""}
"""Dtype -> the padding value that a model exported by Stoker removes from the end of a list."""

_STOKER_SIGNATURES = {"serving_examples", "transform_features", "serving_transformed"}
"""Signatures, besides the default, of every model that Stoker exported from ingested data. A model without them may have been
trained on a user-defined dataset, and then does not remove padding."""


def list_padding(signatures: Mapping[str, SignatureSpec], name: str) -> dict[str, Any]:
    """Return input -> padding value, for inputs whose padding the model is known to remove.

    Args:
        signatures: All signatures of the model, by name.
        name: The signature to call; "" for the default.

    Raises:
        UserError: the model does not have this signature.
    """
    inputs = chosen(signatures, name).inputs
    takes_raw = name in ("", DEFAULT_SIGNATURE, "transform_features")
    if not takes_raw or not signatures.keys() >= _STOKER_SIGNATURES:
        return {}
    return {
        name: PADDING[spec.dtype]
        for name, spec in inputs.items()
        if spec.shape == (None, None) and spec.dtype in PADDING
    }


DTYPES = {
    1: "float32",
    2: "float64",
    3: "int32",
    4: "uint8",
    5: "int16",
    6: "int8",
    7: "string",
    8: "complex64",
    9: "int64",
    10: "bool",
    14: "bfloat16",
    17: "uint16",
    18: "complex128",
    19: "float16",
    22: "uint32",
    23: "uint64",
}
"""TensorFlow's number of a dtype -> its name, for the dtypes of request and answer tensors.

Source: TensorFlow, core/framework/types.proto.
"""

DTYPES_OF_JSON = {
    "DT_FLOAT": "float32",
    "DT_DOUBLE": "float64",
    "DT_HALF": "float16",
    **{f"DT_{name.upper()}": name for name in DTYPES.values() if not name.startswith("float")},
}
"""Name of a dtype in TensorFlow's enum, as REST sends it (DT_FLOAT) -> its usual name (float32)."""
