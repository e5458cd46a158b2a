"""The interface between the server and rollouts, which choose the version for requests that do not name one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

Headers = Callable[[str], bytes | None]
"""Returns the value of a header or metadata key; None if it is missing. The name is in lower case."""


def no_headers(_: str) -> bytes | None:
    """Return None: a request that was not made by a client has no headers."""
    return None


Outputs = Mapping[str, np.ndarray[Any, Any]]
"""Output name -> the concatenated rows of all requests of a run."""


def _ignore(_requests: RunRequests, _outputs: Outputs, _ended_s: float) -> None:
    """Count nothing: the route is not a rollout's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The version that answers a request, and how its answer is counted."""

    version: int
    """The version that answers."""

    otherwise: int
    """The version that answers if `version` is not loaded."""

    key: int | None = None
    """Hash of the request's key that decided the version; None: no key did."""

    test: int = 0
    """Number of the rollout whose A/B test chose the version; 0: no test did."""

    counts: bool = True
    """Whether the rollout counts the answer. If the rollout uses a key, a request without the key is not counted."""

    compared: tuple[int, ...] = ()
    """The versions whose latencies the rollout compares. They run in the event loop only if all of them are quick: a
    version whose requests are answered by threads is slower, and would be rolled back for that."""

    copied: bool = False
    """Whether a copy of the request goes to another version, whose answer is only compared (shadow traffic). If it is
    False because that version is busy, the router counts the copy as dropped."""

    answered: Callable[[RunRequests, Outputs, float], None] = field(default=_ignore, compare=False)
    """Counts the successful answers of a run whose first request has this route. Its arguments are the requests, the
    outputs, and the run's end, seconds of the monotonic clock. The caller must not change them afterwards."""


@dataclass(kw_only=True, slots=True)
class RunRequests:
    """Requests that are answered together by one run of a version."""

    came_s: Sequence[float]
    """When each request arrived, seconds of the monotonic clock."""

    sizes: Sequence[int] = ()
    """Number of rows of each request; empty: all rows belong to one request."""

    routes: Sequence[Route] = ()
    """Where a rollout sent each request; empty: no rollout."""

    patience_s: Sequence[float] = ()
    """How long each client waits from the arrival on, seconds; empty without `routes`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyResult:
    """The result of a copied request."""

    version: int
    """The version that got the copy."""

    is_compared: bool
    """Whether the version answered the copy, so that the answers could be compared. If not, the copy was dropped to
    keep requests from waiting."""

    copies: int = 1
    """Number of copies with this result; above 1 only for dropped copies."""

    is_bad: bool = False
    """Whether the copy's answer was missing, or unusable for clients."""

    is_different: bool = False
    """Whether the copy's answer differs from the original answer."""

    took_s: float = 0.0
    """Duration of the copy's model call, seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestCopy:
    """A request that one version has answered, and that another version must answer, too."""

    signature: str
    """The signature that was called."""

    inputs: Mapping[str, np.ndarray[Any, Any]]
    """Input name -> array."""

    outputs: Outputs | None
    """The answer: output name -> array; None if the model failed."""

    took_s: float
    """Duration of the model call, seconds."""

    primary_waits: Callable[[], bool]
    """Returns whether a request of a client waits now."""

    on_result: Callable[[CopyResult], None]
    """Called with the result, maybe later in another thread. Copies that were dropped later are reported to the
    function of the last copy before them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """A model of this server."""

    base: Path
    """The folder of its versions."""

    failed: Mapping[int, str]
    """Version -> why it could not be loaded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningRequest:
    """A request in progress that a rollout sent to a version."""

    model: str
    """The model."""

    route: Route
    """Where the rollout sent the request."""

    took_s: float
    """Time since the request's arrival, seconds."""


def no_requests() -> Iterable[RunningRequest]:
    """Return nothing: no requests run."""
    return ()


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionInUse:
    """A version that a worker has loaded or is loading."""

    model: str
    """The model."""

    base: Path
    """The folder of the model's versions."""

    version: int
    """The version."""

    requests: int
    """Number of requests that the version is answering."""

    loading: bool
    """Whether the worker is loading it."""


Decide = Callable[[Headers], Route | None]
"""Returns the route of a request that names no version; None: the newest version answers."""


class Router(Protocol):
    """Sends requests to versions, and receives the results; thread-safe."""

    @property
    def routes(self) -> Mapping[str, Decide]:
        """Model with a rollout -> the function that routes its requests. Every request looks this up."""

    def route(self, model: str, headers: Headers) -> Route | None:
        """Return the route of a request that names no version; None: the newest version answers."""

    def wanted(self, model: str, base: Path) -> set[int] | None:
        """Return the versions that must be loaded; None: the versions that the model's policy selects.

        Args:
            model: The model.
            base: The folder of the model's versions.
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
            model: The model.
            route: Where the request went.
            good: Whether the request was answered in time and with a successful status.
            took_s: Duration of the request, seconds.
            outputs: Output name -> array; None: no outputs.
        """

    def add_outcomes(self, model: str, outcomes: Sequence[tuple[str, float]]) -> None:
        """Write outcomes of an A/B test: all of them, or none.

        Args:
            model: The model under test.
            outcomes: Each has the key of a user, and the outcome as a number.

        Raises:
            ServeError: no test is running, or an outcome is invalid.
        """

    def max_run_s(self, model: str, version: int, *, loading: bool = False) -> float:
        """Return the time limit of a run of a version, or of its load, seconds; infinite: no limit of its own."""

    def counts(self, model: str) -> Mapping[str, Any] | None:
        """Return the counts of a model's rollout that could not be written, as a JSON object; None: no rollout."""

    def hung(self, model: str, version: int, *, loading: bool = False) -> None:
        """Handle a run of a version, or a load, that took too long."""

    def copy(self, model: str, route: Route, request: RequestCopy) -> None:
        """Let another version answer a copy of a request whose `Route.copied` is True. Does not wait for the answer.

        Args:
            model: The model.
            route: Where the request went.
            request: The request and its answer.
        """

    def refresh(
        self,
        served: Mapping[str, Served],
        running: Callable[[], Iterable[RunningRequest]] = no_requests,
    ) -> Mapping[str, float]:
        """Read changes of the rollouts, and write the counts. The server calls this every second.

        Args:
            served: Model -> its folder and its load errors.
            running: Returns the requests that are not answered yet.

        Returns:
            Model with a rollout -> when its state was last read, seconds of the monotonic clock.
        """


class Supervisor(Protocol):
    """Supervises the rollouts in the process that starts the workers."""

    def begin(self, folder: Path) -> None:
        """Start to supervise. The workers share `folder` until the server ends."""

    def look(self, in_use: Sequence[VersionInUse]) -> None:
        """Advance the rollouts. Called every second in a separate thread.

        Args:
            in_use: The versions that all workers have loaded or are loading.
        """

    def worker_ended(self, in_use: Sequence[VersionInUse], *, how: str) -> bool:
        """Stop the traffic to the version under rollout that killed a worker. Called before another worker starts.

        Args:
            in_use: The versions that the worker had loaded or was loading.
            how: How the worker ended.

        Returns:
            Whether a version under rollout may have killed the worker.
        """
