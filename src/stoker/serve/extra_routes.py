"""Paths that a room above the server answers on the REST port: what the server asks of them."""

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
    """Parameter of the query -> its last value."""

    body: bytes
    """The whole body, decompressed."""

    who: str
    """Owner of the API key; empty where the server has no keys."""

    served: Callable[[], Mapping[str, Served]]
    """Gives model -> where it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExtraAnswer:
    """The answer."""

    status: int = 200
    """The HTTP status."""

    content: Any
    """What JSON can hold."""


class ExtraRoutes(Protocol):
    """Answers paths that the server does not know; may be used by many threads."""

    def role_of(self, method: str, path: str) -> Role | None:
        """The role that a request needs; None: the path is not one of its own. Called for each request."""

    def answer(self, request: ExtraRequest) -> ExtraAnswer:
        """Answer a request, in a thread that may block.

        Raises:
            UserError: the client asked for something that is not possible (HTTP 400).
            ServeError: it cannot be answered; the code says why.
        """

    def families(self, served: Mapping[str, Served]) -> Sequence[Sequence[str]]:
        """Lines of each further metric for Prometheus.

        Args:
            served: model -> where it is.
        """
