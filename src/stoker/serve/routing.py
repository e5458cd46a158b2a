"""Which version answers a request that names none: what the server asks of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

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

    compared: tuple[int, ...] = ()
    """The versions whose latencies a rollout compares. They run in the event loop only if each has proven to be quick:
    a version that a thread answers is slower, and would be rolled back for it."""


class AnsweredRun(NamedTuple):
    """Requests that one run of one version answered."""

    routes: Sequence[Route]
    """Where each went."""

    came_s: Sequence[float]
    """When each came, by the monotonic clock."""

    patience_s: Sequence[float]
    """How long each client waited from then on, seconds."""

    sizes: Sequence[int]
    """How many rows each has; empty if all are of one request."""

    outputs: Mapping[str, np.ndarray[Any, Any]]
    """Output name -> the rows of all requests, one after the other."""

    ended_s: float
    """When the run ended."""


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

    def answered_together(self, model: str, run: AnsweredRun) -> None:
        """Count successful answers of one run.

        Args:
            model: the model.
            run: its requests and outputs, which the caller does not change any more.
        """

    def refresh(self, served: Mapping[str, Served]) -> None:
        """Read what has changed, and write what was counted; the server calls it every second.

        Args:
            served: model -> where it is and how it loads.
        """
