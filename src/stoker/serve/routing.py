"""Which version answers a request that names none: what the server asks of a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

Headers = Callable[[str], bytes | None]
"""Gives the value of a header or metadata key, whose name is in lower case; None if the request has none."""


def no_headers(_: str) -> bytes | None:
    """Nothing: a request that was not made by a client."""
    return None


def _ignore(_: AnsweredRun) -> None:
    """Count nothing: no rollout made the route."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """Where a request goes."""

    version: int
    """The version that answers."""

    otherwise: int
    """The version that answers where that one is not loaded."""

    key: int | None = None
    """Hash of the key that the version was chosen by."""

    test: int = 0
    """Number of the rollout whose A/B test chose the version; 0: none did."""

    counts: bool = True
    """Whether the answer counts: a request without the key that others have does not."""

    compared: tuple[int, ...] = ()
    """The versions whose latencies a rollout compares. They run in the event loop only if each has proven to be quick:
    a version that a thread answers is slower, and would be rolled back for it."""

    copied: bool = False
    """Whether a copy of the request goes to another version, whose answer is only compared (shadow traffic). Where it
    is false because that version is at work, the router counts the copy as dropped."""

    answered: Callable[[AnsweredRun], None] = field(default=_ignore, compare=False)
    """Counts successful answers of one run, whose first route this is. The caller changes the run no more."""


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
class CopyResult:
    """What became of the copy of a request."""

    version: int
    """The version that was asked."""

    is_compared: bool
    """Whether it was asked; else the copy was dropped, so that no request waits."""

    copies: int = 1
    """How many copies were dropped."""

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
    """Called once, maybe by another thread and later; and again for copies that were dropped since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A model of this server."""

    base: Path
    """The folder of its versions."""

    failed: Mapping[int, str]
    """Version -> why it could not be loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningRequest:
    """A request that a rollout sent to a version, and that is not answered yet."""

    model: str
    """The model."""

    route: Route
    """Where it went."""

    took_s: float
    """How long it has been here, seconds."""


def no_requests() -> Iterable[RunningRequest]:
    """None: nothing runs."""
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionInUse:
    """What a worker does with a version at a moment."""

    model: str
    """The model."""

    base: Path
    """The folder of its versions."""

    version: int
    """The version."""

    requests: int
    """Requests that it answers."""

    loading: bool
    """Whether the worker loads it."""


Decide = Callable[[Headers], Route | None]
"""Gives the version for a request that names none; None: the newest."""


class Router(Protocol):
    """Sends requests to versions, and hears how they were answered; may be used by many threads."""

    @property
    def routes(self) -> Mapping[str, Decide]:
        """Model -> what decides; of each model with a rollout. Every request is looked up here."""

    def route(self, model: str, headers: Headers) -> Route | None:
        """The version for a request that names none; None: the newest."""

    def wanted(self, model: str, base: Path) -> set[int] | None:
        """The versions that must be loaded; None: those of the model's policy.

        Args:
            model: the model.
            base: the folder of its versions.
        """

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

    def add_outcomes(self, model: str, outcomes: Sequence[tuple[str, float]]) -> None:
        """Write the outcomes of an A/B test, all or none.

        Args:
            model: the model under test.
            outcomes: key of a user, and what the user did as a number.

        Raises:
            ServeError: there is no test, or an outcome is refused.
        """

    def max_run_s(self, model: str, version: int) -> float:
        """The longest run of a version, seconds; infinite if it sets no limit of its own."""

    def counts(self, model: str) -> Mapping[str, Any] | None:
        """As JSON can hold it, what was counted of a model and could not be written; None without a rollout."""

    def hung(self, model: str, version: int) -> None:
        """A run of a version took longer than it may."""

    def copy(self, model: str, route: Route, request: RequestCopy) -> None:
        """Have another version answer a request whose `Route.copied` is true; returns at once.

        Args:
            model: the model.
            route: where the request went.
            request: the request and its answer.
        """

    def refresh(
        self,
        served: Mapping[str, Served],
        running: Callable[[], Iterable[RunningRequest]] = no_requests,
    ) -> Mapping[str, float]:
        """Read what has changed, and write what was counted; the server calls it every second.

        Args:
            served: model -> where it is and how it loads.
            running: the requests that are not answered yet.

        Returns:
            Model with a rollout -> when its state was last read, seconds of the monotonic clock.
        """


class Supervisor(Protocol):
    """Looks after the rollouts in the process that starts the workers."""

    def begin(self, folder: Path) -> None:
        """Args: folder: what the workers have in common, until the server ends."""

    def look(self, in_use: Sequence[VersionInUse]) -> None:
        """Take the rollouts forward; called every second in a thread of its own.

        Args:
            in_use: what all workers have loaded.
        """

    def worker_ended(self, in_use: Sequence[VersionInUse], *, how: str) -> bool:
        """Take the version under rollout that a worker died of off the traffic; called before another starts.

        Args:
            in_use: what the worker was doing.
            how: what it ended by.

        Returns:
            Whether there was one.
        """
