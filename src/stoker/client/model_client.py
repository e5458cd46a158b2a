"""What the REST and the gRPC client share: their calls, answers, and errors.

CallError            UserError: one line, exit 2
|- NoAnswerError     no connection, unknown host name, time-out, broken connection
|- RefusedError      the server refused: its status and its own words
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
        """Build the one line.

        Args:
            rule: What was expected.
            status: "404" over REST, "NOT_FOUND" over gRPC.
            said: The server's own words.
            fix: The next action.
        """
        self.status = status
        self.said = said
        got = f"{status}: {said.rstrip('.')}" if said else status
        super().__init__(rule, got=Plain(got), fix=fix)


def refused_fix(status: str) -> str:
    """Return the next action for a status, "" if it depends on the server."""
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
    """The answer of one call."""

    outputs: Mapping[str, NDArray[Any]]
    """Output -> [rows, ...]; over REST a single output has no name and is "" here. Where NumPy is not
    installed, REST gives nested lists."""

    version: int | None = None
    """The version that answered; unknown over REST."""


def from_rows(predictions: Sequence[Any]) -> dict[str, NDArray[Any]]:
    """Return the outputs in the value of `predictions`: a value or an object of outputs per row.

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
    """Return the outputs in the value of `outputs`: a tensor, or an object of tensors."""
    if isinstance(outputs, dict) and not _is_bytes(outputs):
        return {name: as_array(values) for name, values in outputs.items()}
    return {ONLY: as_array(outputs)}


def as_array(values: Any) -> NDArray[Any]:
    """Return nested lists as an array; strings are `str` objects, base64 `bytes`, ragged rows objects."""
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


class ModelClient(AbstractContextManager["ModelClient"], ABC):
    """A client of one server; `with` closes it."""

    def __init__(self, url: str, *, scheme: str, connection: Connection | None) -> None:
        """Args: url: the server's; scheme: of a URL without one; connection: time-out, token, TLS.

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
            model: Its name, or a version of it.
            rows: One value or one object of inputs per row; or [rows, ...] arrays by input. Over gRPC, arrays
                need the dtypes that the model declares; for rows, the client asks the server for them.
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
        """Return the model's answers for rows or tensors of JSON.

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
        """Return the model's answers for [rows, ...] arrays by input."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def model_at(model: str | ModelAt) -> ModelAt:
    """Return a model by its name, with the version that the server chooses."""
    return ModelAt(name=model) if isinstance(model, str) else model
