"""The interface of additional paths on the REST port, which packages above `serve` implement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stoker.serve.routing import Served
from stoker.serve.security.auth import Role


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraRequest:
    """A complete request whose key was checked."""

    method: str
    """The HTTP method."""

    path: str
    """The unescaped path."""

    query: Mapping[str, str]
    """Query parameter -> its last value."""

    body: bytes
    """The whole body, decompressed."""

    who: str
    """Owner of the API key; empty where the server has no keys."""

    served: Callable[[], Mapping[str, Served]]
    """Returns model -> its folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraAnswer:
    """The answer."""

    status: int = 200
    """The HTTP status."""

    content: Any
    """A JSON object."""


class ExtraRoutes(Protocol):
    """Answers paths that the server does not know; thread-safe."""

    def role_of(self, method: str, path: str) -> Role | None:
        """Return the role that a request needs; None: this path is not handled here. Called for each request."""

    def answer(self, request: ExtraRequest) -> ExtraAnswer:
        """Answer a request, in a thread that may block.

        Raises:
            UserError: the requested change is not possible (HTTP 400).
            ServeError: the request cannot be answered; the code says why.
        """

    def families(self, served: Mapping[str, Served]) -> Sequence[Sequence[str]]:
        """Return lines of further metrics in Prometheus's text format.

        Args:
            served: Model -> its folder.
        """
