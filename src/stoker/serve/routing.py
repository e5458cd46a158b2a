"""Which version answers a request that names none: what the server asks of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Headers = Callable[[str], bytes | None]
"""Gives the value of a header or metadata key, whose name is in lower case; None if the request has none."""


def no_headers(_: str) -> bytes | None:
    """Nothing: a request that was not made by a client."""
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Where a request goes."""

    version: int
    """The version that answers."""

    otherwise: int
    """The version that answers where that one is not loaded."""

    key: int | None = None
    """Hash of the key that the version was chosen by."""

    counts: bool = True
    """Whether the answer counts: a request without the key that others have does not."""

    copied: bool = False
    """Whether a copy of the request goes to another version, whose answer is only compared (shadow traffic)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyResult:
    """What became of the copy of a request."""

    version: int
    """The version that was asked."""

    is_compared: bool
    """Whether it was asked; else the copy was dropped, so that no request waits."""

    is_bad: bool = False
    """Whether it gave no answer, or one that clients could not use."""

    is_different: bool = False
    """Whether its answer is another one."""

    took_s: float = 0.0
    """Its time in the model, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestCopy:
    """A request that a version has answered, for another version to answer."""

    signature: str
    """The signature that was called."""

    inputs: Mapping[str, np.ndarray[Any, Any]]
    """Input name -> array."""

    outputs: Mapping[str, np.ndarray[Any, Any]] | None
    """The answer: output name -> array; None if the model failed."""

    took_s: float
    """Time of the call, seconds."""

    primary_waits: Callable[[], bool]
    """Whether a request waits for its model now."""

    on_result: Callable[[CopyResult], None]
    """Called once, maybe by another thread and later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A model of this server."""

    base: Path
    """The folder of its versions."""

    failed: Mapping[int, str]
    """Version -> why it could not be loaded."""


class Router(Protocol):
    """Sends requests to versions, and hears how they were answered; may be used by many threads."""

    def route(self, model: str, headers: Headers) -> Route | None:
        """The version for a request that names none; None: the newest."""

    def wanted(self, model: str, base: Path) -> set[int] | None:
        """The versions that must be loaded; None: those of the model's policy.

        Args:
            model: the model.
            base: the folder of its versions.
        """

    def has_rollout(self, model: str) -> bool:
        """Whether it decides for this model."""

    def answered(
        self,
        model: str,
        route: Route,
        *,
        good: bool,
        took_s: float,
        outputs: Mapping[str, np.ndarray[Any, Any]] | None,
    ) -> None:
        """Count an answer.

        Args:
            model: the model.
            route: where the request went.
            good: whether it was answered in time, with a status of success.
            took_s: its duration, seconds.
            outputs: output name -> array; None if there are none.
        """

    def copy(self, model: str, route: Route, request: RequestCopy) -> None:
        """Have another version answer a request whose `Route.copied` is true; returns at once.

        Args:
            model: the model.
            route: where the request went.
            request: the request and its answer.
        """

    def refresh(self, served: Mapping[str, Served]) -> None:
        """Read what has changed, and write what was counted; the server calls it every second.

        Args:
            served: model -> where it is and how it loads.
        """
