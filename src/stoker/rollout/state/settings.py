"""Settings of a rollout: its stages, gates, limits and messages."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from stoker.core.errors import ConfigError, Plain
from stoker.rollout.http_call import check_url
from stoker.rollout.state.stages import parse_stages
from stoker.rollout.state.user_gates import UserGate
from stoker.rollout.state.webhook import Webhook
from stoker.rollout.statistics.evidence import ALLOWED_RATIO, ALPHA
from stoker.rollout.statistics.prediction_shift import MAX_SHIFT

BAD, SLOW_P99, SLOW_P50, SHIFT = "bad_answers", "slow_p99", "slow_p50", "prediction_shift"
BUILT_IN = (BAD, SLOW_P99, SLOW_P50, SHIFT)
"""Names of the built-in gates, which every rollout has."""

_KEY = re.compile(r"(?:cookie:)?[A-Za-z0-9!#$&'*+.^_`|~-]+")
"""Syntax of names of headers, gRPC metadata keys and cookies. Source: RFC 9110, `token`."""

_AT_LEAST_0 = (
    *("min_requests", "step_time_s", "warm_up_s", "bake_s"),
    *("inconclusive_limit_s", "keep_previous_s", "shadow_tolerance"),
)
"""Settings whose value must be a number of at least 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutSettings:
    """Settings of a rollout: its stages, gates, limits and messages."""

    stages: str = "1,10,50,100"
    """The stages; see `parse_stages`."""

    key: str = ""
    """Header, metadata key or `cookie:NAME` that identifies a user, who then keeps a version; empty: requests are
    assigned independently."""

    step_time_s: float = 300.0
    """Minimum time of a stage without a time of its own, seconds, in addition to `warm_up_s`."""

    min_requests: int = 500
    """Minimum number of requests that the candidate must answer in a stage before the next stage starts."""

    warm_up_s: float = 30.0
    """Time at the start of a stage in which latency is not judged, seconds."""

    bake_s: float = 0.0
    """Time after 100 % during which the gates can still roll back, seconds."""

    allowed_ratio: float = ALLOWED_RATIO
    """Bad or slow answers of the candidate per bad or slow answer of the baseline that still count as not worse."""

    alpha: float = ALPHA
    """Maximum probability that a candidate that is not worse is rolled back."""

    max_shift: float = MAX_SHIFT
    """Largest accepted Kolmogorov distance between the predictions of both versions."""

    shadow_tolerance: float = 1e-3
    """In a shadow stage, two numbers are equal if they differ by at most this times the larger of 1 and the
    baseline's number."""

    inconclusive_limit_s: float = 300.0
    """The rollout is paused if a gate has no answer for this long, seconds."""

    strict: bool = False
    """Whether a gate without an answer for that time rolls back instead of pausing."""

    dry_run: tuple[str, ...] = ()
    """Gates that are measured and shown, but have no effect."""

    load_limit_s: float = 600.0
    """Maximum time to load the version, seconds. A server that starts waits until the version is loaded."""

    keep_previous_s: float = 1_800.0
    """How long the previous version stays loaded after 100 %, seconds."""

    servers: tuple[str, ...] = ()
    """REST addresses of servers that cannot write to the repository; the controller fetches their counts."""

    user_gates: tuple[UserGate, ...] = ()
    """Gates of the user: Prometheus queries and Python functions."""

    webhooks: tuple[Webhook, ...] = ()
    """Web services that are called before the rollout continues."""

    notify: tuple[str, ...] = ()
    """URLs that get each change as a message in Slack's format."""

    @property
    def gates(self) -> int:
        """Number of gates that share `alpha`."""
        return len(BUILT_IN) + len(self.user_gates)

    def __post_init__(self) -> None:
        parse_stages(self.stages)
        if self.key and not _KEY.fullmatch(self.key):
            raise ConfigError(
                "The key of a rollout must be the name of a header, or cookie:NAME",
                got=self.key,
                fix="For example x-user or cookie:uid.",
            )
        for server in self.servers:
            if not server.startswith(("http://", "https://")):
                raise ConfigError(
                    "A server of a rollout must be a REST address",
                    got=server,
                    fix="Write http://HOST:8501.",
                )
            check_url(server, where="A server of a rollout")
        for url in self.notify:
            check_url(url, where="A notification")
        names = [gate.name for gate in self.user_gates]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError("The names of gates must differ", got=twice[0])
        for name in _AT_LEAST_0:
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be a number of at least 0",
                    got=getattr(self, name),
                    fix="Set it to 0 or more.",
                )
        if not 0 < self.load_limit_s < math.inf:
            raise ConfigError(
                "load_limit_s must be a time above 0",
                got=self.load_limit_s,
                fix="Leave it out for 10 minutes.",
            )
        if (
            not 1.0 <= self.allowed_ratio < math.inf
            or not 0.0 < self.alpha < 1.0
            or not 0.0 < self.max_shift <= 1.0
        ):
            raise ConfigError(
                "allowed_ratio must be at least 1, alpha and max_shift between 0 and 1",
                got=Plain(f"{self.allowed_ratio:g}, {self.alpha:g}, {self.max_shift:g}"),
                fix="Leave them out to use the defaults.",
            )
