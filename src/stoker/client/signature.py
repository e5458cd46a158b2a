"""Which model is asked, and what it says of itself."""

from __future__ import annotations

import math
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.core.nearest import nearest

DEFAULT_SIGNATURE = "serving_default"
"""What is called where no signature is named. Source: TensorFlow Serving."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelAt:
    """A model, and which version of it."""

    name: str
    """The model's name."""

    version: int | None = None
    """Its number; None: what `label` says, else the newest."""

    label: str = ""
    """An alias of a version; "" for none."""

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
        """Its URL's path over REST."""
        path = f"/v1/models/{urllib.parse.quote(self.name, safe='')}"
        if self.version is not None:
            return f"{path}/versions/{self.version}"
        return f"{path}/labels/{urllib.parse.quote(self.label, safe='')}" if self.label else path


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """What an input must be."""

    dtype: str
    """TensorFlow's name in small letters: "float32", "string"."""

    shape: tuple[int | None, ...] | None
    """Length of each axis, None where any is taken; None as a whole where the rank is open."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SignatureSpec:
    """One way to call a model."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]

    @property
    def encoded(self) -> list[str]:
        """Inputs that take strings, one a row: where an image file can go."""
        return [
            name
            for name, spec in self.inputs.items()
            if spec.dtype == "string" and spec.shape is not None and len(spec.shape) == 1
        ]


def chosen(signatures: Mapping[str, SignatureSpec], name: str) -> SignatureSpec:
    """The signature of a name, "" for the usual one.

    Raises:
        UserError: the model has none of this name.
    """
    wanted = name or DEFAULT_SIGNATURE
    if wanted not in signatures:
        # Keras's archive names its initialiser as a signature, which nobody calls.
        known = sorted(name for name in signatures if not name.startswith("__"))
        raise UserError(f"{wanted!r} must be a signature of the model", fix=nearest(wanted, known))
    return signatures[wanted]


PADDING: dict[str, Any] = {"int64": -(2**63), "float32": math.nan, "string": ""}
"""Dtype -> what a model that Stoker exported cuts off the end of a list, as JSON has it."""

_STOKERS = {"serving_examples", "transform_features", "serving_transformed"}
"""The signatures next to the usual one of each model that Stoker exported with such lists. Without
the first, an open axis may be that of a user's own data, whose padding nothing cuts off."""


def list_padding(signatures: Mapping[str, SignatureSpec], name: str) -> dict[str, Any]:
    """Input -> the padding that the model cuts off its lists; only inputs known to do so.

    Args:
        signatures: All of the model's, by name.
        name: Which one is called, "" for the usual one.

    Raises:
        UserError: the model has none of this name.
    """
    inputs = chosen(signatures, name).inputs
    takes_raw = name in ("", DEFAULT_SIGNATURE, "transform_features")
    if not takes_raw or not signatures.keys() >= _STOKERS:
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
"""Number -> name of the dtypes that tensors of a request and an answer have.

Source: TensorFlow, core/framework/types.proto.
"""

DTYPES_OF_JSON = {
    "DT_FLOAT": "float32",
    "DT_DOUBLE": "float64",
    "DT_HALF": "float16",
    **{f"DT_{name.upper()}": name for name in DTYPES.values() if not name.startswith("float")},
}
"""The same by the enumeration's names, in which REST writes them."""
