"""What a server answered."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.core.errors import DataError
from stoker.core.multi_output import ONLY

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The outputs of one call."""

    outputs: Mapping[str, NDArray[Any]]
    """Output -> [rows, ...]; over REST the only output has no name, and is "" here. Where NumPy is not
    installed, REST gives nested lists."""

    version: int | None = None
    """Which version answered; REST does not say."""


def from_rows(predictions: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """The list under `predictions`: a value, or an object of outputs, a row.

    Raises:
        DataError: its rows do not have the same outputs.
    """
    first = next(iter(predictions), None)
    if not isinstance(first, dict) or _is_bytes(first):
        return {ONLY: as_array(predictions)}
    try:
        return {name: as_array([row[name] for row in predictions]) for name in first}
    except (KeyError, TypeError):
        raise DataError(
            "every row of an answer must have the same outputs", got=list(first)
        ) from None


def from_columns(outputs: Any) -> dict[str, NDArray[Any]]:
    """The value under `outputs`: a tensor, or an object of tensors."""
    if isinstance(outputs, dict) and not _is_bytes(outputs):
        return {name: as_array(values) for name, values in outputs.items()}
    return {ONLY: as_array(outputs)}


def as_array(values: Any) -> NDArray[Any]:
    """Nested lists as an array; texts as objects of `str`, base64 as `bytes`; ragged as objects."""
    plain = _unpacked(values)
    try:
        import numpy as np
    except ModuleNotFoundError:  # `pip install stoker-client` without extras
        return plain
    try:
        array = np.asarray(plain)
    except ValueError:  # rows of several lengths
        array = np.empty(len(plain), dtype=object)
        array[:] = plain
        return array
    return np.asarray(plain, dtype=object) if array.dtype.kind in "SU" else array


def _is_bytes(value: Mapping[str, Any]) -> bool:
    return set(value) == {"b64"}


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if isinstance(value, dict) and _is_bytes(value):
        try:
            return base64.b64decode(value["b64"])
        except (ValueError, TypeError):
            raise DataError("bytes of an answer must be base64", got=value["b64"]) from None
    return value
