"""Calls, answers and errors that the REST client and the gRPC client share.

CallError            UserError: one line, exit 2
|- NoAnswerError     no connection, unknown host name, time-out, broken connection
|- RefusedError      the server refused the call: its status and message
"""

from __future__ import annotations

import base64
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from stoker.client.connection import Connection, parse_address
from stoker.client.rows import Request
from stoker.client.signature import ModelAt, SignatureSpec
from stoker.core.errors import DataError, Plain, UserError
from stoker.core.multi_output import ONLY

if TYPE_CHECKING:
    from numpy.typing import NDArray


class CallError(UserError):
    """A call failed."""


class NoAnswerError(CallError):
    """The server could not be reached, or did not answer in time."""


class RefusedError(CallError):
    """The server refused the call."""

    def __init__(self, rule: str, *, status: str, said: str, fix: str = "") -> None:
        """Compose the message.

        Args:
            rule: What was expected.
            status: Status of the answer: "404" over REST, "NOT_FOUND" over gRPC.
            said: Error message of the server.
            fix: The next action.
        """
        self.status = status
        self.said = said
        got = f"{status}: {said.rstrip('.')}" if said else status
        super().__init__(rule, got=Plain(got), fix=fix)


def refused_fix(status: str) -> str:
    """Return the next action for a status; "" if the status alone does not determine it."""
    return _FIXES.get(status, "")


_FIXES = {
    "401": "Give a token: set STOKER_TOKEN.",
    "403": "Give a token that may do this: set STOKER_TOKEN.",
    "404": "Name a model and a version that this server has.",
    "413": "Send fewer rows at once.",
    "429": "Send less at once, or again later.",
    "503": "Ask again later.",
    "504": "Give it longer, or send fewer rows at once.",
    "UNAUTHENTICATED": "Give a token: set STOKER_TOKEN.",
    "PERMISSION_DENIED": "Give a token that may do this: set STOKER_TOKEN.",
    "NOT_FOUND": "Name a model and a version that this server has.",
    "RESOURCE_EXHAUSTED": "Send less at once, or again later.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """The answer to a call."""

    outputs: Mapping[str, NDArray[Any]]
    """Output -> [rows, ...] array. Over REST, a single output has no name, so its key is "". If NumPy is not installed,
    REST returns nested lists instead of arrays."""

    version: int | None = None
    """The version that answered; None over REST, which does not report the version."""


def from_rows(predictions: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """Return the outputs from `predictions`, which has one value, or one object of outputs, per row.

    Raises:
        DataError: the rows do not have the same outputs.
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
    """Return the outputs from `outputs`, which is one tensor or an object of tensors."""
    if isinstance(outputs, dict) and not _is_bytes(outputs):
        return {name: as_array(values) for name, values in outputs.items()}
    return {ONLY: as_array(outputs)}


def as_array(values: Any) -> NDArray[Any]:
    """Return nested lists as an array.

    Strings become `str` objects, base64 becomes `bytes`, and rows of different lengths become an object array.
    """
    plain = _unpacked(values)
    try:
        import numpy as np
    except ModuleNotFoundError:  # `pip install stoker-client` without extras
        return plain
    try:
        array = np.asarray(plain)
    except ValueError:  # rows of different lengths
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


class ModelClient(AbstractContextManager["ModelClient"], ABC):
    """A client of one server; a `with` block closes it."""

    def __init__(self, url: str, *, scheme: str, connection: Connection | None) -> None:
        """Args: url: URL of the server; scheme: used if the URL has none; connection: time-out, token, TLS.

        Raises:
            ConfigError: the URL is invalid.
        """
        self.address = parse_address(url, scheme=scheme)
        self._settings = connection or Connection()

    def predict(
        self,
        model: str | ModelAt,
        rows: Sequence[Any] | NDArray[Any] | Mapping[str, NDArray[Any]],
        *,
        signature: str = "",
    ) -> Answers:
        """Return the model's answers for rows.

        Args:
            model: Name of the model, or a `ModelAt` with a version.
            rows: One value or one object of inputs per row; or a dict input -> [rows, ...] array. Over gRPC,
                arrays must have the dtypes that the model declares. Rows are converted to these dtypes, which the
                client gets from the server.
            signature: The signature; "" for the default.

        Raises:
            CallError: the server refused the call, or did not answer.
            UserError: the rows do not match what the model declares, as far as the client can see.
        """
        at = model_at(model)
        if isinstance(rows, Mapping):
            return self._predict_arrays(at, rows, signature)
        return self.ask(at, Request(rows=rows, signature=signature))

    @abstractmethod
    def ask(self, model: str | ModelAt, request: Request) -> Answers:
        """Return the model's answers to a request with rows or tensors of JSON values.

        Raises:
            CallError: the server refused the call, or did not answer.
            UserError: the rows do not match what the model declares, as far as the client can see.
        """

    @abstractmethod
    def signatures(self, model: str | ModelAt) -> dict[str, SignatureSpec]:
        """Return the model's signatures by name.

        Raises:
            CallError: the server refused the call, or did not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @abstractmethod
    def _predict_arrays(
        self, model: ModelAt, inputs: Mapping[str, NDArray[Any]], signature: str
    ) -> Answers:
        """Return the model's answers to a dict input -> [rows, ...] array."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def model_at(model: str | ModelAt) -> ModelAt:
    """Return a `ModelAt`; for a name alone, the server chooses the version."""
    return ModelAt(name=model) if isinstance(model, str) else model
