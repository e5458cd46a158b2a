"""What can be asked of a model server, over either protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from stoker.client.answers import Answers
from stoker.client.connection import Connection, parse_address
from stoker.client.rows import Request
from stoker.client.signature import ModelAt, SignatureSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray


class ModelClient(AbstractContextManager["ModelClient"], ABC):
    """A client of one server; given back at the end of `with`."""

    def __init__(self, url: str, *, scheme: str, connection: Connection | None) -> None:
        """Args: url: the server's; scheme: what it means without one; connection: how it is asked.

        Raises:
            ConfigError: it is no URL of a server.
        """
        self.address = parse_address(url, scheme=scheme)
        self._how = connection or Connection()

    def predict(
        self,
        model: str | ModelAt,
        rows: Sequence[Any] | NDArray[Any] | Mapping[str, NDArray[Any]],
        *,
        signature: str = "",
    ) -> Answers:
        """Ask for rows' answers.

        Args:
            model: Its name, or which version of it.
            rows: One value, or one object of inputs, a row; or [rows, ...] arrays by input. Over
                gRPC those have the dtypes that the model declares; for rows it is asked for them.
            signature: The usual one if "".

        Raises:
            CallError: the server refused, or did not answer.
            UserError: the rows are not what the model declares, as far as the client can see.
        """
        at = model_at(model)
        if isinstance(rows, Mapping):
            return self._predict_arrays(at, rows, signature)
        return self.ask(at, Request(rows=rows, signature=signature))

    @abstractmethod
    def ask(self, model: str | ModelAt, request: Request) -> Answers:
        """Ask for the answers of JSON's rows or tensors.

        Raises:
            CallError: the server refused, or did not answer.
            UserError: the rows are not what the model declares, as far as the client can see.
        """

    @abstractmethod
    def signatures(self, model: str | ModelAt) -> dict[str, SignatureSpec]:
        """What can be called, by name.

        Raises:
            CallError: the server refused, or did not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the connection back."""

    @abstractmethod
    def _predict_arrays(
        self, model: ModelAt, inputs: Mapping[str, NDArray[Any]], signature: str
    ) -> Answers:
        """Ask for the answers of [rows, ...] arrays by input."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()


def model_at(model: str | ModelAt) -> ModelAt:
    """The model of a name, whatever version the server takes."""
    return ModelAt(name=model) if isinstance(model, str) else model
