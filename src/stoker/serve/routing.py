"""The interface between the server and a rollout: which version answers a request that names none."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Headers = Callable[[str], bytes | None]
"""Returns the value of a header or metadata key, whose name is in lower case; None without it."""


def no_headers(_: str) -> bytes | None:
    """Return None: the request was not made by a client."""
    return None


Outputs = Mapping[str, np.ndarray[Any, Any]]
"""Output name -> the rows of all requests of a run, concatenated."""


def _ignore(_requests: RunRequests, _outputs: Outputs, _ended_s: float) -> None:
    """Count nothing: no rollout made the route."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The version that answers a request, and how its answer is counted."""

    version: int
    """The version that answers."""

    otherwise: int
    """The version that answers if the first one is not loaded."""

    key: int | None = None
    """Hash of the key that decided the version."""

    test: int = 0
    """Number of the rollout whose A/B test chose the version; 0: no test did."""

    counts: bool = True
    """Whether the answer counts: if the rollout has a key, a request without it does not count."""

    compared: tuple[int, ...] = ()
    """The versions whose latencies a rollout compares. They run in the event loop only if each has proven to be quick:
    a version that a thread answers is slower, and would be rolled back for it."""

    copied: bool = False
    """Whether a copy of the request goes to another version, whose answer is only compared (shadow traffic). Where it
    is false because that version is at work, the router counts the copy as dropped."""

    answered: Callable[[RunRequests, Outputs, float], None] = field(default=_ignore, compare=False)
    """Counts successful answers of the run whose first route this is: its requests, its outputs, and when it ended, by
    the monotonic clock. The caller changes none of them afterwards."""


@dataclass(kw_only=True, slots=True)
class RunRequests:
    """Requests that one run of one version answers."""

    came_s: Sequence[float]
    """When each request arrived, by the monotonic clock."""

    sizes: Sequence[int] = ()
    """How many rows each request has; empty: all belong to one request."""

    routes: Sequence[Route] = ()
    """Where a rollout sent each; empty without a rollout."""

    patience_s: Sequence[float] = ()
    """How long each client waits from then on, seconds; only with routes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyResult:
    """The result of a copied request."""

    version: int
    """The version that got the copy."""

    is_compared: bool
    """Whether the version answered it; otherwise the copy was dropped, so that no request waits."""

    copies: int = 1
    """Number of copies with this result; above 1 only for dropped ones."""

    is_bad: bool = False
    """Whether the answer was missing or unusable for clients."""

    is_different: bool = False
    """Whether the answer differs."""

    took_s: float = 0.0
    """Its time in the model, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestCopy:
    """A request that one version has answered, to be answered by another one."""

    signature: str
    """The signature that was called."""

    inputs: Mapping[str, np.ndarray[Any, Any]]
    """Input name -> array."""

    outputs: Outputs | None
    """The answer: output name -> array; None if the model failed."""

    took_s: float
    """Time of the call, seconds."""

    primary_waits: Callable[[], bool]
    """Returns whether a request waits for its model now."""

    on_result: Callable[[CopyResult], None]
    """Called for the result, maybe later by another thread. The last one is also called for copies dropped since."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A model of this server."""

    base: Path
    """The folder of its versions."""

    failed: Mapping[int, str]
    """Version -> why it could not be loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningRequest:
    """An unanswered request that a rollout sent to a version."""

    model: str
    """The model."""

    route: Route
    """Its route."""

    took_s: float
    """Time since its arrival, seconds."""


def no_requests() -> Iterable[RunningRequest]:
    """Return nothing: no requests run."""
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionInUse:
    """What a worker is doing with a version."""

    model: str
    """The model."""

    base: Path
    """The folder of its versions."""

    version: int
    """The version."""

    requests: int
    """Number of requests that it is answering."""

    loading: bool
    """Whether the worker is loading it."""


Decide = Callable[[Headers], Route | None]
"""Returns the version for a request that names none; None: the newest."""


class Router(Protocol):
    """Sends requests to versions, and receives the results; thread-safe."""

    @property
    def routes(self) -> Mapping[str, Decide]:
        """Model -> its routing decision, for each model with a rollout. Every request looks this up."""

    def route(self, model: str, headers: Headers) -> Route | None:
        """The version for a request that names none; None: the newest."""

    def wanted(self, model: str, base: Path) -> set[int] | None:
        """The versions that must be loaded; None: those of the model's policy.

        Args:
            model: the model.
            base: the folder of its versions.
        """

    def barred(self, model: str) -> Collection[int]:
        """The versions that must not be loaded, even if a label names them."""

    def answered(
        self,
        model: str,
        route: Route,
        *,
        good: bool,
        took_s: float,
        outputs: Outputs | None,
    ) -> None:
        """Count an answer.

        Args:
            model: the model.
            route: where the request went.
            good: whether it was answered in time and with a successful status.
            took_s: its duration, seconds.
            outputs: output name -> array; None if there are none.
        """

    def add_outcomes(self, model: str, outcomes: Sequence[tuple[str, float]]) -> None:
        """Write the outcomes of an A/B test, all or none.

        Args:
            model: the model under test.
            outcomes: key of a user, and the outcome as a number.

        Raises:
            ServeError: no test is running, or an outcome is invalid.
        """

    def max_run_s(self, model: str, version: int, *, loading: bool = False) -> float:
        """The longest run of a version, or its longest load, seconds; infinite without a limit of its own."""

    def counts(self, model: str) -> Mapping[str, Any] | None:
        """The counts of a model that could not be written, as a JSON object; None without a rollout."""

    def hung(self, model: str, version: int, *, loading: bool = False) -> None:
        """Handle that a run of a version, or its load, took too long."""

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
        """Read changes, and write the counts; the server calls it every second.

        Args:
            served: model -> its folder and its load errors.
            running: the requests that are not answered yet.

        Returns:
            Model with a rollout -> when its state was last read, seconds of the monotonic clock.
        """


class Supervisor(Protocol):
    """Supervises the rollouts in the process that starts the workers."""

    def begin(self, folder: Path) -> None:
        """Args: folder: shared by the workers, until the server ends."""

    def look(self, in_use: Sequence[VersionInUse]) -> None:
        """Advance the rollouts; called every second in a separate thread.

        Args:
            in_use: what all workers have loaded.
        """

    def worker_ended(self, in_use: Sequence[VersionInUse], *, how: str) -> bool:
        """Take the version under rollout that killed a worker off the traffic; called before another worker starts.

        Args:
            in_use: what the worker was doing.
            how: how it ended.

        Returns:
            Whether there was such a version.
        """
