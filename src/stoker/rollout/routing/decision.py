"""Decides, from a state, which version answers a request."""

from __future__ import annotations

import math
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from stoker.rollout.counts.counts import MEASURED
from stoker.rollout.split import TrafficSplit
from stoker.rollout.state.state import ACTIVE, Phase, RolloutState
from stoker.serve.routing import Headers, Outputs, Route, RunRequests

MAX_KEY_BYTES = 256
"""Maximum length of a key whose route is cached: clients choose the keys, and headers may be large."""

MAX_ROUTES = 10_000
"""Maximum number of keys whose routes are cached: computing a route takes three times as long as looking it up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """A state, prepared for fast routing decisions."""

    state: RolloutState
    decide: Callable[[Headers], Route]
    """Returns the route of a request."""

    copied: float = 0.0
    """Share of the requests that are copied to the candidate."""

    since_s: float = field(default_factory=time.monotonic)
    """When this process first read a state of this stage, by the monotonic clock: the operator's clock may be wrong."""

    @property
    def stage(self) -> int:
        """The stage for which answers are counted."""
        return MEASURED if self.state.phase is Phase.MEASURING else self.state.stage

    @property
    def slow_s(self) -> float:
        """Latency above which an answer is slow for any gate, seconds."""
        active = self.state.phase in ACTIVE
        return min(self.state.slow_s.values(), default=math.inf) if active else math.inf

    @property
    def is_warming_up(self) -> bool:
        """Whether the stage's warm-up lasts for this process; latency is not judged then."""
        known_s = time.monotonic() - self.since_s
        return self.state.phase is Phase.RUNNING and known_s < self.state.settings.warm_up_s


def _compared(state: RolloutState, split: TrafficSplit) -> tuple[int, ...]:
    """The versions whose slow answers are counted."""
    if state.phase not in ACTIVE:
        return ()
    return (state.stable,) if state.phase is Phase.BAKING else tuple(split.weights)


def copied_share(state: RolloutState) -> float:
    """Return the share of requests that are copied to the candidate in a shadow stage, in [0, 1]."""
    return state.current.shadow if state.phase in (Phase.RUNNING, Phase.PAUSED) else 0.0


def _shadow_decision(
    state: RolloutState, key_hash: Callable[[bytes], int], takes_copy: Callable[[], bool]
) -> Callable[[Headers], Route]:
    """Return a function that routes to the baseline, in a shadow stage; only answers to copied requests are counted."""
    share, key_of = copied_share(state), _key_reader(state.settings.key)
    alone = Route(version=state.baseline, otherwise=state.baseline, counts=False)
    copied = replace(alone, copied=True)

    def in_shadow(headers: Headers) -> Route:
        if random.random() >= share:  # noqa: S311 - a sample
            return alone
        if not state.settings.key:
            return copied if takes_copy() else alone
        key = key_of(headers)
        # In a rollout by key, requests without a key do not take part.
        return replace(copied, key=key_hash(key)) if key and takes_copy() else alone

    return in_shadow


def _key_reader(key: str) -> Callable[[Headers], bytes | None]:
    """Return a function that reads a request's key: a cookie if `key` is `cookie:NAME`, else the header `key`."""
    kind, _, cookie = key.partition(":")
    if kind == "cookie":
        return partial(_cookie, cookie.encode())
    header = key.lower()
    return lambda headers: headers(header)


def decision(
    state: RolloutState,
    split: TrafficSplit,
    key_hash: Callable[[bytes], int],
    answered: Callable[[RunRequests, Outputs, float], None],
    takes_copy: Callable[[], bool],
) -> Callable[[Headers], Route]:
    """Return the function that routes requests by a state. What does not depend on a request is computed here, once.

    Args:
        state: The state.
        split: The traffic split of the state.
        key_hash: Returns the hash of a key.
        answered: Called with each answer, to count it.
        takes_copy: Returns whether to copy a request of a shadow stage; called once for each request that may be
            copied.
    """
    is_active = state.phase in ACTIVE
    compared = _compared(state, split)
    test = state.rollout if state.is_test else 0

    def route_to(version: int, *, counts: bool = True, key: int | None = None) -> Route:
        return Route(
            version=version,
            otherwise=state.previous or state.baseline,
            key=key,
            counts=counts,
            compared=compared,
            test=0 if key is None else test,
            answered=answered,
        )

    if state.phase not in (Phase.RUNNING, Phase.PAUSED, Phase.TESTING):
        stable = route_to(state.stable, counts=is_active)
        return lambda _: stable
    if copied_share(state):
        return _shadow_decision(state, key_hash, takes_copy)
    fixed = {version: route_to(version) for version in split.weights}
    if state.current.header:
        header = state.current.header.lower()
        with_header, without = fixed[state.candidate], fixed[state.baseline]
        return lambda headers: without if headers(header) is None else with_header
    if not state.settings.key:
        return split.at_random(fixed)
    version_of = split.by_crc({version: version for version in split.weights})
    return _by_key(
        _key_reader(state.settings.key),
        lambda key: route_to(version_of(zlib.crc32(key)), key=key_hash(key)),
        without_key=route_to(state.baseline, counts=False),
    )


def _by_key(
    key_of: Callable[[Headers], bytes | None],
    route_of: Callable[[bytes], Route],
    *,
    without_key: Route,
) -> Callable[[Headers], Route]:
    """Return a function that routes a request by its key; the routes of the newest keys are cached."""
    known: dict[bytes, Route] = {}

    def by_key(headers: Headers) -> Route:
        key = key_of(headers)
        if not key:  # all clients that send an empty key would count as one user
            return without_key
        route = known.get(key)
        if route is None:
            route = route_of(key)
            _keep(known, key, route)
        return route

    return by_key


def _keep(known: dict[bytes, Route], key: bytes, route: Route) -> None:
    """Cache a route, unless its key is long."""
    if len(key) <= MAX_KEY_BYTES:
        if len(known) >= MAX_ROUTES:
            known.clear()
        known[key] = route


def _cookie(name: bytes, headers: Headers) -> bytes | None:
    """Return the value of a cookie; None if the request has no such cookie."""
    for part in (headers("cookie") or b"").split(b";"):
        given, _, value = part.partition(b"=")
        if given.strip() == name:
            return value.strip()
    return None
